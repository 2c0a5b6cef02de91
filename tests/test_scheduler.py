"""What a step computes, whose turn it is, and whose pages come back: by hand, step by step, without a thread."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from engine_fixtures import alone, last, make_engine, tokens_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktopt.engine.batch import BatchEngine
from ktopt.engine.events import Failed, Finished, Reading
from ktopt.engine.queueing import FairQueue
from ktopt.engine.request import Refused, Request, Sampling
from ktopt.engine.worker import Worker


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines do nothing by themselves."""
    monkeypatch.setattr(Worker, "_run", lambda self: None)


def step(engine: BatchEngine, times: int = 1) -> None:
    for _ in range(times):
        engine._drop_cancelled()
        engine.work()
        engine.cache.check()


def finish(engine: BatchEngine, most: int = 2000) -> int:
    """Step until nothing is left; the steps that it took."""
    for count in range(most):
        if not engine._running and not engine._waiting:
            return count
        step(engine)
    raise AssertionError("requests are left that never end")


def ask(prompt: Any, tokens: int = 4, **wanted: Any) -> Request:
    return Request(prompt_ids=tuple(prompt), max_tokens=tokens, **{"sampling": Sampling(temperature=0.0), **wanted})


def submit(engine: BatchEngine, request: Request) -> tuple[Any, list[Any]]:
    events: list[Any] = []
    return engine.submit(request, events.append), events


def test_a_step_has_a_token_of_every_answer_and_pieces_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, chunk_size=10)
    for first in (0, 50, 100):
        submit(engine, ask(range(first, first + 8)))
    finish(engine)
    assert engine._model.shapes == [[8, 2], [1, 6, 4], [1, 1, 4], [1, 1, 1], [1, 1], [1]]


def test_a_short_prompt_passes_a_long_one_which_nobody_passes_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, pages=400, chunk_size=10, max_running=8)
    long, events = submit(engine, ask(range(100), 1))
    step(engine, 2)
    short, _ = submit(engine, ask(range(200, 208), 1))
    step(engine)
    assert short.done
    assert not long.done
    for turn in range(100):
        if long.done:
            break
        for at in range(2):
            submit(engine, ask([(turn + at) % 300] * 9, 1))
        step(engine)
    assert turn < 25  # what it has to read is ten steps' work, and others come before it for as many again
    assert [event.read_tokens for event in events if isinstance(event, Reading)][-1] == 100


def test_what_can_never_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, pages=10, page_tokens=4, max_running=4)
    with pytest.raises(Refused, match="30 tokens of prompt and 1 times 12 new ones take 44 of the cache, and it has 40") as refused:
        submit(engine, ask(range(30), 12))
    assert (refused.value.code, refused.value.retry) == ("no_room", False)
    assert refused.value.numbers == {"needed_tokens": 44, "cache_tokens": 40}
    with pytest.raises(Refused, match="n is 5, and at most 4 answers"):
        submit(engine, ask(range(3), n=5))
    submit(engine, ask(range(30), 11))
    finish(engine)


def test_what_does_not_fit_now_waits_its_turn_and_nobody_passes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, pages=10, page_tokens=4)
    first, _ = submit(engine, ask(range(20), 5))
    second, _ = submit(engine, ask(range(100, 120), 5))
    third, _ = submit(engine, ask([7], 2))
    step(engine)
    assert (engine.status().running, engine.status().waiting) == (1, 2)
    order = []
    while engine._running or engine._waiting:
        step(engine)
        order += [name for name, job in (("first", first), ("second", second), ("third", third)) if job.done and name not in order]
    assert order == ["first", "third", "second"]
    assert engine.cache.used_pages == 0


def test_a_prompt_that_waits_takes_over_what_others_read_of_it_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, pages=200, page_tokens=4, chunk_size=16)
    asked = [submit(engine, ask([*range(64), 100 + at], 3)) for at in range(4)]
    finish(engine)
    cached = [last(events).usage.cached_tokens for _, events in asked]
    assert cached[0] == 0
    assert min(cached[1:]) >= 48
    assert engine.status().totals.prompt_tokens == 4 * 65
    assert engine.status().totals.cached_tokens == sum(cached)
    assert [tokens_of(events) for _, events in asked] == [alone(job.request)[0] for job, _ in asked]


def test_choices_share_their_prompts_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, pages=40, page_tokens=4)
    job, events = submit(engine, ask(range(42), 6, n=4, sampling=Sampling(temperature=1.0, seed=3)))
    step(engine)
    assert engine.cache.used_pages == 12 + 3 * 2
    other, _ = submit(engine, ask(range(100, 130), 4))
    step(engine)
    assert engine.status().running == 2
    finish(engine)
    assert [tokens_of(events, index) for index in range(4)] == alone(job.request)
    assert len({tuple(tokens) for tokens in alone(job.request)}) == 4
    assert other.done
    assert engine.cache.used_pages == 0


def test_pages_of_choices_to_come_are_kept_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, pages=20, page_tokens=4, chunk_size=8)
    submit(engine, ask(range(16), 9, n=4))  # 6 pages, and 2 for each further choice
    step(engine)
    submit(engine, ask(range(100, 130), 3))  # 8 pages, and there are 8
    submit(engine, ask([5], 1))
    step(engine)
    assert (engine.status().running, engine.status().waiting) == (2, 1)
    finish(engine)


def test_a_cancelled_request_gives_its_pages_back_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, pages=40, page_tokens=4, chunk_size=8)
    asked = [submit(engine, ask(range(at, at + 20), 10, n=1 + at % 2)) for at in range(3)]
    step(engine, 4)
    assert engine.cache.used_pages > 0
    for job, _ in asked:
        job.cancel()
    step(engine)
    assert engine.cache.used_pages == 0
    assert [last(events).reason for _, events in asked] == ["cancelled"] * 3
    assert [sum(isinstance(event, Finished) for event in events) for _, events in asked] == [1, 2, 1]
    assert engine.status().totals.cancelled == 3


def test_clients_take_turns_by_what_they_have_been_served(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, max_running=1)
    greedy = [submit(engine, ask(range(at, at + 10), client="many"))[0] for at in range(8)]
    finish_one = submit(engine, ask(range(100, 110), client="one"))[0]
    while not finish_one.done:
        step(engine)
    assert sum(job.done for job in greedy) <= 1


def test_a_client_that_comes_back_has_no_credit_for_its_absence() -> None:
    queue: FairQueue[Any] = FairQueue(10)

    class Item:
        def __init__(self, client: str) -> None:
            self.client = client

    queue.put(first := Item("a"))
    queue.start(first)
    queue.served("a", 1000)
    queue.put(Item("b"))
    queue.put(Item("a"))
    queue.served("b", 10)
    assert queue.head().client == "a"  # b began as served as a was


def test_one_client_can_not_fill_the_queue_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, max_waiting=8)
    submit(engine, ask([1], client="b"))
    for _ in range(4):
        submit(engine, ask([1], client="a"))
    with pytest.raises(Refused, match="wait already"):
        submit(engine, ask([1], client="a"))
    for at in range(3):
        submit(engine, ask([1], client=f"c{at}"))
    with pytest.raises(Refused, match="8 requests wait already, of at most 8"):
        submit(engine, ask([1], client="d"))


def test_a_step_that_fails_fails_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, pages=100, page_tokens=4, chunk_size=8)
    engine._model.faults = {3}
    asked = [submit(engine, ask(range(at * 30, at * 30 + 20), 3)) for at in range(2)]
    step(engine, 3)
    assert [events[-1] for _, events in asked] == [Failed("RuntimeError: a fault in the kernel"), Reading(4, 20, 0)] or last(
        asked[0][1]
    ) == Failed("RuntimeError: a fault in the kernel")
    later, events = submit(engine, ask(range(20), 3))
    finish(engine)
    assert tokens_of(events) == alone(later.request)[0]
    assert engine.cache.used_pages == 0
    assert engine.status().totals.failed >= 1


class Broken:
    """A grammar with a fault."""

    complete = False

    def forbidden(self) -> Any:
        raise RuntimeError("no such rule")

    def take(self, token: int) -> None:
        pass


def test_an_error_in_one_row_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch)
    asked = [submit(engine, ask(range(at, at + 5), 4)) for at in range(3)]
    row = asked[1][0].answers[0].row
    row.grammar, row.changes = Broken(), True
    finish(engine)
    assert last(asked[1][1]) == Failed("RuntimeError: no such rule")
    for at in (0, 2):
        assert tokens_of(asked[at][1]) == alone(asked[at][0].request)[0]
    assert engine.cache.used_pages == 0


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"), st.integers(1, 40), st.integers(0, 3), st.integers(1, 9), st.sampled_from([1, 1, 1, 2, 3]),
            st.sampled_from("abc"), st.booleans(),
        ),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("fault")),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(OPERATIONS, st.sampled_from([7, 16, 64]), st.sampled_from([3, 8, 512]))
def test_whatever_happens_books_stay_right_and_everything_ends(monkeypatch: Any, operations: Any, pages: int, chunk: int) -> None:
    """No page is leaked, bounds hold, every request that was taken ends, and each text is what the request alone would have."""
    engine = make_engine(monkeypatch, pages=pages, page_tokens=4, chunk_size=chunk, max_running=4, max_waiting=6)
    model, asked = engine._model, []
    for name, *what in operations:
        if name == "submit":
            length, prefix, tokens, n, client, sampled = what
            sampling = Sampling(temperature=1.0, seed=length, top_p=0.9) if sampled else Sampling(temperature=0.0)
            prompt = [(prefix * 31 + at) % 320 for at in range(length)]
            request = ask(prompt, tokens, n=n, client=client, sampling=sampling, stop_ids=tuple(range(0, 320, 9)))
            with contextlib.suppress(Refused):
                asked.append(submit(engine, request))
        elif name == "step":
            for _ in range(what[0]):
                step(engine)
                assert engine._scheduler.rows <= 4
                assert len(engine._waiting) <= 6
                assert sum(run.promised for run in engine._scheduler.runs.values()) <= engine.cache.free_pages
                shape = model.shapes[-1] if model.shapes else []
                assert sum(count for count in shape if count > 1) <= chunk
        elif name == "cancel" and what[0] < len(asked):
            asked[what[0]][0].cancel()
        elif name == "fault":
            model.faults.add(model.steps + 1)
    model.faults.clear()
    finish(engine)
    assert engine.cache.used_pages == 0
    for job, events in asked:
        assert job.done
        if isinstance(last(events), Failed) or job.cancelled:
            continue
        assert [tokens_of(events, index) for index in range(job.request.n)] == alone(job.request)
    totals = engine.status().totals
    assert set(totals.refused) <= {"no_room", "queue_full"}
    assert totals.requests == totals.finished + totals.cancelled + totals.failed == len(asked)


def test_a_prompt_that_waits_for_pages_isnt_looked_up_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(monkeypatch, pages=10, page_tokens=4)
    submit(engine, ask(range(20), 17))
    step(engine)
    waiting, _ = submit(engine, ask(range(100, 120), 5))
    looked, sequence = [], engine.cache.sequence
    monkeypatch.setattr(engine.cache, "sequence", lambda ids: looked.append(len(ids)) or sequence(ids))
    step(engine, 12)
    assert looked == [20]
    finish(engine)
    assert waiting.done
