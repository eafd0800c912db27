"""A folder as an S3 service, as far as 0.7.0 uses one: PUT unless it exists, HEAD, and GET of ranges.

It checks no signature. Not a part that tests of our own storage back ends may lean on.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a service whose buckets are the folder's folders."""

    class Handler(_Handler):
        root = folder

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root: Path

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a test's output is its own."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            body = _unchunked(body)
        path = self._path()
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.headers.get("If-None-Match") == "*" and path.exists():
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        written = path.with_name(f".{path.name}.{threading.get_ident()}")
        written.write_bytes(body)
        os.replace(written, path)
        self._answer(200, b"")

    def do_HEAD(self) -> None:
        self._get(body=False)

    def do_GET(self) -> None:
        self._get(body=True)

    def _get(self, *, body: bool) -> None:
        path = self._path()
        if not path.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>", body=body)
            return
        data = path.read_bytes()
        found = _RANGE.fullmatch(self.headers.get("Range", ""))
        if not found:
            self._answer(200, data, body=body)
            return
        begin, end = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
        self._answer(206, data[begin : end + 1], body=body, content=f"bytes {begin}-{end}/{len(data)}")

    def _path(self) -> Path:
        return self.root / unquote(urlsplit(self.path).path).lstrip("/")

    def _answer(self, status: int, data: bytes, *, body: bool = True, content: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"0"')
        if content:
            self.send_header("Content-Range", content)
        self.end_headers()
        if body:
            self.wfile.write(data)


def _unchunked(body: bytes) -> bytes:
    data = b""
    while body:
        head, _, body = body.partition(b"\r\n")
        size = int(head.partition(b";")[0], 16)
        if not size:
            break
        data, body = data + body[:size], body[size + 2 :]
    return data
