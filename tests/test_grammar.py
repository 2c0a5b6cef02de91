"""Answers follow their schema, regex or grammar to its end, and what strangers send is refused in bounded time."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine_fixtures import TOKENIZER, last, make_engine, tokens_of

from ktopt.engine.events import Piece
from ktopt.engine.grammar import Grammars
from ktopt.engine.grammar_check import CHECK_S, Checker
from ktopt.engine.request import GrammarSpec, Refused, Request, Sampling
from ktopt.weights.gguf_tokenizer import tokenizer_from_gguf

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", 3]}, "maxItems": 3},
        "deep": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99}}}]},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def schema(value: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


@pytest.fixture(scope="module")
def grammars(smollm2: Path) -> Iterator[Grammars]:
    tokenizer = tokenizer_from_gguf(smollm2)
    made = Grammars(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    yield made
    made.close()


def answers(monkeypatch: pytest.MonkeyPatch, spec: GrammarSpec, count: int = 6, **wanted: Any) -> list[list[Any]]:
    """Events of answers by a model that says anything at all."""
    with make_engine(monkeypatch, pages=512) as engine:
        asked = []
        for seed in range(count):
            sampling = Sampling(temperature=1.0, seed=seed)
            request = Request(prompt_ids=(seed, 7), sampling=sampling, grammar=spec, **{"max_tokens": 300, **wanted})
            events: list[Any] = []
            asked.append((engine.submit(request, events.append), events))
        assert all(job.wait(60) for job, _ in asked)
    engine.cache.check()  # a request's last event comes before its pages are given back
    assert engine.cache.used_pages == 0
    return [events for _, events in asked]


def text_of(events: list[Any], index: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, Piece) and event.index == index)


def test_answers_are_json_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answers(monkeypatch, schema(SCHEMA), n=2)
    for events in found:
        for index in range(2):
            jsonschema.validate(json.loads(text_of(events, index)), SCHEMA)
        assert last(events).reason == "stop"
    assert len({text_of(events) for events in found}) > 3


def test_answers_match_a_regex_and_follow_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    for events in answers(monkeypatch, GrammarSpec("regex", r"[a-f]{3,5}-(yes|no)")):
        assert re.fullmatch(r"[a-f]{3,5}-(yes|no)", text_of(events))
    for events in answers(monkeypatch, GrammarSpec("lark", 'start: "<call>" %json {"type": "boolean"} "</call>"')):
        assert text_of(events) in ("<call>true</call>", "<call>false</call>")


def test_an_answer_ends_where_nothing_can_follow_and_may_end_where_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    [events] = answers(monkeypatch, GrammarSpec("regex", "yes"), 1)
    assert (text_of(events), last(events).reason, last(events).usage.completion_tokens) == ("yes", "stop", 3)
    ends = [last(events).stop for events in answers(monkeypatch, GrammarSpec("regex", "[ab]{1,200}"))]
    assert TOKENIZER.eos_token_id in ends
    assert all(last(events).reason == "stop" for events in answers(monkeypatch, GrammarSpec("regex", "[ab]{1,9}"), ignore_eos=True))


def test_stop_texts_and_max_tokens_end_an_answer_within_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    [events] = answers(monkeypatch, GrammarSpec("regex", "[ab]{20}END[c]{20}"), 1, stop=("ENDc",))
    assert (len(text_of(events)), last(events).stop) == (20, "ENDc")
    [events] = answers(monkeypatch, GrammarSpec("regex", "[ab]{20}"), 1, max_tokens=5)
    assert (len(tokens_of(events)), last(events).reason) == (5, "length")


def test_a_json_object_begins_with_a_brace_and_whitespace_is_bounded(grammars: Grammars) -> None:
    matcher = grammars.matcher(GrammarSpec("json_object"))
    words = [grammars._tokenizer.decode([at]) for at, no in enumerate(matcher.forbidden()) if not no]
    assert "{" in words
    assert all(word.startswith("{") for word in words)
    matcher.take(grammars._tokenizer.convert_tokens_to_ids("{"))
    for _ in range(60):
        if matcher.forbidden()[newline := grammars._tokenizer("\n").input_ids[0]]:
            break
        matcher.take(newline)
    assert matcher.forbidden()[newline]


HOSTILE = {
    "nested": GrammarSpec("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
    "lists": GrammarSpec("json_schema", "[" * 30000 + "]" * 30000),
    "no JSON": GrammarSpec("json_schema", "{"),
    "no schema": GrammarSpec("json_schema", "[1, 2]"),
    "unknown type": schema({"type": "banana"}),
    "unknown keyword": schema({"type": "object", "unevaluatedProperties": False}),
    "nothing": schema(False),
    "itself": schema({"$ref": "#"}),
    "another's": schema({"$ref": "file:///etc/passwd"}),
    "a huge enum": schema({"enum": [f"value {at * 7919}" for at in range(100_000)]}),
    "many properties": schema({"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(2500)}}),
    "many ways": schema({"allOf": [{"oneOf": [{"type": "string", "pattern": f"a{{{j}}}"} for j in range(4)]} for _ in range(14)]}),
    "an open group": schema({"type": "string", "pattern": "(a"}),
    "a backreference": schema({"type": "string", "pattern": r"(a)\1"}),
    "a bad regex": GrammarSpec("regex", "[a"),
    "a bad grammar": GrammarSpec("lark", "start: nothing"),
    "hours of work": schema({"allOf": [{"type": "string", "pattern": f".*a.{{{at}}}"} for at in range(10, 30)]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_can_not_be_compiled_is_refused_in_bounded_time(grammars: Grammars, name: str) -> None:
    start = time.monotonic()
    with pytest.raises(Refused, match=r".") as refused:
        grammars.matcher(HOSTILE[name])
    assert refused.value.code == "invalid_schema"
    assert len(str(refused.value)) < 2000
    assert time.monotonic() - start < 30
    again = time.monotonic()
    with pytest.raises(Refused):
        grammars.matcher(HOSTILE[name])
    assert time.monotonic() - again < 0.5  # it is remembered
    assert not grammars.matcher(schema({"type": "integer"})).complete


def test_a_busy_machine_refuses_no_schema() -> None:
    """The process waits for longer than it may compute."""
    checker = Checker()
    try:
        assert checker.fault_of(schema({"type": "integer"})) == ""
        process = checker._process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        threading.Timer(CHECK_S + 0.3, process.send_signal, [signal.SIGCONT]).start()
        assert checker.fault_of(schema({"type": "string"})) == ""
        assert checker._process is process
    finally:
        checker.close()


def test_a_schema_is_refused_by_submit_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(monkeypatch) as engine:
        with pytest.raises(Refused, match="the JSON schema can't be followed") as refused:
            engine.submit(Request(prompt_ids=(1,), max_tokens=2, grammar=schema({"type": "banana"})), print)
        assert refused.value.code == "invalid_schema"
        assert engine.status().totals.refused == {"invalid_schema": 1}


def test_a_tokenizer_that_llguidance_does_not_know_is_said_so() -> None:
    class Slow:
        def __len__(self) -> int:
            return 5

    with pytest.raises(Refused, match="can't follow a grammar with this tokenizer") as refused:
        Grammars(Slow(), 5, [1]).matcher(GrammarSpec("json_object"))
    assert refused.value.code == "unsupported"


def test_a_grammar_that_ends_nowhere_later_on_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    [events] = answers(monkeypatch, GrammarSpec("lark", 'start: "a" rest\nrest: "b" rest'), 1)
    assert text_of(events) == ""
    assert last(events).message.startswith("the answer can't follow its grammar any further: ")
