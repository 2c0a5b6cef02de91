"""A request's body, read within limits and parsed as strict JSON: refused are what is too long or too slow to arrive, bytes that
aren't UTF-8, halves of surrogate pairs, numbers that JSON or a float doesn't have, and nesting that nothing needs."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from ktopt.server.errors import ApiError

MOST_NESTED = 64
IN_THE_LOOP_BYTES = 64 << 10
"""Longer bodies are parsed in a thread, so that others' answers aren't held up."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: Request, limit_bytes: int, timeout_s: float) -> dict[str, Any]:
    """The object that is a request's body. ApiError for anything else."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415, f"the body's Content-Type is {kind[:80]!r}, and must be application/json", code="unsupported_media_type"
        )
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read(request, limit_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body didn't arrive within {timeout_s:g} s", headers={"Connection": "close"}) from None
    value = parse(raw) if len(raw) <= IN_THE_LOOP_BYTES else await asyncio.to_thread(parse, raw)
    if not isinstance(value, dict):
        raise _bad("its body must be a JSON object")
    return value


async def _read(request: Request, limit_bytes: int) -> bytes:
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > limit_bytes:
        raise _too_long(limit_bytes)
    parts, count = [], 0
    try:
        async for part in request.stream():
            count += len(part)
            if count > limit_bytes:
                raise _too_long(limit_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "the connection ended before the body did") from None
    return b"".join(parts)


def parse(raw: bytes) -> Any:
    """The value of a JSON text. ApiError for what is none."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"its body isn't UTF-8 (byte {error.start})") from None
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if _SURROGATE.search(raw):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise _bad(f"its JSON is nested more than {MOST_NESTED} deep") from None
    except UnicodeEncodeError:
        raise _bad("its JSON has half of a surrogate pair, which is no character") from None
    except json.JSONDecodeError as error:
        raise _bad(f"its body isn't JSON: {error.msg}, line {error.lineno} column {error.colno}") from None
    except ValueError:
        raise _bad("its JSON has a number with too many digits") from None
    _check_depth(value)
    return value


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_NESTED):
        if not level:
            return
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    if level:
        raise _bad(f"its JSON is nested more than {MOST_NESTED} deep")


def _no_number(name: str) -> NoReturn:
    raise _bad(f"its JSON has {name}, which is no number of JSON's")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise _bad(f"its JSON has a number that is too large: {text[:40]}")
    return number


def _bad(what: str) -> ApiError:
    return ApiError(400, f"this request can't be read: {what}", code="invalid_json")


def _too_long(limit_bytes: int) -> ApiError:
    message = f"the body is longer than {limit_bytes:,} bytes, which is this server's limit"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
