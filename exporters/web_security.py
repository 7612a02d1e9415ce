"""Who may read the Prometheus endpoint, and over what: TLS by the standard library, users from a file.

Files are read again when they change, so that certificates and passwords can be rotated without a restart; a
new file that cannot be used leaves the old one in force.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class WebSecurityError(Exception):
    """A file of the endpoint's security cannot be used; the message names it and the remedy."""


@dataclass(frozen=True)
class WebSecurity:
    """What the user asked for; nothing is plain HTTP for everybody who reaches the address."""

    certificate: Path | None = None
    """PEM, with the intermediate certificates."""
    key: Path | None = None
    """PEM without a passphrase; None: it stands in `certificate`."""
    client_ca: Path | None = None
    """PEM: only clients with a certificate of these are served."""
    users: Path | None = None
    """Lines `NAME:PASSWORD`; readers of `/metrics` must be one of them."""


class Guard:
    """TLS and users of one endpoint.

    Raises:
        WebSecurityError: a file is missing or unusable, or the settings make no sense together.
    """

    def __init__(self, security: WebSecurity) -> None:
        self._tls: _Reloaded[ssl.SSLContext] | None = None
        self._users: _Reloaded[dict[bytes, bytes]] | None = None
        certificate, key, client_ca = security.certificate, security.key, security.client_ca
        if certificate is not None:
            files = tuple(file for file in (certificate, key, client_ca) if file is not None)
            self._tls = _Reloaded(files, lambda: _context(certificate, key, client_ca))
        elif key is not None or client_ca is not None:
            raise WebSecurityError("a key or a client CA needs a certificate: TLS is off without one")
        if security.users is not None:
            users = security.users
            self._users = _Reloaded((users,), lambda: _read_users(users))

    @property
    def encrypts(self) -> bool:
        """Whether TLS is on."""
        return self._tls is not None

    @property
    def asks(self) -> bool:
        """Whether readers have to name themselves."""
        return self._users is not None

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context for a new connection; None without TLS."""
        return None if self._tls is None else self._tls.current()

    def allows(self, authorization: str) -> bool:
        """Return whether the header of a request (`Basic ...`) names a user with the right password."""
        if self._users is None:
            return True
        scheme, _, encoded = authorization.strip().partition(" ")
        try:
            name, _, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        except (binascii.Error, ValueError):
            return False
        known = self._users.current().get(name)
        # A name that is unknown takes the same time as a wrong password.
        right = hmac.compare_digest(_digest(password), known if known is not None else _digest(b"\0"))
        return scheme.lower() == "basic" and known is not None and right


class _Reloaded(Generic[T]):
    """A value made of files, made again when one of them changes."""

    def __init__(self, files: tuple[Path, ...], make: Callable[[], T]) -> None:
        self._files, self._make = files, make
        self._lock = threading.Lock()
        self._seen = self._stamp()
        self._value = make()

    def current(self) -> T:
        with self._lock:
            stamp = self._stamp()
            if stamp != self._seen:
                self._seen = stamp
                try:
                    self._value = self._make()
                except WebSecurityError as error:
                    logger.warning("%s. What was read before stays in force", error)
            return self._value

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(file) for file in self._files)


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _context(certificate: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An empty passphrase, since OpenSSL would ask for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
        if client_ca is not None:
            context.load_verify_locations(client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        files = ", ".join(str(file) for file in (certificate, key, client_ca) if file is not None)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise WebSecurityError(
            f"TLS cannot use {files}: {reason}. They must be PEM, readable, and belong to each other"
        ) from error
    return context


def _read_users(file: Path) -> dict[bytes, bytes]:
    """Return digests of passwords by name: they are compared in constant time, and none stays in memory."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise WebSecurityError(f"{file} cannot be read: {error.strerror or error}") from error
    users: dict[bytes, bytes] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith(b"#"):
            continue
        name, colon, password = line.partition(b":")
        if not (colon and name and password):
            raise WebSecurityError(f"{file}, line {number}: write NAME:PASSWORD")
        users[name] = _digest(password)
    if not users:
        raise WebSecurityError(f"{file} names no user: write NAME:PASSWORD, one a line")
    return users


def _digest(password: bytes) -> bytes:
    return hashlib.sha256(password).digest()
