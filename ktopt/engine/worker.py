"""The thread of an engine, its queue, and the books: what all engines have in common."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

from ktopt.engine.answers import Answer
from ktopt.engine.engine import OnEvent
from ktopt.engine.events import Event, Failed, Finished
from ktopt.engine.grammar import Grammars
from ktopt.engine.jobs import Job
from ktopt.engine.queueing import FairQueue
from ktopt.engine.request import Refused, Request, check_request
from ktopt.engine.sampling import Row, defaults_of, settled
from ktopt.engine.status import EngineStatus, PageStatus, Totals
from ktopt.weights.tokenizer import stop_tokens

log = logging.getLogger(__name__)

RATE_S = 5.0
"""Tokens a second are counted over so many of the last seconds."""
NO_CHOICE = "the model's logits are no numbers, or the grammar leaves no word"
NO_BOUND = 1 << 31
"""The context of a model whose config says none."""


class Worker(ABC):
    """An engine without what it runs. Its thread calls `work` again and again, which does a step or a request.

    model   its generation config says which tokens end an answer, and how to sample where a request doesn't
    """

    backend: str

    def __init__(self, model: Any, tokenizer: Any, *, max_running: int, max_waiting: int, context_tokens: int) -> None:
        self.tokenizer, self.context_tokens = tokenizer, context_tokens
        self.max_running, self.max_waiting = max_running, max_waiting
        self.words = int(model.get_input_embeddings().num_embeddings)
        own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self.end_ids = frozenset(stop_tokens(own, tokenizer) or ())
        self._defaults = defaults_of(model)
        self._grammars = Grammars(tokenizer, self.words, self.end_ids)
        self._changed = threading.Condition()  # guards what follows
        self._waiting: FairQueue[Job] = FairQueue(max_waiting)
        self._running: list[Job] = []
        self._closing = self._cancelling = self._broken = False
        self._refused: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._recent: deque[tuple[float, int, int]] = deque()
        self._began_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"ktopt-{self.backend}", daemon=True)

    @abstractmethod
    def work(self) -> None:
        """Do some of the work. Requests are waiting or running."""

    def give_up(self, error: Exception) -> None:
        """Fail what is running: a step of all of it has failed."""
        for job in list(self._running):
            if not job.done:
                job.fail(f"{type(error).__name__}: {error}")
            self.end(job)

    @abstractmethod
    def memory_bytes(self) -> Mapping[str, int]:
        """What the cache holds, by tier."""

    def pages(self) -> PageStatus | None:
        return None

    @abstractmethod
    def check(self, request: Request) -> None:
        """Refused where this engine can never run a request."""

    def submit(self, request: Request, on_event: OnEvent) -> Job:
        """Take a request; Refused where it can't be done or not now. A grammar is compiled by this call, which may take tens of
        milliseconds."""
        try:
            check_request(request, self.words, self.context_tokens)
            self.check(request)
            self._check_open(request.client)
            job = Job(request, on_event, self._answers(request), self._wake)
            with self._changed:
                self._check_open(request.client)
                self._waiting.put(job)
                self._counts["requests"] += 1
                self._changed.notify_all()
        except Refused as refusal:
            with self._changed:
                self._refused[refusal.code] += 1
            raise
        return job

    def stream(self, request: Request) -> EventStream:
        """The same, with events as an iterator that waits for them. Refused by this call; closing the iterator cancels."""
        return EventStream(lambda on_event: self.submit(request, on_event))

    def _check_open(self, client: str) -> None:
        if self._broken:
            raise Refused("shutting_down", "this engine is broken and has ended: the log says why; start it again")
        if self._closing:
            raise Refused("shutting_down", "this engine is shutting down and takes no more requests")
        if not self._waiting.has_room(client):
            count = len(self._waiting)
            raise Refused(
                "queue_full", f"{count} requests wait already, of at most {self.max_waiting}: try again later", waiting=count,
                max_waiting=self.max_waiting,
            )  # fmt: skip

    def _answers(self, request: Request) -> list[Answer]:
        sampling = settled(request.sampling, self._defaults)
        ends = frozenset(request.stop_ids) | (frozenset() if request.ignore_eos else self.end_ids)
        grammars = [None if request.grammar is None else self._grammars.matcher(request.grammar) for _ in range(request.n)]
        rows = [Row(sampling, request.prompt_ids, index, grammar) for index, grammar in enumerate(grammars)]
        return [Answer(request, index, self.tokenizer, row, ends) for index, row in enumerate(rows)]

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def status(self) -> EngineStatus:
        with self._changed:
            jobs = [*self._running, *self._waiting]
            running, waiting = len(self._running), len(self._waiting)
            totals = Totals(refused=dict(self._refused), **self._counts)
            recent = list(self._recent)
        now = time.monotonic()
        recent = [each for each in recent if each[0] > now - RATE_S]
        window = min(RATE_S, now - self._began_s)
        return EngineStatus(
            backend=self.backend, running=running, waiting=waiting, max_running=self.max_running, max_waiting=self.max_waiting,
            context_tokens=self.context_tokens, requests=tuple(job.status() for job in jobs), pages=self.pages(),
            memory_bytes=self.memory_bytes(), prompt_tokens_per_s=sum(each[1] for each in recent) / window,
            tokens_per_s=sum(each[2] for each in recent) / window, totals=totals, uptime_s=now - self._began_s,
            closing=self._closing,
        )  # fmt: skip

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse new requests, wait at most so long for those that it has, cancel the rest, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(drain_s)
        with self._changed:
            self._cancelling = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._grammars.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while self._has_work():
                self._drop_cancelled()
                try:
                    self.work()
                except Exception as error:
                    log.exception("a step failed, and with it the requests that were running")
                    self.give_up(error)
        except BaseException:
            log.critical("this engine is broken, and ends", exc_info=True)
            self._abandon()

    def _has_work(self) -> bool:
        """Wait until there is some; False once there will be none."""
        with self._changed:
            while not self._waiting and not self._running and not self._closing:
                self._changed.wait()
            if self._cancelling:
                for job in (*self._running, *self._waiting):
                    job.cancelled = True
            return bool(self._waiting or self._running)

    def _abandon(self) -> None:
        """Fail whatever there is, so that nobody waits forever."""
        with self._changed:
            self._closing = self._broken = True
            waiting = list(self._waiting)
            jobs = [*self._running, *waiting]
            self._running.clear()
            for job in waiting:
                self._waiting.remove(job)
        for job in jobs:
            if not job.done:
                job.fail("the engine is broken, and has ended")

    def _drop_cancelled(self) -> None:
        """End requests that wait and needn't any more."""
        with self._changed:
            dropped = [job for job in self._waiting if job.cancelled]
            for job in dropped:
                self._waiting.remove(job)
        for job in dropped:
            job.end_cancelled()
            self._counts["cancelled"] += 1

    def begin(self, job: Job) -> None:
        """A waiting request begins to run."""
        with self._changed:
            self._waiting.start(job)
            self._running.append(job)
        job.start()

    def end(self, job: Job) -> None:
        """It runs no longer: it is done."""
        with self._changed:
            self._running.remove(job)
            self._waiting.ended(job)
            self._counts["failed" if job.failed else "cancelled" if job.cancelled else "finished"] += 1

    def count(self, job: Job, prompt: int, cached: int, new: int) -> None:
        """Count tokens of a request: of its prompt, computed and cached, and new ones."""
        now = time.monotonic()
        with self._changed:
            self._counts.update(prompt_tokens=prompt + cached, cached_tokens=cached, completion_tokens=new)
            self._waiting.served(job.client, prompt + new)
            self._recent.append((now, prompt, new))
            while self._recent[0][0] < now - RATE_S:
                self._recent.popleft()


class EventStream:
    """A request's events, waited for one by one. Closing it, or losing it, cancels the request."""

    def __init__(self, submit: Callable[[OnEvent], Job]) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._job = submit(self._events.put)
        self._left = self._job.request.n

    def __iter__(self) -> EventStream:
        return self

    def __next__(self) -> Event:
        if not self._left:
            raise StopIteration
        event = self._events.get()
        self._left = 0 if isinstance(event, Failed) else self._left - isinstance(event, Finished)
        return event

    def close(self) -> None:
        if not self._job.done:
            self._job.cancel()

    def __del__(self) -> None:
        if hasattr(self, "_job"):
            self.close()
