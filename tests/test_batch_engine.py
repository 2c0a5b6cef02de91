"""Many requests at once on real models are each as alone; threads that submit, cancel and hang up leave nothing behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from apply_fixtures import make_tokenizer
from engine_fixtures import alone, last, make_engine, tokens_of
from gguf_fixtures import tiny_model

from ktopt.api import load_model
from ktopt.cache.paged import PagedCache
from ktopt.engine.batch import BatchEngine
from ktopt.engine.events import Event, Failed, Finished, Piece
from ktopt.engine.request import Refused, Request, Sampling

GREEDY = Sampling(temperature=0.0)
ROOT = Path(__file__).parent.parent


def prompt(seed: int, length: int) -> tuple[int, ...]:
    made = random.Random(seed)
    return tuple(made.randrange(256) for _ in range(length))


def generated(model: Any, ids: tuple[int, ...], count: int) -> list[int]:
    """By transformers, alone."""
    given = torch.tensor([ids])
    made = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return made[0, len(ids) :].tolist()  # type: ignore[no-any-return]


def run_all(engine: BatchEngine, requests: list[Request]) -> list[list[Event]]:
    """The events of requests that are submitted at once."""
    events: list[list[Event]] = [[] for _ in requests]
    jobs = [engine.submit(request, each.append) for request, each in zip(requests, events, strict=True)]
    assert all(job.wait(120) for job in jobs)
    return events


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_moe"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


def engine_for(model: Any, tokens: int = 4096, **settings: Any) -> BatchEngine:
    return BatchEngine(model, make_tokenizer(), PagedCache(model, tokens=tokens, page_tokens=16), **settings)


@pytest.fixture
def engine(model: Any) -> Iterator[BatchEngine]:
    with engine_for(model, chunk_size=32) as made:
        yield made
    made.cache.check()


def test_many_at_once_are_each_as_generate_makes_them_alone(engine: BatchEngine, model: Any) -> None:
    shared = prompt(0, 70)
    prompts = [prompt(1, 5), (*shared, 1, 2), prompt(2, 90), (*shared, 3), prompt(3, 1), shared, prompt(4, 33)]
    requests = [
        Request(prompt_ids=ids, max_tokens=6 + at, sampling=GREEDY, ignore_eos=True, client=str(at % 2))
        for at, ids in enumerate(prompts)
    ]
    for _ in range(2):  # the second time their prompts are cached
        events = run_all(engine, requests)
        assert [tokens_of(each) for each in events] == [generated(model, r.prompt_ids, r.max_tokens) for r in requests]
    assert [last(each).usage.cached_tokens for each in events] == [0, 64, 80, 64, 0, 64, 32]


def test_a_seed_gives_the_same_text_alone_and_in_company(engine: BatchEngine) -> None:
    wanted = Request(prompt_ids=prompt(5, 40), max_tokens=16, sampling=Sampling(temperature=1.1, top_p=0.9, seed=8), n=2)
    company = [
        Request(prompt_ids=prompt(at, 10 * at), max_tokens=20, sampling=Sampling(temperature=1.0), ignore_eos=True)
        for at in range(1, 5)
    ]
    [by_itself] = run_all(engine, [wanted])
    engine.cache.clear()
    among_others = run_all(engine, [*company[:2], wanted, *company[2:]])[2]
    for index in range(2):
        assert tokens_of(by_itself, index) == tokens_of(among_others, index)
    assert tokens_of(by_itself, 0) != tokens_of(by_itself, 1)


def test_logprobs_are_those_of_the_model(model: Any, engine: BatchEngine) -> None:
    asked = Request(prompt_ids=prompt(6, 20), max_tokens=4, sampling=Sampling(temperature=0.0, logprobs=2), ignore_eos=True)
    plain = Request(prompt_ids=prompt(7, 20), max_tokens=4, sampling=GREEDY, ignore_eos=True)
    events, others = run_all(engine, [asked, plain])
    told = [each for event in events if isinstance(event, Piece) for each in event.logprobs or ()]
    with torch.no_grad():
        logits = model(torch.tensor([[*asked.prompt_ids, *tokens_of(events)]])).logits[0, len(asked.prompt_ids) - 1 : -1]
    wanted = logits.float().log_softmax(-1).topk(2)
    assert [each.token_id for each in told] == tokens_of(events)
    for each, values, words in zip(told, wanted.values, wanted.indices, strict=True):
        assert [word for word, _ in each.top] == words.tolist()
        assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert all(event.logprobs is None for event in others if isinstance(event, Piece))


def test_the_demo_model_says_the_same_to_many_as_to_one(smollm2: Path) -> None:
    model, tokenizer = load_model(smollm2, ROOT / "rules" / "smollm2" / "reference.yaml")
    questions = ["What is 2+2?", "Name three colours."]
    prompts = [
        tuple(tokenizer.apply_chat_template([{"role": "user", "content": each}], add_generation_prompt=True)["input_ids"])
        for each in questions
    ]
    with BatchEngine(model, tokenizer, PagedCache(model, tokens=1024)) as engine:
        requests = [Request(prompt_ids=ids, max_tokens=8, sampling=GREEDY, ignore_eos=True) for ids in prompts]
        together = run_all(engine, requests)
        assert [tokens_of(each) for each in together] == [generated(model, ids, 8) for ids in prompts]
        status = engine.status()
        assert (status.totals.completion_tokens, status.totals.finished) == (16, 2)
        assert status.pages is not None
        assert status.pages.used == 0
        assert status.memory_bytes == {"memory": engine.cache.nbytes}


def test_a_model_without_numbers_fails_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(monkeypatch) as engine:
        forward = engine._model.forward
        monkeypatch.setattr("ktopt.engine.batch.forward_paged", lambda *args: forward(*args) * float("nan"))
        [events] = run_all(engine, [Request(prompt_ids=(1, 2), max_tokens=4)])
    assert last(events) == Failed("the model's logits are no numbers, or the grammar leaves no word")


def test_threads_that_submit_cancel_and_hang_up_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, pages=120, page_tokens=4, chunk_size=16, max_running=6, max_waiting=10)
    wrong: list[str] = []

    def client(number: int) -> None:
        made = random.Random(number)
        for turn in range(25):
            ids = tuple(made.randrange(20) + 40 * made.randrange(2) for _ in range(made.randrange(1, 60)))
            sampling = Sampling(temperature=made.choice([0.0, 1.0]), seed=turn)
            request = Request(
                prompt_ids=ids, max_tokens=made.randrange(1, 12), sampling=sampling, n=made.choice([1, 1, 2]), client=str(number)
            )
            try:
                stream = engine.stream(request)
            except Refused as refused:
                if refused.code not in ("queue_full", "no_room"):
                    wrong.append(str(refused))
                time.sleep(0.001)
                continue
            if made.random() < 0.3:
                time.sleep(made.random() / 100)
                stream.close()
            events = list(stream)
            if last(events).reason != "cancelled" and all(
                event.reason != "cancelled" for event in events if isinstance(event, Finished)
            ):
                found = [tokens_of(events, index) for index in range(request.n)]
                if found != alone(request):
                    wrong.append(f"{request}: {found}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        status = engine.status()
        assert status.running <= 6
        assert status.waiting <= 10
        time.sleep(0.002)
    for thread in threads:
        thread.join()
    engine.close(20)
    assert wrong == []
    engine.cache.check()
    assert engine.cache.used_pages == 0
    totals = engine.status().totals
    assert totals.requests == totals.finished + totals.cancelled
    assert totals.requests > 50


def test_closing_lets_what_runs_end_and_then_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for drain_s, reason in ((20.0, "length"), (0.0, "cancelled")):
        engine, events = make_engine(monkeypatch), []
        engine._model.gate.clear()
        engine.submit(Request(prompt_ids=(1, 2, 3), max_tokens=30, sampling=GREEDY, ignore_eos=True), events.append)
        closing = threading.Thread(target=engine.close, args=(drain_s,))
        closing.start()
        time.sleep(0.05)
        with pytest.raises(Refused, match="shutting down"):
            engine.submit(Request(prompt_ids=(1,), max_tokens=1), events.append)
        assert engine.status().closing
        engine._model.gate.set()
        closing.join(20)
        assert last(events).reason == reason
        assert engine.cache.used_pages == 0


@pytest.mark.parametrize("part", ["give_up", "_drop_cancelled"])
def test_an_engine_that_breaks_says_so_and_keeps_nobody_waiting(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, events = make_engine(monkeypatch), []

    def broken(*args: Any) -> None:
        raise RuntimeError("the books are wrong")

    engine._scheduler.plan = broken  # type: ignore[method-assign]
    setattr(engine, part, broken)
    job = engine.submit(Request(prompt_ids=(1,), max_tokens=1), events.append)
    assert job.wait(20)
    assert last(events).message == "the engine is broken, and has ended"
    assert engine.status().closing
    assert engine.status().waiting == 0
    with pytest.raises(Refused, match="broken"):
        engine.submit(Request(prompt_ids=(1,), max_tokens=1), events.append)
    engine.close()
