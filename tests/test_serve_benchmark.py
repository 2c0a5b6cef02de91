"""The client and the reckoning of benchmarks/serve.py and serve_faults.py, against servers of a few lines."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import serve
import serve_client
import serve_references

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str, **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}], **more}).encode() + b"\n\n"


def with_server(script: Script, client: Callable[[int], Awaitable[serve_client.Reply]]) -> serve_client.Reply:
    async def both() -> serve_client.Reply:
        server = await asyncio.start_server(script, serve_client.HOST, 0)
        async with server:
            return await client(server.sockets[0].getsockname()[1])

    return asyncio.run(both())


async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Two pieces, the second cut in two chunks with a pause between them, an empty one, usage, the end."""
    await reader.readuntil(b"\r\n\r\n")
    second = event("world")
    usage = event("", usage={"prompt_tokens": 3, "completion_tokens": 2})
    writer.write(HEAD)
    for data in (event("Hello "), second[:9], second[9:] + event(""), usage + b"data: [DONE]\n\n"):
        writer.write(chunk(data))
        await writer.drain()
        await asyncio.sleep(0.05)
    writer.write(b"0\r\n\r\n")
    writer.close()


def test_a_stream_is_read_in_events_with_the_time_of_their_last_byte() -> None:
    reply = with_server(stream, lambda port: serve_client.ask(port, "/v1/completions", {"prompt": "a"}))
    assert reply.complete
    assert reply.done
    assert reply.texts() == {0: "Hello world"}
    assert reply.usage() == {"prompt_tokens": 3, "completion_tokens": 2}
    first, second = reply.text_times()
    assert second - first >= 0.09, "the second piece was whole with its second chunk"


def test_a_client_that_leaves_closes_the_connection() -> None:
    seen: list[bytes] = []

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + chunk(event("a")) + chunk(event("b")))
        await writer.drain()
        try:
            seen.append(await reader.read())
        except ConnectionResetError:
            seen.append(b"reset")

    async def client(port: int) -> serve_client.Reply:
        reply = await serve_client.ask(port, "/", {}, manner=serve_client.Manner(leave_after=1))
        await asyncio.sleep(0.05)
        return reply

    reply = with_server(endless, client)
    assert reply.texts() == {0: "a"}
    assert not reply.complete
    assert seen


def test_an_answer_that_never_ends_is_a_timeout() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    with pytest.raises(TimeoutError):
        with_server(silent, lambda port: serve_client.ask(port, "/health", timeout_s=0.1))


def test_a_wrong_number_of_tokens_stops_the_measurement() -> None:
    reply = with_server(stream, lambda port: serve_client.ask(port, "/v1/completions", {"prompt": "a"}))
    assert serve.checked(reply, 3, 2) is reply
    with pytest.raises(RuntimeError, match="asked for 3 \\+ 64 tokens"):
        serve.checked(reply, 3, 64)


def test_prompts_have_their_length_and_differ_by_seed() -> None:
    one, other = serve.prompt(128, 0, 1), serve.prompt(128, 0, 2)
    assert len(one) == len(other) == 128
    assert one != other
    assert one == serve.prompt(128, 0, 1)


def test_an_answer_is_known_up_to_where_two_tokens_are_close() -> None:
    completion = {"top_logprobs": [{"a": -0.1, "b": -3.0}, {"c": -0.2, "d": -2.0}, {"e": -0.7, "f": -0.8}, {"g": 0.0, "h": -9.0}]}
    chat = {"content": [{"top_logprobs": [{"logprob": value} for value in top.values()]} for top in completion["top_logprobs"]]}
    for logprobs, is_chat in ((completion, False), (chat, True)):
        gaps = serve_references._gaps(logprobs, is_chat)
        assert gaps == pytest.approx([2.9, 1.8, 0.1, 9.0])
        assert serve_references._sure(gaps, 1.0) == 2


@pytest.mark.parametrize(("ratio", "said"), [(1.3, "met 1.2"), (1.1, "MISSED 1.2")])
def test_the_table_says_whether_a_target_is_met(ratio: float, said: str) -> None:
    times = {"p50": 1.0, "p95": 2.0}
    of = {
        "out_tokens_per_s": 1.0, "tokens_per_s": 2.0, "first_ms": times, "between_ms": times, "cores": {"client": 0.1},
        "most_foreign_cores": 0.0,
    }  # fmt: skip
    made = {"4 clients, 128 tokens": {"servers": {"ktopt": of, "llama-server flash": of}, "ratio": ratio, "target": 1.2}}
    assert said in serve.report_loads(made)
