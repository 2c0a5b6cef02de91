"""What clients do to a server in benchmarks/serve_faults.py: a function for each kind of request. Each says what was wrong with the
answer, or "" where it was right."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import jsonschema
from serve_client import Manner, Reply, ask, ask_raw
from serve_references import Reference

ANSWER_S = 180.0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Target:
    """A server under load, what it knows, and its limits."""

    port: int
    references: list[Reference]
    key: str
    body_bytes: int
    context_tokens: int

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    async def ask(self, path: str, body: Any, manner: Manner = Manner(), **more: str) -> Reply:  # noqa: B008
        return await ask(self.port, path, body, headers={**self.headers, **more}, manner=manner, timeout_s=ANSWER_S)

    def pick(self, draw: random.Random, *kinds: str) -> Reference:
        return draw.choice([each for each in self.references if each.name.startswith(kinds)])


Kind = Callable[[Target, random.Random], Awaitable[str]]


def _wrong(reply: Reply, reference: Reference, choices: int = 1, text: str | None = None) -> str:
    """What is wrong with an answer that should be the reference's, in each choice."""
    expected = reference.text if text is None else text
    if reply.status != 200:
        return f"{reference.name}: status {reply.status}: {reply.body[:300]!r}"
    if reply.headers.get("content-type", "").startswith("text/event-stream") and not reply.done:
        return f"{reference.name}: the stream ended early: {reply.body[-300:]!r}"
    texts = reply.texts()
    if sorted(texts) != list(range(choices)):
        return f"{reference.name}: choices {sorted(texts)}, not {choices}"
    return next((f"{reference.name}: {got!r}, not {expected!r}" for got in texts.values() if got != expected), "")


def _refused(reply: Reply, *statuses: int, code: str = "") -> str:
    """What is wrong with an answer that should be an error in OpenAI's shape."""
    if reply.status not in statuses:
        return f"status {reply.status}, not {' or '.join(map(str, statuses))}: {reply.body[:300]!r}"
    try:
        error = reply.json()["error"]
        shaped = isinstance(error["message"], str) and isinstance(error["type"], str) and {"param", "code"} <= set(error)
    except (ValueError, KeyError, TypeError):
        shaped = False
    if not shaped:
        return f"no error in OpenAI's shape: {reply.body[:300]!r}"
    return "" if not code or error["code"] == code else f"code {error['code']!r}, not {code!r}"


async def right(target: Target, draw: random.Random) -> str:
    """A plain request, streamed or not."""
    reference = target.pick(draw, "short", "long", "shared", "chat")
    return _wrong(await target.ask(reference.path, reference.request(stream=draw.random() < 0.6)), reference)


async def long(target: Target, draw: random.Random) -> str:
    reference = target.pick(draw, "long", "shared")
    return _wrong(await target.ask(reference.path, reference.request(stream=draw.random() < 0.6)), reference)


async def choices(target: Target, draw: random.Random) -> str:
    """Several choices of one prompt, all the same since the likeliest tokens are taken."""
    reference, n = target.pick(draw, "short", "long", "chat"), draw.randint(2, 4)
    return _wrong(await target.ask(reference.path, reference.request(stream=draw.random() < 0.5, n=n)), reference, n)


async def stopped(target: Target, draw: random.Random) -> str:
    """A stop text somewhere in the answer, across tokens."""
    reference = target.pick(draw, "short", "shared", "chat")
    at = draw.randint(3, max(3, len(reference.text) - 8))
    stop = reference.text[at : at + draw.randint(2, 7)]
    expected = reference.text[: reference.text.index(stop)]
    reply = await target.ask(reference.path, reference.request(stream=draw.random() < 0.6, stop=[stop, "never said"]))
    return _wrong(reply, reference, text=expected)


async def schema(target: Target, draw: random.Random) -> str:
    """An answer that must be JSON of a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    asked = [{"role": "user", "content": f"Describe {draw.choice(['Ann', 'Bob', 'Eve'])} as JSON."}]
    body = {"messages": asked, "response_format": form, "max_tokens": 160, "temperature": draw.choice([0, 1])}
    reply = await target.ask("/v1/chat/completions", body)
    if reply.status != 200:
        return f"status {reply.status}: {reply.body[:300]!r}"
    choice = reply.json()["choices"][0]
    if choice["finish_reason"] == "length":
        return ""
    try:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"not of the schema: {choice['message']['content']!r}: {str(error)[:200]}"
    return ""


async def sampled(target: Target, draw: random.Random) -> str:
    """Chance, penalties, biases: nothing to compare with but the number of tokens."""
    reference = target.pick(draw, "short", "chat")
    more = {"temperature": draw.uniform(0.5, 2), "top_p": draw.uniform(0.1, 1), "seed": draw.getrandbits(31), "ignore_eos": True}
    more |= {"frequency_penalty": draw.uniform(-2, 2), "presence_penalty": draw.uniform(-2, 2), "logit_bias": {"100": -100}}
    reply = await target.ask(reference.path, reference.request(**more, max_tokens=24))
    if reply.status != 200:
        return f"status {reply.status}: {reply.body[:300]!r}"
    made = reply.usage()["completion_tokens"]
    return "" if made == 24 else f"{made} tokens, not 24"


async def slow(target: Target, draw: random.Random) -> str:
    """A reader that takes little at a time, with pauses, and still gets all."""
    reference = target.pick(draw, "short", "chat")
    manner = Manner(pause_s=draw.uniform(0.02, 0.15))
    return _wrong(await target.ask(reference.path, reference.request(stream=True), manner), reference)


async def left(target: Target, draw: random.Random) -> str:
    """A client that goes in the middle: of reading the prompt, or of an answer that would be long."""
    reference = target.pick(draw, "short", "long", "shared", "chat")
    by_count = draw.random() < 0.5
    manner = Manner(leave_after=draw.randint(1, 30)) if by_count else Manner(leave_after_s=draw.uniform(0.0, 2.0))
    stream = by_count or draw.random() < 0.5
    body = {**reference.request(stream=stream, n=draw.choice([1, 1, 1, 2, 4]), ignore_eos=True), "max_tokens": 400}
    reply = await target.ask(reference.path, body, manner)
    return "" if reply.status in (0, 200) else f"status {reply.status}: {reply.body[:300]!r}"


async def half(target: Target, draw: random.Random) -> str:
    """Part of a request, and then nothing."""
    reference = target.pick(draw, "short", "long")
    manner = Manner(send_bytes=draw.randint(1, 600), leave_after_s=draw.uniform(0, 0.5))
    await target.ask(reference.path, reference.request(), manner)
    return ""


BROKEN: tuple[bytes, ...] = (
    b"", b"{", b"[]", b"null", b"\xff\xfe{}", b'{"prompt": "\xc3\x28"}', b'{"prompt": "a", "max_tokens": }', b"[" * 100_000,
    b'{"a":' * 20_000, b'{"prompt": "\\ud800"}', b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "max_tokens": 1e999}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", b'"prompt"', b'{"prompt": "a"} {"prompt": "b"}',
)  # fmt: skip
MISTYPED: tuple[dict[str, Any], ...] = (
    {"max_tokens": "many"}, {"max_tokens": -1}, {"max_tokens": 0}, {"temperature": "hot"}, {"temperature": 3}, {"top_p": 7},
    {"n": 0}, {"n": 10_000}, {"stop": [1]}, {"stop": ["a"] * 1000}, {"stop": [""]}, {"logit_bias": {"x": 1}},
    {"logit_bias": {"99999999": 1}},
    {"logit_bias": [1]}, {"seed": 1.5}, {"stream": "yes"}, {"unknown_field": 1}, {"stream_options": {"include_usage": True}},
    {"frequency_penalty": 9}, {"model": 7}, {"seed": 1 << 80}, {"user": {"a": 1}},
)  # fmt: skip
WRONG_CHATS: tuple[Any, ...] = (
    [], "hello", [{"role": "user"}], [{"role": "emperor", "content": "x"}], [{"role": "user", "content": {"a": 1}}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}], [None], [{"content": "x"}],
)  # fmt: skip
WRONG_FORMATS: tuple[dict[str, Any], ...] = (
    {"type": "json_schema"}, {"type": "xml"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(" * 50}}},
)  # fmt: skip


async def malformed(target: Target, draw: random.Random) -> str:
    """What is no request: broken JSON, wrong types, wrong chats, wrong formats."""
    plain = {"prompt": "a", "max_tokens": 4}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    path, body = draw.choice([
        ("/v1/completions", draw.choice(BROKEN)), ("/v1/chat/completions", draw.choice(BROKEN)),
        ("/v1/completions", {**plain, **draw.choice(MISTYPED)}), ("/v1/chat/completions", {**chat, **draw.choice(MISTYPED)}),
        ("/v1/chat/completions", {**chat, "messages": draw.choice(WRONG_CHATS)}),
        ("/v1/chat/completions", {**chat, "response_format": draw.choice(WRONG_FORMATS)}),
        ("/v1/completions", {**plain, "prompt": draw.choice([[], "", [[]], [1, "a"], [-1], [1 << 40], 7, {"a": 1}])}),
    ])  # fmt: skip
    wrong = _refused(await target.ask(path, body), 400, 413, 415, 422)
    return wrong and f"{str(body)[:200]}: {wrong}"


NOISE: tuple[bytes, ...] = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"\r\n" * 100,
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(2000)) + b"\r\n",
)  # fmt: skip


async def noise(target: Target, draw: random.Random) -> str:
    """Bytes that are no HTTP, or hardly: what matters is that the server lives on."""
    reply = await ask_raw(target.port, draw.choice(NOISE), Manner(leave_after_s=2.0), ANSWER_S)
    return "" if reply.status < 500 else f"status {reply.status}: {reply.body[:300]!r}"


async def oversized(target: Target, draw: random.Random) -> str:
    """More than the limits: of a body, of a prompt, of an answer, of choices, of the cache."""
    which = draw.randrange(5)
    plain = {"prompt": "a", "max_tokens": 4}
    if which == 0:
        return _refused(await target.ask("/v1/completions", b'{"prompt": "' + b"a" * target.body_bytes + b'"}'), 413)
    if which == 1:
        body = {**plain, "prompt": " word" * (target.context_tokens + draw.randint(1, 2000))}
    elif which == 2:
        body = {**plain, "prompt": [draw.randint(1000, 2000) for _ in range(target.context_tokens - 2)], "max_tokens": 100}
    elif which == 3:
        body = {**plain, "n": 1000}
    else:
        body = {**plain, "prompt": [draw.randint(1000, 2000) for _ in range(4000)], "n": 16, "max_tokens": 2000}
    return _refused(await target.ask("/v1/completions", body), 400)


async def locked_out(target: Target, draw: random.Random) -> str:
    """No key, a wrong one, one that isn't ASCII."""
    keys = ({}, {"Authorization": "Bearer wrong"}, {"Authorization": target.key}, {"Authorization": f"Bearer {target.key}x"},
            {"Authorization": "Bearer \xe9\xff"}, {"Authorization": "Basic YTpi"})  # fmt: skip
    path = draw.choice(["/v1/completions", "/v1/chat/completions"])
    return _refused(await ask(target.port, path, {"prompt": "a"}, headers=draw.choice(keys), timeout_s=ANSWER_S), 401)


async def looking(target: Target, draw: random.Random) -> str:
    """Pages beside the answers, and places that there aren't."""
    path, method, status = draw.choice([
        ("/health", "GET", 200), ("/metrics", "GET", 200), ("/v1/models", "GET", 200), ("/api/status", "GET", 200),
        ("/", "GET", 200), ("/openapi.json", "GET", 200), ("/v1/nothing", "GET", 404), ("/v1/completions", "GET", 405),
        ("/v1/models/nobody", "GET", 404),
    ])  # fmt: skip
    reply = await ask(target.port, path, method=method, headers=target.headers, timeout_s=ANSWER_S)
    return "" if reply.status == status else f"{method} {path}: status {reply.status}, not {status}"


KINDS: dict[Kind, int] = {
    right: 6, long: 4, choices: 2, stopped: 3, schema: 2, sampled: 2, slow: 2, left: 6, half: 1, malformed: 4, noise: 1,
    oversized: 2, locked_out: 1, looking: 2,
}  # fmt: skip
"""How often each comes."""
