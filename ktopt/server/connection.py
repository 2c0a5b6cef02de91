"""A connection: uvicorn's on h11, which bounds what comes before a body. A request's head has so many bytes and so much time, so
that nobody holds memory or connections with heads that don't end."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ktopt.server.errors import ApiError

MOST_HEAD_BYTES = 64 << 10
HEAD_TIMEOUT_S = 30.0


class Connection(H11Protocol):
    """Offers to go on in another protocol (h2c, websockets) are passed over, as HTTP has it: the request is answered."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timing()

    def _time_head(self) -> None:
        """Let time pass while a head is awaited. Between requests uvicorn's own timer runs until something comes."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timing()
        elif self._late is None:
            self._late = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_timing(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _should_upgrade(self) -> bool:
        return False

    def send_400_response(self, msg: str) -> None:
        """Say that what has come is no request, where no answer has begun; and close. Whoever still answers answers nobody."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            message = f"this is no HTTP/1.1 request that can be read, or its head is longer than {MOST_HEAD_BYTES:,} bytes"
            response = ApiError(400, message, code="invalid_http", headers={"Connection": "close"}).response()
            events = (
                h11.Response(status_code=400, headers=response.raw_headers, reason=b"Bad Request"),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            )
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
