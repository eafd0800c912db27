"""A stand-in for `vllm serve` with our backend: its endpoints, sessions and label, and no weights.

As vLLM 0.32 does it: an update needs a session, a failed update ends it, `finish` sets the label, and any
exception is a 500. As our backend does it: `finish` raises while the engine is uncertain.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class VllmDouble:
    """What the server holds; tests read and set it."""

    def __init__(self) -> None:
        self.label = "default"
        self.version: str | None = None
        self.doubt = False
        self.paused = False
        self.session = False
        self.versions = {"v1", "v2", "v3"}
        self.fails_half_way = False
        self.calls: list[str] = []
        self.standing: list[list[str]] = []
        self.answers_with: int | None = None
        self.raw: bytes | None = None

    def answer(self, path: str, query: str, body: dict[str, object]) -> dict[str, object]:
        """What is answered; raises for a 500."""
        self.calls.append(path)
        match path:
            case "weight_info":
                return {"weight_version": self.label}
            case "is_paused":
                return {"is_paused": self.paused}
            case "pause":
                assert query == "mode=keep"
                self.paused = True
            case "resume":
                self.paused = False
            case "update_weight_version":
                self.label = str(body["new_version"])
            case "start_weight_update":
                assert not self.session, "a weight update is already active"
                self.session = True
            case "update_weights":
                assert self.session, "start_weight_update must be called before"
                self._update(body)
            case "finish_weight_update":
                assert self.session, "without a matching start_weight_update"
                assert not self.doubt, "EngineUncertain"
                self.session = False
                self.label = str(body.get("weight_version") or self.label)
            case "collective_rpc":
                assert body["args"] == ["v1"], body
                if body["method"] == "stage_weight_version":
                    return {"results": ["False", "False"]}
                assert body["method"] == "weight_version_staging"
                return {"results": self.standing.pop(0)}
            case "init_weight_transfer_engine":
                assert body == {"init_info": {"model_name": "m"}}
            case _:
                raise AssertionError(path)
        return {}

    def _update(self, body: dict[str, object]) -> None:
        info = body["update_info"]
        assert isinstance(info, dict)
        self.session = False
        assert info["version_id"] in self.versions, "VersionGone"
        self.doubt = self.fails_half_way
        assert not self.doubt, "half of it"
        self.version, self.session = info["version_id"], True


@contextmanager
def serving(double: VllmDouble) -> Iterator[str]:
    """The server's URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, object]) -> None:
            url = urlsplit(self.path)
            try:
                status = double.answers_with or 200
                answer = double.answer(url.path.strip("/"), url.query, body) if status == 200 else {}
                data = json.dumps(answer).encode() if double.raw is None else double.raw
            except AssertionError as error:
                status, data = 500, str(error).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
