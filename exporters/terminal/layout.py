"""Lines of known width: the few layout operations that the screen is made of.

A `Line` is a tuple of (text, style) spans. Everything here counts terminal cells, not characters, and no
function returns a line wider than it was told. Text from outside (names, messages) passes `clean` first:
a process or a model may be named by somebody who would like to write escape sequences to a terminal.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Span = tuple[str, str]
Line = tuple[Span, ...]
EMPTY: Line = ()

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ONE_CELL_EACH = frozenset(
    chr(code)
    for first, last in (
        (0x20, 0x7E),
        (0xA1, 0xAC),
        (0xAE, 0x2FF),
        (0x370, 0x482),
        (0x2010, 0x2027),
        (0x2190, 0x22FF),
        (0x2500, 0x25FC),
    )
    for code in range(first, last + 1)
)
"""No character of these ranges is wide, combining or invisible: their width needs no table."""

_ASCII = str.maketrans(
    {
        "\N{EM DASH}": "-",
        "\N{EN DASH}": "-",
        "─": "-",
        "·": ".",
        "…": ".",
        "→": ">",
        "°": " ",
        "■": "#",
        "█": "#",
        "▇": "#",
        "▆": "*",
        "▅": "+",
        "▄": "=",
        "▃": "-",
        "▂": ":",
        "▁": "_",
        "░": ".",
        "▒": "%",
        "▏": ":",
        "▎": ":",
        "▍": ":",
        "▌": "=",
        "▋": "=",
        "▊": "#",
        "▉": "#",
    }
)


class Lines(msgspec.Struct, frozen=True):
    """Lines as something that rich prints: exactly these, never wrapped and never read as markup."""

    lines: tuple[Line, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the segments."""
        from rich.segment import Segment
        from rich.style import Style

        for line in self.lines:
            for text, style in line:
                yield Segment(text, Style.parse(style) if style else None)
            yield Segment.line()

    def plain(self) -> str:
        """Return the text without styles, a line feed after each line, no blanks at the ends of lines."""
        return "".join(plain(line).rstrip() + "\n" for line in self.lines)


def clean(text: str) -> str:
    """Return `text` with nothing in it that moves the cursor, hides, joins or turns what stands beside it.

    Control and format characters, and emoji (terminals dispute their width), become U+FFFD; combining
    marks are dropped after composition; any blank is one space.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, unicodedata.normalize("NFC", text)))


def _visible(character: str) -> str:
    if character.isspace():
        return " "
    category = unicodedata.category(character)
    if category[0] == "M":
        return ""
    if category[0] == "C" or (category[0] == "S" and ord(character) > 0x1F000):
        return REPLACEMENT
    return character if text_width(character) else REPLACEMENT


def text_width(text: str) -> int:
    """Return the cells that cleaned `text` takes."""
    if text.isascii() or _ONE_CELL_EACH.issuperset(text):
        return len(text)
    from rich.cells import cell_len

    return sum(map(cell_len, text))


def line_width(line: Line) -> int:
    """Return the cells that `line` takes."""
    return sum(text_width(text) for text, _ in line)


def span(text: str, style: str = "") -> Line:
    """Return a line of one span."""
    return ((text, style),)


def plain(line: Line) -> str:
    """Return the text of `line`."""
    return "".join(text for text, _ in line)


def join(items: Iterable[Line], gap: str = "  ", style: str = "") -> Line:
    """Return `items` in one line, `gap` between them."""
    result: list[Span] = []
    for item in items:
        if result:
            result.append((gap, style))
        result.extend(item)
    return tuple(result)


def _head(text: str, width: int) -> str:
    """Return as much of the start of `text` as fits into `width` cells."""
    if text.isascii():
        return text[:width]
    taken = 0
    for position, character in enumerate(text):
        taken += text_width(character)
        if taken > width:
            return text[:position]
    return text


def crop_text(text: str, width: int) -> str:
    """Return `text`, ended by "…" where it did not fit into `width` cells."""
    if text_width(text) <= width:
        return text
    return _head(text, width - 1) + "…" if width > 0 else ""


def crop(line: Line, width: int) -> Line:
    """Return `line`, ended by "…" where it did not fit into `width` cells."""
    if line_width(line) <= width:
        return line
    if width <= 0:
        return EMPTY
    result: list[Span] = []
    room = width - 1
    for text, style in line:
        size = text_width(text)
        if size > room:
            return (*result, (_head(text, room) + "…", style))
        result.append((text, style))
        room -= size
    return tuple(result)


def pad(line: Line, width: int) -> Line:
    """Return `line` in exactly `width` cells."""
    line = crop(line, width)
    missing = width - line_width(line)
    return (*line, (" " * missing, "")) if missing > 0 else line


def ends(left: Line, right: Line, width: int, filler: str = " ", style: str = "") -> Line:
    """Return `left` and `right` at the two ends of a line; `right` is left out where both do not fit."""
    left_width, right_width = line_width(left), line_width(right)
    if not right_width or left_width + right_width + 2 > width:
        missing = width - left_width - 1
        if filler == " " or missing <= 0:
            return crop(left, width)
        return (*left, (" " + filler * missing, style))
    between = width - left_width - right_width - 2
    return (*left, (" " + filler * between + " ", style), *right)


def rule(title: Line, right: Line, width: int) -> Line:
    """Return a line with a title in it, that parts what is above from what is below."""
    left = (("── ", "dim"), *title)
    if line_width(right):
        right = (*right, (" ──", "dim"))
    return ends(crop(left, width), right, width, "─", "dim")


def fit(items: Sequence[tuple[int, Line]], width: int, gap: str = "  ") -> Line:
    """Return the items that fit, in their order; those of the lowest rank are left out first.

    An item is (rank, line). The one of the highest rank always stays, cropped if it must be.
    """
    kept = [item for item in items if line_width(item[1])]
    while len(kept) > 1 and line_width(join((line for _, line in kept), gap)) > width:
        kept.remove(min(reversed(kept), key=lambda item: item[0]))
    return crop(join((line for _, line in kept), gap), width)


def flow(items: Iterable[Line], width: int, *, label: Line = EMPTY, indent: int = 0) -> list[Line]:
    """Return `items` on as many lines as they need, none broken; `label` stands before the first line."""
    lines: list[Line] = []
    current = pad(label, indent) if indent else label
    fresh = True
    for item in items:
        gap: Line = EMPTY if fresh else span("  ")
        if not fresh and line_width(current) + 2 + line_width(item) > width:
            lines.append(crop(current, width))
            current, gap = span(" " * indent), EMPTY
        current = (*current, *gap, *item)
        fresh = False
    if not fresh or label:
        lines.append(crop(current, width))
    return lines


def wrap(text: str, width: int) -> list[str]:
    """Return `text` broken between words, and inside of a word only where it alone is too long."""
    width = max(1, width)
    lines: list[str] = []
    current = ""
    for word in text.split():
        rest = word
        joined = f"{current} {rest}" if current else rest
        if text_width(joined) <= width:
            current = joined
            continue
        if current:
            lines.append(current)
        while text_width(rest) > width:
            head = _head(rest, width)
            if not head:  # a wide character in a column of one cell
                head, rest = "…", rest[1:]
            else:
                rest = rest[len(head) :]
            lines.append(head)
        current = rest
    if current:
        lines.append(current)
    return lines


def beside(columns: Sequence[Sequence[Line]], width: int, gap: int = 2) -> list[Line]:
    """Return blocks of lines side by side, each padded to `width` cells."""
    height = max(len(column) for column in columns)
    filled = [[*column, *([EMPTY] * (height - len(column)))] for column in columns]
    return [
        join([*(pad(line, width) for line in row[:-1]), crop(row[-1], width)], " " * gap)
        for row in zip(*filled, strict=True)
    ]


def to_ascii(line: Line) -> Line:
    """Return `line` in ASCII, cell for cell; what has no likeness becomes "?"."""
    return tuple((_ascii_text(text), style) for text, style in line)


def _ascii_text(text: str) -> str:
    if text.isascii():
        return text
    text = text.translate(_ASCII)
    likeness: Callable[[str], str] = lambda c: c if c.isascii() else "?" * text_width(c)  # noqa: E731
    return "".join(map(likeness, text))
