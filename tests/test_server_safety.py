"""What a server refuses and limits, and what becomes of answers that nobody waits for."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("fastapi")

import openai
from fake_engine import CharacterTokenizer, FakeEngine
from pydantic import ValidationError
from server_fixtures import Running, running, wait_for

from ktopt.server.errors import first_problem
from ktopt.server.protocol.chat import ChatRequest
from ktopt.server.protocol.common import Generation
from ktopt.server.protocol.completions import CompletionRequest
from ktopt.server.settings import Settings

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(settings=Settings(max_body_bytes=100_000)) as made:
        yield made


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "isn't JSON"),
        (b"{", "isn't JSON"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "too many digits"),
        (b'{"a": "\xff"}', "isn't UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"messages": [{"role": "user", "content": "\\udfff x"}]}', "surrogate"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "nested"),
        (b'{"a": ' + b"[" * 40_000 + b"]" * 40_000 + b"}", "nested"),
        (b'{"a": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}", "nested"),
    ],
)
def test_a_body_that_is_no_good_is_a_400(server: Running, body: bytes, says: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        response = server.http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert says in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        (CompletionRequest, {"prompt": ["a"] * 50_000 + [1]}, "prompt"),
        (CompletionRequest, {"prompt": [["a"] * 50_000] * 64}, "prompt"),
        (CompletionRequest, {"prompt": "a", "stop": [5] * 16}, "stop[0]"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(key): "x" for key in range(50_000)}}, "50,000 keys"),
        (CompletionRequest, {"prompt": "a", **{f"k{key}": 1 for key in range(50_000)}}, "Unknown parameter: 'k0'"),
        (ChatRequest, {"messages": [{"role": "user", "content": 5}] * 4000}, "messages[0].content"),
        (ChatRequest, {"messages": [{"role": "user", **{f"k{key}": 1 for key in range(50_000)}}]}, "messages[0].k0"),
        (ChatRequest, {**CHAT, "metadata": {f"k{key}": 1 for key in range(50_000)}}, "50,000 keys"),
        (ChatRequest, {**CHAT, "tools": [5] * 128}, "tools[0]"),
    ],
)
def test_a_body_with_many_mistakes_is_refused_for_the_first_few(kind: type[Generation], body: dict[str, Any], says: str) -> None:
    """Telling all of them would hold up everybody for seconds."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert len(caught.value.errors()) <= 8
    assert says in first_problem(caught.value).message


def test_whole_surrogate_pairs_are_characters(server: Running) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    assert server.http.post("/v1/chat/completions", content=body).status_code == 200
    assert "\U0001f600" in "".join(map(chr, server.engine.requests[-1].prompt_ids))


def test_a_body_is_json_by_its_type(server: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        response = server.http.post("/v1/chat/completions", content=json.dumps(CHAT), headers={"Content-Type": kind})
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
    typed = {"Content-Type": "application/json; charset=utf-8"}
    assert server.http.post("/v1/chat/completions", content=json.dumps(CHAT), headers=typed).status_code == 200


def test_a_long_body_is_refused_before_it_is_read(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100001\r\n\r\n".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")

    def endless() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 10_000

    response = server.http.post("/v1/chat/completions", content=endless(), headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with (
        running(settings=Settings(body_timeout_s=0.2)) as server,
        socket.create_connection(("127.0.0.1", server.port)) as connection,
    ):
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
        )
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_a_head_has_so_many_bytes_and_so_much_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktopt.server.connection.HEAD_TIMEOUT_S", 0.3)
    with running() as server:

        def connected() -> socket.socket:
            return socket.create_connection(("127.0.0.1", server.port), timeout=5)

        with connected() as endless, connected() as silent, connected() as slow:
            with suppress(OSError):
                for _ in range(100):
                    endless.sendall(b"GET / HTTP/1.1\r\n" + b"X: " + b"x" * 100_000)
            assert silent.recv(1) == b""
            with suppress(OSError):
                for byte in b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n":
                    slow.sendall(bytes([byte]))
                    time.sleep(0.02)
                assert slow.recv(1) == b""
        with connected() as kept:
            for _ in range(3):
                kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert kept.recv(4096).startswith(b"HTTP/1.1 200")
                time.sleep(0.4)
            kept.sendall(b"GET /heal")
            assert kept.recv(1) == b""
        assert server.http.get("/health").status_code == 200


def test_what_is_no_http_is_refused_in_the_same_shape(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_a_body_that_is_no_http_after_a_good_head_is_refused_once(caplog: pytest.LogCaptureFixture) -> None:
    """Also by a server that answers before it has read the body."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for settings in (Settings(), Settings(api_key="sk-1")):
        with running(settings=settings) as server:
            for body in (b"no length\r\n", b"2\r\n{}\r\n-1\r\n", b"2\r\n{}no end"):
                with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
                    connection.sendall(head + body)
                    answer = b"".join(iter(lambda: connection.recv(4096), b""))
                assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401"))
                assert answer.count(b"HTTP/1.1 4") == 1
            assert server.http.get("/health").status_code == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


def test_a_body_has_one_length(server: Running) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(head + b"0\r\n\r\n")
        assert b"".join(iter(lambda: connection.recv(4096), b"")).startswith(b"HTTP/1.1 400")


def test_an_offer_of_another_protocol_is_passed_over(server: Running) -> None:
    """Clients in Java make it with each request."""
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABk"}
    assert server.http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200


def test_health_tells_of_an_engine_that_has_ended_by_itself() -> None:
    with running() as server:
        server.engine.closed = True
        response = server.http.get("/health")
        assert (response.status_code, response.json()) == (503, {"status": "failed"})


def test_other_paths_and_methods_are_refused_in_the_same_shape(server: Running) -> None:
    for method, path, status in (("GET", "/nope", 404), ("GET", "/v1/chat/completions", 405), ("DELETE", "/v1/models", 405)):
        response = server.http.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_the_key_opens_all_but_health_and_the_page() -> None:
    with running(settings=Settings(api_key="s3cret")) as server:
        for path in ("/health", "/"):
            assert server.http.get(path).status_code == 200
        closed = ("/metrics", "/v1/models", "/v1/models/fake", "/api/status", "/api/plan", "/openapi.json", "/nope")
        for path in closed:
            for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Basic s3cret"}, {"Authorization": "s3cret"}):
                response = server.http.get(path, headers=headers)
                assert response.status_code == 401, path
                assert response.json()["error"]["code"] == "invalid_api_key"
            assert server.http.get(path, headers={"Authorization": "Bearer s3cret"}).status_code != 401
        with pytest.raises(openai.AuthenticationError):
            server.chat()
        assert server.openai.with_options(api_key="s3cret").models.list().data
        assert server.http.post("/v1/chat/completions", content=b"{" * 9).status_code == 401


def test_a_name_of_another_site_is_no_name_of_this_server(server: Running) -> None:
    def by(host: str, **headers: str) -> int:
        return server.http.get("/v1/models", headers={"Host": host, **headers}).status_code

    assert [by(host) for host in ("localhost:1", "127.0.0.1", "[::1]:80", "192.168.0.7:10002", socket.gethostname())] == [200] * 5
    assert [by(host) for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:10002")] == [403] * 3
    assert [by(host) for host in ("[127.0.0.1].evil.example", "localhost:1@evil.example", "localhost:1:evil.example")] == [403] * 3
    assert by("localhost.:1") == by("") == 200
    assert by("localhost:1", Origin="http://localhost:1") == 200
    assert by("localhost:1", Origin="http://localhost:2") == 403
    assert by("localhost:1", Origin="null") == 403
    assert "access-control-allow-origin" not in server.http.get("/v1/models").headers


def test_names_and_pages_can_be_allowed() -> None:
    settings = Settings(allowed_hosts=("my.example",), allowed_origins=("https://app.example",))
    with running(settings=settings) as server:
        assert server.http.get("/v1/models", headers={"Host": "my.example"}).status_code == 200
        response = server.http.get("/v1/models", headers={"Origin": "https://app.example"})
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "https://app.example")
        asked = {
            "Origin": "https://app.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        assert server.http.options("/v1/chat/completions", headers=asked).status_code == 200
        assert server.http.get("/v1/models", headers={"Origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request_at_the_engine(stream: bool) -> None:
    with running(FakeEngine("x" * 10_000, token_s=0.01, context_tokens=1 << 20), Settings(max_new_tokens=20_000)) as server:
        connection = server.connection(json.dumps({**CHAT, "stream": stream}).encode())
        wait_for(lambda: server.engine.tickets)
        if stream:
            connection.recv(100)
        assert not server.engine.tickets[0].cancelled.is_set()
        connection.close()
        assert server.engine.tickets[0].cancelled.wait(2)
        wait_for(lambda: not server.service.traffic._open)


def test_a_reader_who_does_not_read_is_given_up_and_holds_up_nobody() -> None:
    settings = Settings(write_timeout_s=0.3, max_new_tokens=1 << 24)
    with running(
        FakeEngine(lambda request, choice: "x" * (1 << 24) if len(request.prompt_ids) > 30 else "ok", context_tokens=1 << 30),
        settings,
    ) as server:
        body = json.dumps({"messages": [{"role": "user", "content": "long" * 20}], "stream": True}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
            )  # fmt: skip
            wait_for(lambda: server.engine.tickets)
            assert server.chat("hi").choices[0].message.content == "ok"
            assert server.engine.tickets[0].cancelled.wait(20)
            wait_for(lambda: not server.service.traffic._open)
        assert 'ktopt_answers_left_total{why="slow reader"} 1.0' in server.http.get("/metrics").text


def test_a_stream_that_waits_is_kept_open_by_comments() -> None:
    with running(FakeEngine("ab", token_s=0.25), Settings(keepalive_s=0.05)) as server:
        text = server.post(stream=True).text
        assert text.count(": keep-alive\n\n") >= 4
        assert "".join(c.choices[0].delta.content or "" for c in server.chat(stream=True)) == "ab"


def test_more_streams_than_allowed_are_told_to_come_again() -> None:
    with running(FakeEngine("x" * 100, token_s=0.02), Settings(max_streams=2)) as server:
        open_ones = [server.connection(json.dumps({**CHAT, "stream": True}).encode()) for _ in range(2)]
        wait_for(lambda: len(server.service.traffic._open) == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            server.chat()
        assert caught.value.code == "too_many_requests"
        assert caught.value.response.headers["retry-after"] == "1"
        for connection in open_ones:
            connection.close()
        wait_for(lambda: not server.service.traffic._open)
        server.post(max_tokens=1).raise_for_status()


def test_a_prompt_that_takes_too_long_to_make_is_given_up() -> None:
    template = "{% for a in range(400) %}{% for b in range(400) %}{% for c in range(20) %}{% endfor %}{% endfor %}{% endfor %}x"
    with running(FakeEngine(template=template), Settings(template_timeout_s=0.05)) as server:
        response = server.post()
        assert (response.status_code, response.json()["error"]["code"]) == (400, "prompt_too_slow")


def test_of_a_text_that_is_far_too_long_only_the_beginning_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    tokens_of = CharacterTokenizer.__call__
    monkeypatch.setattr(CharacterTokenizer, "__call__", lambda self, text, **given: read.append(len(text)) or tokens_of(self, text))
    with running(FakeEngine(context_tokens=100_000)) as server:
        for path, body in (
            ("chat/completions", {"messages": [{"role": "user", "content": "x" * 5_000_000}]}),
            ("completions", {"prompt": "x" * 5_000_000}),
        ):
            response = server.http.post(f"/v1/{path}", json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert sum(read) < 300_000
        assert server.post(messages=[{"role": "user", "content": "x" * 90_000}], max_tokens=1).status_code == 200


def test_prompts_longer_than_this_server_takes_are_refused() -> None:
    with running(settings=Settings(max_prompt_tokens=30)) as server:
        assert server.post().status_code == 200
        with pytest.raises(openai.BadRequestError, match="at most 30") as caught:
            server.chat("long" * 20)
        assert caught.value.code == "context_length_exceeded"


def test_the_log_has_what_was_done_and_not_what_was_said(caplog: pytest.LogCaptureFixture) -> None:
    with running() as server, caplog.at_level(logging.INFO, logger="ktopt.access"):
        server.chat("very secret words")
        server.http.get("/v1/models?key=secret")
        server.post(foo="secret")
        wait_for(lambda: len(caplog.records) == 3)
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert "secret" not in caplog.text
    assert "Hello" not in caplog.text
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("POST", "/v1/chat/completions", 200), ("GET", "/v1/models", 200), ("POST", "/v1/chat/completions", 400),
    ]  # fmt: skip
    assert (lines[0]["completion_tokens"], lines[0]["finish"], lines[0]["client"]) == (11, ["stop"], "127.0.0.1")
    assert lines[0]["id"] == server.engine.requests[0].id
    assert lines[2]["error"] == "unknown_parameter"


def test_a_failure_of_the_server_s_own_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with running() as server:
        server.engine.submit = lambda *_: 1 / 0
        response = server.post()
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        assert "division" not in response.text
        assert "ZeroDivisionError" in caplog.text
        server.engine.status = lambda: 1 / 0
        assert server.http.get("/api/status").status_code == 500


def test_metrics_say_what_was_answered() -> None:
    with running() as server:
        server.chat()
        list(server.chat(stream=True))
        server.post(foo=1)
        server.http.get("/some/path/of/someone")
        text = server.http.get("/metrics").text
    for line in (
        'ktopt_http_requests_total{path="/v1/chat/completions",status="200"} 2.0',
        'ktopt_http_requests_total{path="/v1/chat/completions",status="400"} 1.0',
        'ktopt_http_requests_total{path="other",status="404"} 1.0',
        'ktopt_choices_total{reason="stop"} 2.0',
        "ktopt_time_to_first_token_seconds_count 2.0",
        'ktopt_cache_pages{state="free"} 97.0',
        'ktopt_memory_bytes{tier="cache"} 1.048576e+06',
        "ktopt_requests_total 2.0",
        'ktopt_refused_total{code="queue_full"} 1.0',
    ):
        assert line in text.splitlines(), line


def test_the_status_and_the_plan_are_given_as_json(server: Running) -> None:
    status = server.http.get("/api/status").json()
    assert status["backend"] == "balance_serve"
    assert status["pages"] == {"page_tokens": 32, "total": 100, "used": 1, "cached": 2, "free": 97}
    assert status["model"] == "fake"
    assert status["process_bytes"] > 1 << 20
    assert server.http.get("/api/plan").json()["steps"] == []


def test_events_that_come_at_once_wake_the_loop_once() -> None:
    from ktopt.engine.events import Piece
    from ktopt.server.bridge import Answer, Mailbox

    calls = []

    class Loop:
        def call_soon_threadsafe(self, call: object) -> None:
            calls.append(call)

    mailbox = Mailbox(Loop())  # type: ignore[arg-type]
    answers = [Answer(mailbox, lambda answer, event: None, 1 << 20) for _ in range(3)]
    for answer in answers:
        mailbox.put(answer, 0, Piece(0, "x", (1,)))
    assert len(calls) == 1
    calls[0]()
    assert [answer.unread_bytes for answer in answers] == [1, 1, 1]
    thread = threading.Thread(target=mailbox.put, args=(answers[0], 0, Piece(0, "y", (1,))))
    thread.start()
    thread.join()
    assert len(calls) == 2


def test_what_runs_may_end_and_what_comes_is_refused_while_a_server_stops() -> None:
    import asyncio

    with running(FakeEngine("abcdef", token_s=0.1)) as server:
        connection = server.connection(json.dumps({**CHAT, "stream": True}).encode())
        wait_for(lambda: server.engine.tickets)
        traffic = server.service.traffic
        drained = threading.Thread(target=lambda: asyncio.run(traffic.drained(10)))
        drained.start()
        wait_for(lambda: traffic.closing)
        response = server.post()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
        assert response.headers["retry-after"] == "1"
        assert server.http.get("/health").status_code == 503
        text = b""
        while b"[DONE]" not in text:
            text += connection.recv(4096)
        drained.join(5)
        assert not drained.is_alive()
        connection.close()


def test_answers_that_are_cut_off_by_the_end_say_so() -> None:
    with running(FakeEngine("x" * 1000, token_s=0.02)) as server:
        threading.Timer(0.3, server.engine.close).start()
        start = time.monotonic()
        with pytest.raises(openai.APIError) as caught:
            list(server.chat(stream=True))
        assert caught.value.code == "shutting_down"
        assert time.monotonic() - start < 5
