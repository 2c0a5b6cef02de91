"""One line of JSON for each request: who asked for what, how it ended, and what it took. Never what it said."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktopt.server.errors import internal
from ktopt.server.metrics import Metrics

access = logging.getLogger("ktopt.access")
log = logging.getLogger("ktopt.server")
NOTE = "ktopt.note"
"""The scope's key of what an endpoint adds to its request's line."""
CLIENT_GONE = 499
"""The status of a request whose client went before it was answered, as nginx has it."""
LONGEST_PATH = 200
POLLED = ("/health", "/metrics", "/api/status")
"""What is asked again and again, and logged only for debugging."""


class AccessLog:
    """The outermost layer. What fails within it is logged, and answered without a word of it."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note: dict[str, Any] = scope.setdefault(NOTE, {})
        start, status = time.perf_counter(), 0

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, told)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"][:LONGEST_PATH])
            if not status:
                await internal().response()(scope, receive, told)
        finally:
            self._write(scope, note, status or CLIENT_GONE, time.perf_counter() - start)

    def _write(self, scope: Scope, note: dict[str, Any], status: int, seconds: float) -> None:
        path = scope["path"]
        known = path if path in self._paths else "other"
        self._metrics.responses.labels(known, str(status)).inc()
        if path.startswith("/v1/") and known == path:
            self._metrics.seconds.labels(path).observe(seconds)
        client = scope.get("client")
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "client": client[0] if client else "",
            "method": scope["method"],
            "path": path[:LONGEST_PATH],
            "status": status,
            "seconds": round(seconds, 4),
            **note,
        }
        access.log(logging.DEBUG if path in POLLED else logging.INFO, "%s", json.dumps(line))
