"""One request after another, on a context that is kept: the model's own text, read no more than needed, stopped when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from apply_fixtures import greedy, hand_plan, make_model, make_tokenizer, source_of
from gguf_fixtures import make_gguf, tiny_model

from ktopt.api import load_model
from ktopt.applying import apply_plan
from ktopt.engine.events import Failed, Finished, Piece, Reading
from ktopt.engine.request import Refused, Request, Sampling
from ktopt.engine.single import SingleEngine
from ktopt.source import SourceFile

AS_IT_IS = SourceFile("rules.yaml", "version: 1\nrules: []\n")
CONFIG = """\
model: {name_or_path: tiny, device: cpu}
long_context:
  {max_seq_len: 256, max_new_tokens: 32, block_size: 16, chunk_size: 32, local_windows_len: 64, second_select_num: 256,
   preselect_block: false, dense_layer_num: 0, kv_type: FP32}
kvc2: {cpu_memory_size_GB: 1}
"""
GREEDY = Sampling(temperature=0.0)
PROMPT = tuple(range(20, 60))


def request(prompt: Any = PROMPT, tokens: int = 12, **wanted: Any) -> Request:
    return Request(prompt_ids=tuple(prompt), max_tokens=tokens, **{"sampling": GREEDY, "ignore_eos": True, **wanted})


def tokens_of(events: list[Any], index: int = 0) -> list[int]:
    return [token for event in events if isinstance(event, Piece) and event.index == index for token in event.token_ids]


def last(events: list[Any]) -> Any:
    assert isinstance(events[-1], Finished | Failed)
    return events[-1]


@pytest.fixture(scope="module")
def model() -> Any:
    original = make_model("llama", seed=4)
    return apply_plan(hand_plan(original), weights=source_of(original))


@pytest.fixture
def engine(model: Any) -> Iterator[SingleEngine]:
    with SingleEngine(model, make_tokenizer()) as made:
        yield made


def generated(model: Any, prompt: Any, tokens: int) -> list[int]:
    model.generation_config.eos_token_id = None
    return greedy(model, tokens, torch.tensor([list(prompt)]))


def test_its_text_is_what_generate_makes(engine: SingleEngine, model: Any) -> None:
    events = list(engine.stream(request()))
    assert tokens_of(events) == generated(model, PROMPT, 12)
    assert "".join(event.text for event in events if isinstance(event, Piece)) == engine.tokenizer.decode(
        tokens_of(events), skip_special_tokens=True
    )
    assert events[0] == Reading(40, 40, 0)
    assert (last(events).reason, last(events).usage.completion_tokens) == ("length", 12)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_what_prompts_have_in_common_is_read_once_and_the_answers_stay_the_same(kind: str) -> None:
    model = tiny_model(kind)
    prompts = [
        range(20, 120), [*range(20, 120), *range(200, 210)], [*range(20, 90), 7, 8], [9, 10, 11], range(20, 120), range(20, 120),
    ]  # fmt: skip
    with SingleEngine(model, make_tokenizer()) as engine:
        found = [list(engine.stream(request(prompt, 5))) for prompt in prompts]
    assert [tokens_of(events) for events in found] == [generated(model, prompt, 5) for prompt in prompts]
    cached = [last(events).usage.cached_tokens for events in found]
    if kind == "qwen3_next":  # its states can't be taken back
        assert cached == [0, 0, 0, 0, 0, 0]
    else:
        assert cached == [0, 100, 70, 0, 0, 100]


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_chat_that_goes_on_reads_only_what_is_new(kind: str) -> None:
    model = tiny_model(kind)
    with SingleEngine(model, make_tokenizer()) as engine:
        answer = tokens_of(list(engine.stream(request())))
        longer = [*PROMPT, *answer, 3, 4, 5]
        events = list(engine.stream(request(longer, 6)))
    assert last(events).usage.cached_tokens == len(PROMPT) + len(answer) - 1
    assert tokens_of(events) == generated(model, longer, 6)


def test_several_choices_read_the_prompt_once(engine: SingleEngine) -> None:
    wanted = request(n=3, sampling=Sampling(temperature=1.5, seed=5))
    events = list(engine.stream(wanted))
    texts = [tokens_of(events, index) for index in range(3)]
    assert len({tuple(text) for text in texts}) == 3
    assert engine.status().totals.prompt_tokens == len(PROMPT)
    assert tokens_of(list(engine.stream(replace(wanted, n=1)))) == texts[0]
    assert [event.index for event in events if isinstance(event, Finished)] == [0, 1, 2]


def test_a_seed_repeats_the_text_and_another_gives_another(engine: SingleEngine) -> None:
    def text(seed: int) -> list[int]:
        return tokens_of(list(engine.stream(request(sampling=Sampling(temperature=1.0, seed=seed)))))

    assert text(1) == text(1) != text(2)


def test_requests_wait_their_turn_and_the_queue_has_a_bound(model: Any) -> None:
    gate, order = threading.Event(), []
    with SingleEngine(model, make_tokenizer(), max_waiting=2) as engine:
        held = engine.submit(request(tokens=30), lambda event: gate.wait(10))
        while not engine.status().running:
            time.sleep(0.001)
        later = [engine.submit(request(client=f"c{at}"), lambda event, at=at: order.append((at, event))) for at in range(2)]
        with pytest.raises(Refused, match="2 requests wait already, of at most 2") as refused:
            engine.submit(request(), order.append)
        assert (refused.value.code, refused.value.retry, refused.value.numbers) == (
            "queue_full",
            True,
            {"waiting": 2, "max_waiting": 2},
        )
        status = engine.status()
        assert (status.running, status.waiting, [each.state for each in status.requests][1:]) == (1, 2, ["waiting"] * 2)
        gate.set()
        assert all(ticket.wait(20) for ticket in (held, *later))
    assert [at for at, _ in order] == sorted(at for at, _ in order)
    assert engine.status().totals.refused == {"queue_full": 1}


def test_a_cancelled_request_stops_between_pieces_of_its_prompt_and_loses_nothing(model: Any) -> None:
    with SingleEngine(model, make_tokenizer()) as engine:
        engine._context._piece = 16
        events: list[Any] = []
        tickets: list[Any] = []

        def stop(event: Any) -> None:
            events.append(event)
            if isinstance(event, Reading) and event.read_tokens == 32:
                while not tickets:
                    time.sleep(0.001)
                tickets[0].cancel()

        tickets.append(engine.submit(request(range(100)), stop))
        assert tickets[0].wait(20)
        assert [type(event) for event in events] == [Reading, Reading, Finished]
        assert last(events).reason == "cancelled"
        again = list(engine.stream(request(range(100))))
        assert last(again).usage.cached_tokens == 32
        assert engine.status().totals.cancelled == 1
    assert tokens_of(again) == generated(model, range(100), 12)


def test_closing_a_stream_stops_its_request(engine: SingleEngine) -> None:
    stream = engine.stream(request(tokens=400))
    while not isinstance(next(stream), Piece):
        pass
    stream.close()
    last_one = list(stream)[-1]
    assert (last_one.reason, engine.status().running) == ("cancelled", 0) or last_one.usage.completion_tokens < 300


def test_an_error_of_the_model_fails_its_request_and_not_the_engine(engine: SingleEngine, model: Any) -> None:
    good = tokens_of(list(engine.stream(request())))
    forward, calls = model.forward, []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no kernel")
        return forward(*args, **kwargs)

    model.forward = broken
    try:
        assert last(list(engine.stream(request(range(9))))) == Failed("RuntimeError: no kernel")
    finally:
        del model.forward
    events = list(engine.stream(request()))
    assert tokens_of(events) == good
    assert last(events).usage.cached_tokens == 0
    assert engine.status().totals.failed == 1


def test_who_raises_in_a_callback_is_cancelled(engine: SingleEngine) -> None:
    def broken(event: Any) -> None:
        raise ValueError("gone")

    assert engine.submit(request(tokens=200), broken).wait(20)
    assert engine.status().totals.cancelled == 1
    assert len(tokens_of(list(engine.stream(request())))) == 12


@pytest.mark.parametrize(
    ("wanted", "code", "said"),
    [
        (request(()), "invalid_request", "no tokens"),
        (request((1, 5000)), "invalid_request", "token 5000, and this model's are from 0 to 319"),
        (request(tokens=0), "invalid_request", "max_tokens must be at least 1, not 0"),
        (request(n=0), "invalid_request", "n must be from 1 to 128, not 0"),
        (request(stop=("a", "")), "invalid_request", "can't be empty"),
        (request(stop=("a",) * 65), "invalid_request", "may be 64 stop texts, and here are 65"),
        (request(stop=("a" * 1025,)), "invalid_request", "may have 1024 characters, and one has 1025"),
        (request(sampling=Sampling(temperature=-1)), "invalid_request", "temperature must be from 0 to 100, not -1"),
        (request(sampling=Sampling(temperature=float("nan"))), "invalid_request", "temperature must be from 0 to 100, not nan"),
        (request(sampling=Sampling(top_p=1.5)), "invalid_request", "top_p must be from 0 to 1, not 1.5"),
        (request(sampling=Sampling(top_k=-1)), "invalid_request", "top_k must be at least 0, not -1"),
        (request(sampling=Sampling(logprobs=21)), "invalid_request", "logprobs must be from 0 to 20"),
        (request(sampling=Sampling(repetition_penalty=0)), "invalid_request", "repetition_penalty must be from 0.01 to 100, not 0"),
        (request(sampling=Sampling(repetition_penalty=5e-324)), "invalid_request", "repetition_penalty must be from 0.01 to 100"),
        (request(sampling=Sampling(logit_bias=((400, 1.0),))), "invalid_request", "logit_bias has token 400"),
        (request(range(300), 300), "context_length_exceeded", "300 tokens and max_tokens is 300, 600 in all; the context is 512"),
        (request([1] * 600, 1), "context_length_exceeded", "shorten the prompt$"),
    ],
)
def test_what_can_not_be_is_refused_at_once(engine: SingleEngine, wanted: Request, code: str, said: str) -> None:
    with pytest.raises(Refused, match=said) as refused:
        engine.submit(wanted, print)
    assert refused.value.code == code
    assert engine.status().totals.refused == {code: 1}


def test_closing_drains_and_then_cancels_and_refuses(model: Any) -> None:
    engine, events = SingleEngine(model, make_tokenizer()), []
    short = engine.submit(request(tokens=3), events.append)
    engine.close(drain_s=20)
    assert short.done
    assert last(events).reason == "length"
    with pytest.raises(Refused, match="shutting down") as refused:
        engine.submit(request(), print)
    assert refused.value.code == "shutting_down"
    engine, events = SingleEngine(model, make_tokenizer()), []
    tickets = [engine.submit(request(tokens=400), events.append) for _ in range(3)]
    engine.close()
    assert all(ticket.done for ticket in tickets)
    assert [event.reason for event in events if isinstance(event, Finished)] == ["cancelled"] * 3


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("long")
    make_gguf(folder / "m.gguf", tiny_model("llama"), "F32")
    (folder / "config.yaml").write_text(CONFIG)
    model, _ = load_model(folder / "m.gguf", AS_IT_IS, mode="long_context", config=folder / "config.yaml")
    with model.ktopt_session as made:
        yield made


def test_it_runs_on_a_session_of_long_contexts(session: Any) -> None:
    wanted = [list(session.generate(torch.tensor(list(prompt)), 6)) for prompt in (range(20, 120), range(20, 125))]
    session.reset()
    with SingleEngine.over_session(session) as engine:
        first, second = (list(engine.stream(request(prompt, 6))) for prompt in (range(20, 120), range(20, 125)))
        assert [tokens_of(first), tokens_of(second)] == wanted
        assert [event.read_tokens for event in first if isinstance(event, Reading)] == [32, 64, 96, 100]
        assert last(second).usage.cached_tokens == 100
        assert engine.status().backend == "long_context"
        assert set(engine.status().memory_bytes) == {"device", "memory", "disk"}
        with pytest.raises(Refused, match="the prompt has 260 tokens, and a prompt may have 256"):
            engine.submit(request(range(30, 290), 1), print)


def test_a_session_keeps_what_a_cancelled_request_has_read(session: Any) -> None:
    session.reset()
    with SingleEngine.over_session(session) as engine:
        events: list[Any] = []
        stream = engine.stream(request(range(40, 140)))
        for event in stream:
            events.append(event)
            if isinstance(event, Reading):
                stream.close()
        read = [event.read_tokens for event in events if isinstance(event, Reading)][-1]
        if read < 100:
            assert last(events).reason == "cancelled"
            assert session.length == read
        again = list(engine.stream(request(range(40, 140))))
        assert last(again).usage.cached_tokens >= min(read, 98)


def test_the_demo_model_answers(smollm2: Path) -> None:
    model, tokenizer = load_model(smollm2, Path(__file__).parent.parent / "rules" / "smollm2" / "cpu.yaml")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "What is 2+2?"}], add_generation_prompt=True)["input_ids"]
    with SingleEngine(model, tokenizer) as engine:
        events = list(engine.stream(Request(prompt_ids=tuple(ids), max_tokens=24)))
    assert "4" in "".join(event.text for event in events if isinstance(event, Piece))
    assert (last(events).reason, last(events).stop) == ("stop", tokenizer.eos_token_id)
