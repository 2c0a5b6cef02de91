"""Responses that wait for an engine: a whole answer as JSON, or a stream of server-sent events.

Both watch the connection, and end the requests at the engine as soon as the client has gone. A stream that isn't read is given up
after a time; while nothing is to be said, a comment keeps it open.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ktopt.server.access_log import NOTE
from ktopt.server.bridge import Answer
from ktopt.server.errors import ApiError, internal
from ktopt.server.settings import Settings
from ktopt.server.writing.common import Writer

log = logging.getLogger("ktopt.server")
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class WaitingResponse(Response):
    """What both have in common. `done` is called once the answer has ended, however it ended."""

    media_type = None

    def __init__(self, answer: Answer, writer: Writer, settings: Settings, done: Callable[[Answer], None]) -> None:
        super().__init__()
        self.answer, self.writer, self.settings, self._done = answer, writer, settings, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._watch(receive))
        try:
            await self.answer_to(scope, receive, send)
        except OSError:  # the connection has gone while something was sent
            self.answer.leave("client gone")
        finally:
            watching.cancel()
            self.answer.leave("not waited for")
            scope.get(NOTE, {}).update(self.answer.told())
            self._done(self.answer)

    async def answer_to(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.answer.leave("client gone")


class WholeAnswer(WaitingResponse):
    """The answer as one JSON object, once it is complete."""

    async def answer_to(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._complete()
        if response is not None:
            self.status_code = response.status_code
            await response(scope, receive, send)

    async def _complete(self) -> Response | None:
        """The response, or None where nobody waits for it."""
        try:
            while not self.answer.ended:
                for prompt, event in await self.answer.events():
                    self.writer.add(prompt, event)
                if self.writer.enough:
                    self.answer.cancel()
            return None if self.answer.left else JSONResponse(self.writer.whole(self.answer.finished))
        except ApiError as error:
            return error.response()
        except Exception:
            log.exception("an answer couldn't be written")
            return internal().response()


class StreamedAnswer(WaitingResponse):
    """The answer in server-sent events."""

    async def answer_to(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        text: list[str] = []
        try:
            await self._send(send, self.writer.begin())
            while not self.answer.ended:
                events = await self.answer.events(self.settings.keepalive_s)
                for prompt, event in events:
                    text.append(self.writer.chunks(prompt, event))
                if self.writer.enough:
                    self.answer.cancel()
                await self._send(send, "".join(text) if events or self.answer.ended else ": keep-alive\n\n")
                text = []
            last = self.writer.end(self.answer.finished)
        except ApiError as error:
            last = "".join(text) + _event(error)
        except TimeoutError:
            self.answer.leave("slow reader")
        except OSError:
            raise
        except Exception:
            log.exception("an answer couldn't be written")
            last = _event(internal())
        if not self.answer.left:
            await self._send(send, last, more=False)

    async def _send(self, send: Send, text: str, more: bool = True) -> None:
        """Send what isn't empty. TimeoutError where the client doesn't read."""
        if text or not more:
            async with asyncio.timeout(self.settings.write_timeout_s):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


def _event(error: ApiError) -> str:
    return f"data: {json.dumps(error.body())}\n\n"
