"""A server in a thread, over a fake engine, and clients of it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import openai
import uvicorn
from fake_engine import FakeEngine

from ktopt.server.app import create_app
from ktopt.server.connection import MOST_HEAD_BYTES, Connection
from ktopt.server.settings import Served, Settings


class Running:
    """A server: its engine, its base URL, and clients."""

    def __init__(self, engine: Any, port: int, service: Any) -> None:
        self.engine, self.port, self.service = engine, port, service
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30)

    def chat(self, content: Any = "hi", **given: Any) -> Any:
        return self.openai.chat.completions.create(model="fake", messages=[{"role": "user", "content": content}], **given)

    def paths(self) -> set[str]:
        """Those of the OpenAPI description."""
        return set(self.http.get("/openapi.json").json()["paths"])

    def post_named(self, model: str) -> Any:
        return self.openai.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])

    def post(self, **body: Any) -> httpx.Response:
        """A chat as plain JSON."""
        return self.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **body})

    def connection(self, body: bytes, path: str = "/v1/chat/completions") -> socket.socket:
        """A connection on which a request has been sent, and nothing was read."""
        made = socket.create_connection(("127.0.0.1", self.port))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        made.sendall(head.encode() + body)
        return made


@contextmanager
def running(engine: Any = None, settings: Settings | None = None, served: Served | None = None) -> Iterator[Running]:
    """A server at a port that is free."""
    engine = engine or FakeEngine()
    app = create_app(engine, settings or Settings(), served or Served(names=("fake", "other"), created=1))
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=Connection, h11_max_incomplete_event_size=MOST_HEAD_BYTES, log_config=None, access_log=False, ws="none",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    made = Running(engine, listening.getsockname()[1], app.state.service)
    try:
        yield made
    finally:
        made.http.close()
        made.openai.close()
        server.should_exit = True
        thread.join(timeout=10)
        listening.close()


def wait_for(what: Any, timeout_s: float = 10.0) -> None:
    """Until it is so."""
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it didn't come to be so"
        time.sleep(0.01)
