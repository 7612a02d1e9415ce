"""A server that looks and answers like a vLLM, on the standard library alone: any user can run it.

Usage: engine.py --port PORT --model FOLDER --page FILE
It is started under a path that ends in /vllm/entrypoints/openai/api_server.py.
"""

from __future__ import annotations

import json
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

options = {sys.argv[at]: sys.argv[at + 1] for at in range(1, len(sys.argv), 2)}
page = Path(options["--page"]).read_text()


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        names = set(urllib.parse.parse_qs(parts.query).get("name[]", []))
        status, body = 200, page
        if parts.path == "/version":
            body = json.dumps({"version": "0.32.0"})
        elif parts.path == "/v1/models":
            body = json.dumps({"data": [{"id": "tiny", "root": options["--model"]}]})
        elif names:
            body = "".join(line + "\n" for line in page.splitlines() if line.partition("{")[0] in names)
        elif parts.path != "/metrics":
            status = 404
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Answers)
print(server.server_address[1], flush=True)
server.serve_forever()
