"""A client for servers of OpenAI's API that costs little CPU, since it shares the machine with what it measures: bytes and when
they came are kept, and read when the answer is over. It can also be what servers must bear: one that sends half a request, leaves
in the middle of an answer, or hardly reads.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

HOST = "127.0.0.1"
TIMEOUT_S = 600.0
SLOW_BYTES = 512
"""What a slow reader reads at once, of a socket whose buffer is as small as the system lets it be."""


@dataclass
class Reply:
    """What came back: status 0 where the connection ended before there was one. Times are of perf_counter, in seconds."""

    sent_s: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    complete: bool = False

    @cached_property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.parts)

    def json(self) -> Any:
        return json.loads(self.body)

    @cached_property
    def events(self) -> list[tuple[float, dict[str, Any]]]:
        """The events of a stream, each with when the last byte of it came; [DONE] is none of them."""
        found, rest = [], b""
        for at, data in self.parts:
            *whole, rest = (rest + data).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: ") and event != b"data: [DONE]":
                    found.append((at, json.loads(event[6:])))
        return found

    @property
    def done(self) -> bool:
        """Whether a stream came to its end."""
        return b"data: [DONE]" in self.body

    def texts(self) -> dict[int, str]:
        """The choices of an answer, streamed or not."""
        made: dict[int, str] = {}
        for answer in [event for _, event in self.events] or [self.json()]:
            for choice in answer.get("choices", ()):
                message = choice.get("delta") or choice.get("message") or {}
                text = choice.get("text") or message.get("content") or ""
                made[choice["index"]] = made.get(choice["index"], "") + text
        return made

    def text_times(self) -> list[float]:
        """When a piece of text came, for each."""
        return [at for at, event in self.events for choice in event.get("choices", ()) if choice.get("text")]

    def usage(self) -> dict[str, Any]:
        said = [event for _, event in self.events] or [self.json()]
        return next((event["usage"] for event in reversed(said) if event.get("usage")), {})


@dataclass(frozen=True)
class Manner:
    """How a client behaves.

    leave_after    parts of an answer, after which it closes the connection; None stays to the end
    leave_after_s  seconds, likewise
    pause_s        between reads of a slow reader, which reads little at once
    send_bytes     of the request, after which it sends no more and leaves
    """

    leave_after: int | None = None
    leave_after_s: float | None = None
    pause_s: float = 0.0
    send_bytes: int | None = None


PATIENT = Manner()


async def ask(
    port: int,
    path: str,
    body: Any = None,
    *,
    method: str = "",
    headers: Mapping[str, str] | None = None,
    manner: Manner = PATIENT,
    timeout_s: float = TIMEOUT_S,
) -> Reply:
    """One request on a connection of its own. `body` is sent as it is where it is bytes, else as JSON. TimeoutError where the
    answer isn't over in time."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = {"Host": f"{HOST}:{port}", "Connection": "close", **(headers or {})}
    if body is not None:
        head = {"Content-Type": "application/json", "Content-Length": str(len(content)), **head}
    verb = method or ("GET" if body is None else "POST")
    lines = [f"{verb} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
    return await ask_raw(port, "\r\n".join(lines).encode("latin-1") + content, manner, timeout_s)


async def ask_raw(port: int, message: bytes, manner: Manner = PATIENT, timeout_s: float = TIMEOUT_S) -> Reply:
    """Send these bytes and read an answer, if one comes."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await _open(port, manner)
        reply = Reply(time.perf_counter())
        try:
            writer.write(message[: manner.send_bytes])
            await writer.drain()
            if manner.send_bytes is not None:
                await asyncio.sleep(manner.leave_after_s or 0)
                return reply
            async with asyncio.timeout(manner.leave_after_s):
                await _read(reader, reply, manner)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except TimeoutError:
            if manner.leave_after_s is None:
                raise
        finally:
            writer.transport.abort() if manner != PATIENT else writer.close()
    return reply


async def _open(port: int, manner: Manner) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connection = socket.socket()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if manner.pause_s:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BYTES)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (HOST, port))
    except BaseException:
        connection.close()
        raise
    return await asyncio.open_connection(sock=connection, limit=SLOW_BYTES if manner.pause_s else 1 << 20)


async def _read(reader: asyncio.StreamReader, reply: Reply, manner: Manner) -> None:
    status, *lines = (await _head(reader)).decode("latin-1").split("\r\n")
    reply.status = int(status.split()[1])
    reply.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    chunked = reply.headers.get("transfer-encoding") == "chunked"
    left = int(reply.headers.get("content-length", 0))
    while chunked or left:
        size = int(await reader.readline(), 16) if chunked else left
        if chunked and size == 0:
            break
        data = await _exactly(reader, size, manner)
        reply.parts.append((time.perf_counter(), data))
        if chunked:
            await reader.readline()
        else:
            left = 0
        if manner.leave_after is not None and len(reply.parts) >= manner.leave_after:
            return
    reply.complete = True


async def _head(reader: asyncio.StreamReader) -> bytes:
    lines = []
    while (line := await reader.readline()) not in (b"\r\n", b""):
        lines.append(line.rstrip(b"\r\n"))
    if not lines:
        raise ConnectionError("no answer")
    return b"\r\n".join(lines)


async def _exactly(reader: asyncio.StreamReader, size: int, manner: Manner) -> bytes:
    if not manner.pause_s:
        return await reader.readexactly(size)
    got = b""
    while len(got) < size:
        await asyncio.sleep(manner.pause_s)
        got += await reader.readexactly(min(SLOW_BYTES, size - len(got)))
    return got
