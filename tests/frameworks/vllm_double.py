"""vLLM's HTTP interface for weight transfer, with a model of transformers behind it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from modelexpress_rl import ModelExpressGeneratorClient, ModelExpressGeneratorConfig
from modelexpress_rl.inference.engines.huggingface import HuggingFaceGeneratorContext


class Engine:
    """What the endpoints do. `calls` are their names, in order; `broken` is what an update says once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.calls: list[str] = []
        self.broken: str | None = None
        self.client: ModelExpressGeneratorClient | None = None

    def call(self, path: str, body: dict[str, Any]) -> None:
        name, _, query = path.strip("/").partition("?")
        self.calls.append(f"{name}?{query}" if query else name)
        if name == "init_weight_transfer_engine":
            self.client = ModelExpressGeneratorClient.initialize(
                ModelExpressGeneratorConfig(
                    engine_context=HuggingFaceGeneratorContext(self.model), **body["init_info"]
                )
            )
        elif name == "update_weights":
            broken, self.broken = self.broken, None
            if broken is not None:
                raise RuntimeError(broken)
            assert self.client is not None
            self.client.apply_weight(self.client.stage_weight(body["update_info"]["version_id"]))


@contextlib.contextmanager
def vllm_serve(engine: Engine) -> Iterator[str]:
    """A server on a free port; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, status: int, text: str = "") -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer(200 if self.path == "/health" else 404)

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                engine.call(self.path, json.loads(raw) if raw else {})
            except Exception as error:  # noqa: BLE001 (the caller is told)
                self._answer(500, f"{type(error).__name__}: {error}")
            else:
                self._answer(200)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
        if engine.client is not None:
            engine.client.close()
