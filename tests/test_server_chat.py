"""/v1/chat/completions and its relatives, spoken to by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

pytest.importorskip("fastapi")

from fake_engine import FakeEngine
from server_fixtures import Running, running

from ktopt.engine.events import Failed
from ktopt.engine.request import GrammarSpec, Refused
from ktopt.server.settings import Sampled, Settings

IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as made:
        yield made


@pytest.fixture(autouse=True)
def plain_engine(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        engine = request.getfixturevalue("server").engine
        engine.refuse = engine.fail = None
        engine.cached_tokens = 0


def test_a_chat_is_answered(server: Running) -> None:
    server.engine.cached_tokens = 7
    made = server.chat("Say it")
    assert made.object == "chat.completion"
    assert made.model == "fake"
    assert made.id.startswith("chatcmpl-")
    (choice,) = made.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello there", "stop")
    assert choice.logprobs is None
    assert choice.message.tool_calls is None
    prompt = "<user>Say it\n<assistant>"
    assert "".join(map(chr, server.engine.requests[-1].prompt_ids)) == prompt
    assert (made.usage.prompt_tokens, made.usage.completion_tokens, made.usage.total_tokens) == (len(prompt), 11, len(prompt) + 11)
    assert made.usage.prompt_tokens_details.cached_tokens == 7


def test_a_stream_has_the_same_text_and_the_usage_at_its_end(server: Running) -> None:
    chunks = list(server.chat(stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello there"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 11
    assert all(chunk.usage is None for chunk in chunks[:-1])
    plain = list(server.chat(stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in plain)


def test_a_stream_s_bytes_are_server_sent_events(server: Running) -> None:
    response = server.post(stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    for line in lines[:-2]:
        json.loads(line.removeprefix("data: "))


def test_several_choices_and_seeds(server: Running) -> None:
    server.engine.says = lambda request, choice: f"answer {choice}"
    made = server.chat(n=3, seed=-1)
    assert [choice.message.content for choice in made.choices] == ["answer 0", "answer 1", "answer 2"]
    assert made.usage.completion_tokens == 3 * len("answer 0")
    assert server.engine.requests[-1].sampling.seed == (1 << 63) - 1
    texts = {0: "", 1: "", 2: ""}
    for chunk in server.chat(n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "answer 0", 1: "answer 1", 2: "answer 2"}
    server.engine.says = lambda request, choice: "Hello there"


def test_log_probabilities_have_openai_s_shape(server: Running) -> None:
    made = server.chat(logprobs=True, top_logprobs=2, max_tokens=2)
    assert made.choices[0].finish_reason == "length"
    first, second = made.choices[0].logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("H", [72], -0.5)
    assert [(top.token, top.bytes, top.logprob) for top in second.top_logprobs] == [("e", [101], -0.5), ("é", [195, 169], -9999.0)]
    streamed = [
        token
        for chunk in server.chat(logprobs=True, max_tokens=2, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content
    ]
    assert [token.token for token in streamed] == ["H", "e"]
    assert streamed[0].top_logprobs == []


def test_what_a_request_says_reaches_the_engine(server: Running) -> None:
    server.chat(
        temperature=0.5, top_p=0.25, frequency_penalty=1, presence_penalty=-1.5, logit_bias={"65": -100}, stop=["t", "z"],
        max_completion_tokens=9, seed=5, user="someone", metadata={"a": "b"}, store=False,
        extra_body={"top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "ignore_eos": True},
    )  # fmt: skip
    made = server.engine.requests[-1]
    assert (made.max_tokens, made.stop, made.ignore_eos, made.client) == (9, ("t", "z"), True, "127.0.0.1")
    sampling = made.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 3, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (1, -1.5, 1.5)
    assert (sampling.logit_bias, sampling.seed, sampling.logprobs) == (((65, -100.0),), 5, None)


def test_without_a_word_the_defaults_are_the_server_s_and_the_rest_the_model_s() -> None:
    with running(settings=Settings(sampled=Sampled(temperature=0.25, top_k=5), max_new_tokens=50)) as server:
        server.chat()
        made = server.engine.requests[-1]
        assert (made.max_tokens, made.sampling.temperature, made.sampling.top_k, made.sampling.top_p) == (50, 0.25, 5, None)
        with pytest.raises(openai.BadRequestError, match="at most 50"):
            server.chat(max_tokens=51)


def test_an_answer_may_be_as_long_as_the_context_has_room() -> None:
    with running(FakeEngine(context_tokens=40)) as server:
        server.chat("hi")
        made = server.engine.requests[-1]
        assert len(made.prompt_ids) + made.max_tokens == 40
        with pytest.raises(openai.BadRequestError) as caught:
            server.chat("hi" * 40)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"


def test_messages_reach_the_template_as_text(server: Running) -> None:
    server.openai.chat.completions.create(
        model="other",
        messages=[
            {"role": "developer", "content": "Be brief"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "assistant", "content": None, "refusal": "no"},
            {"role": "user", "content": "why?", "name": "me"},
        ],
    )
    shown = "".join(map(chr, server.engine.requests[-1].prompt_ids))
    assert shown == "<system>Be brief\n<user>one\ntwo\n<assistant>no\n<user>why?\n<assistant>"


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n"])
def test_answers_begin_with_a_thought_where_that_is_forced(template: str | None) -> None:
    with running(FakeEngine("so.</think>ok", template=template), Settings(force_think=True)) as server:
        whole = server.chat(n=2)
        assert [choice.message.content for choice in whole.choices] == ["<think>\nso.</think>ok"] * 2
        assert "".join(chunk.choices[0].delta.content or "" for chunk in server.chat(stream=True)) == "<think>\nso.</think>ok"
        shown = "".join(map(chr, server.engine.requests[-1].prompt_ids))
        assert shown.endswith("<think>\n")
        assert shown.count("<think>") == 1
        made = server.chat(response_format={"type": "json_object"})
        assert made.choices[0].message.content == "so.</think>ok", "what a grammar begins is left to it"
        assert template or "<think>" not in "".join(map(chr, server.engine.requests[-1].prompt_ids))


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"type": "json_object"}, "json_object", ""),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object"}}},
            "json_schema", '{"type": "object"}',
        ),
    ],
)  # fmt: skip
def test_a_response_format_is_a_grammar(server: Running, given: dict, kind: str, text: str) -> None:
    server.chat(response_format=given)
    assert server.engine.requests[-1].grammar == GrammarSpec(kind, text)  # type: ignore[arg-type]
    server.chat(response_format={"type": "text"})
    assert server.engine.requests[-1].grammar is None


def test_openai_s_helper_for_structured_answers_works() -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    with running(FakeEngine('{"name": "Ada", "age": 36}')) as server:
        made = server.openai.chat.completions.parse(
            model="fake", messages=[{"role": "user", "content": "?"}], response_format=Person
        )
        assert made.choices[0].message.parsed == Person(name="Ada", age=36)
        assert json.loads(server.engine.requests[-1].grammar.text)["required"] == ["name", "age"]


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"foo": 1}, "foo", "unknown_parameter"),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"temperature": 3}, "temperature", "invalid_value"),
        ({"n": True}, "n", "invalid_type"),
        ({"n": 17}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": None}, "messages", "invalid_type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "cat", "content": "x"}]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo", "unknown_parameter"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]", "unsupported_content"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"stop": [""]}, "stop[0]", "invalid_value"),
        ({"modalities": ["audio"]}, "modalities", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"functions": []}, "functions", "unsupported_parameter"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "unsupported_parameter"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"response_format": NO_SCHEMA}, "response_format.json_schema.schema", "invalid_value"),
        ({"response_format": {"type": "yaml"}}, "response_format", "invalid_value"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_of_the_parameter(server: Running, body: dict, param: str, code: str) -> None:
    response = server.post(**body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error"), error
    assert error["message"]


def test_a_template_s_own_complaint_is_told() -> None:
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('users speak first') }}{% endif %}{{ messages[0].content }}"
    with (
        running(FakeEngine(template=template)) as server,
        pytest.raises(openai.BadRequestError, match="users speak first") as caught,
    ):
        server.openai.chat.completions.create(model="fake", messages=[{"role": "system", "content": "x"}])
    assert caught.value.param == "messages"


def test_variables_of_the_template_can_be_given() -> None:
    with running(FakeEngine(template="{{ messages[0].content }}{{ mood }}{{ reasoning_effort }}")) as server:
        server.chat("hi", reasoning_effort="low", extra_body={"chat_template_kwargs": {"mood": "!"}})
        assert "".join(map(chr, server.engine.requests[-1].prompt_ids)) == "hi!low"


@pytest.mark.parametrize(
    ("refusal", "kind", "status"),
    [
        (Refused("queue_full", "256 wait already"), openai.RateLimitError, 429),
        (Refused("no_room", "needs 99 pages of 10"), openai.BadRequestError, 400),
        (Refused("shutting_down", "the engine is closing"), openai.InternalServerError, 503),
        (Refused("invalid_schema", "no such type"), openai.BadRequestError, 400),
    ],
)
def test_a_refusal_of_the_engine_is_one_of_openai_s_errors(server: Running, refusal: Refused, kind: type, status: int) -> None:
    server.engine.refuse = refusal
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            server.chat(stream=stream)
        assert caught.value.status_code == status
        assert caught.value.code == refusal.code
        assert str(refusal) in caught.value.message
        assert ("retry-after" in caught.value.response.headers) == (status in (429, 503))


def test_a_failure_in_the_middle_is_told_and_its_reason_kept(server: Running) -> None:
    server.engine.fail = Failed("secret: tensor at 0x7f")
    with pytest.raises(openai.InternalServerError) as caught:
        server.chat()
    assert "secret" not in str(caught.value)
    text: list[str] = []
    with pytest.raises(openai.APIError) as streamed:
        text.extend(chunk.choices[0].delta.content or "" for chunk in server.chat(stream=True))
    assert "".join(text) == "He"
    assert streamed.value.code == "internal_error"
    assert "secret" not in str(streamed.value)


def test_models_are_listed_and_others_are_not_found(server: Running) -> None:
    assert [model.id for model in server.openai.models.list()] == ["fake", "other"]
    assert server.openai.models.retrieve("other").owned_by == "ktopt"
    for ask in (lambda: server.openai.models.retrieve("a/b"), lambda: server.post_named("nope")):
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert caught.value.code == "model_not_found"


def test_whatever_model_is_asked_for_where_that_is_allowed() -> None:
    with running(settings=Settings(any_model=True)) as server:
        assert (
            server.openai.chat.completions.create(model="DeepSeek-R1", messages=[{"role": "user", "content": "x"}]).model
            == "DeepSeek-R1"
        )
