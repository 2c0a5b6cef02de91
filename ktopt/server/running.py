"""Runs a server until it is told to stop, and stops it well: new requests are refused, those that run may end, the rest are
cancelled, and the process ends with 0."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from ktopt.diagnostics import KtoptError
from ktopt.engine.engine import Engine
from ktopt.server.app import create_app
from ktopt.server.connection import MOST_HEAD_BYTES, Connection
from ktopt.server.settings import Served, Settings
from ktopt.server.traffic import Traffic

log = logging.getLogger("ktopt.server")
BACKLOG = 256
LAST_WORDS_S = 5.0
"""For cancelled requests to be told so, and for connections to close."""
KEEP_ALIVE_S = 60


def serve(
    engine: Engine,
    settings: Settings,
    served: Served,
    *,
    certificate: tuple[str, str] | None = None,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until SIGTERM or SIGINT; the engine is closed then. `certificate`: files of a TLS key and its certificate. `ready` is
    called with the server's address. KtoptError where it can't be bound."""
    try:
        with bound(settings) as listening:
            app = create_app(engine, settings, served)
            key, certificates = certificate or (None, None)
            config = uvicorn.Config(
                app,
                http=Connection,
                h11_max_incomplete_event_size=MOST_HEAD_BYTES,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WORDS_S,  # type: ignore[arg-type]
                ssl_keyfile=key,
                ssl_certfile=certificates,
            )
            server = _Server(config, engine, app.state.service.traffic, settings.drain_s)
            ready(address_of(listening, secure=certificate is not None))
            server.run(sockets=[listening])
    finally:
        engine.close()


class _Server(uvicorn.Server):
    """uvicorn's, which drains before it stops. A second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, engine: Engine, traffic: Traffic, drain_s: float) -> None:
        super().__init__(config)
        self._engine, self._traffic, self._drain_s = engine, traffic, drain_s
        self._draining: asyncio.Task[None] | None = None
        self._told = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._told or not self.started:
            self.should_exit = self.force_exit = True
            return
        self._told = True
        log.info("%s: no new requests; those that run have %g s to end", signal.Signals(sig).name, self._drain_s)
        self._loop.call_soon_threadsafe(self._begin_draining)

    def _begin_draining(self) -> None:
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            if not await self._traffic.drained(self._drain_s):
                log.info("the time is up: what still runs is cancelled")
            await asyncio.to_thread(self._engine.close)
            await self._traffic.drained(LAST_WORDS_S)
        finally:
            self.should_exit = True


def bound(settings: Settings) -> socket.socket:
    """A listening socket. What a reader leaves unread for too long ends its connection, on systems that have such a limit."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        found = socket.getaddrinfo(settings.host, settings.port, family, socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(found[0], found[1], found[2])
    except OSError as error:
        raise KtoptError(f"--host {settings.host}: {error.strerror or error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.write_timeout_s * 1000))
        listening.bind(found[4])
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise KtoptError(f"can't serve at {settings.host} port {settings.port}: {error.strerror or error}") from None
    return listening


def address_of(listening: socket.socket, *, secure: bool) -> str:
    """Where a listening socket is reached."""
    host, port = listening.getsockname()[:2]
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
