"""An engine that runs many requests at once, step by step, on a paged cache: the server's backend `balance_serve`.

Legend: N parts of a step, V words of the vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ktopt.cache.paged import PagedCache, forward_paged
from ktopt.diagnostics import KtoptError
from ktopt.engine.answers import Answer
from ktopt.engine.request import Request
from ktopt.engine.sampling import Choice, choose
from ktopt.engine.scheduler import Part, Run, Scheduler
from ktopt.engine.status import PageStatus
from ktopt.engine.worker import NO_BOUND, NO_CHOICE, Worker
from ktopt.runtime.generation import context_tokens

log = logging.getLogger(__name__)

PAUSE_S = 0.05
"""How long requests that find no room wait before they look again, where nothing else runs."""


class BatchEngine(Worker):
    """Continuous batching: a step computes a token of every answer, and pieces of prompts.

    model, tokenizer   as `load_model` gives them
    cache              holds the keys and values of all requests, and of prompts for later ones
    max_running        answers that are written at once, at most
    max_waiting        requests that may wait, at most
    chunk_size         tokens of prompts in a step, at most
    max_tokens         a prompt and its answer, at most, where that is to be less than the model's context
    """

    backend = "balance_serve"

    def __init__(
        self, model: Any, tokenizer: Any, cache: PagedCache, *, max_running: int = 16, max_waiting: int = 256,
        chunk_size: int = 512, max_tokens: int | None = None,
    ) -> None:  # fmt: skip
        context = min(context_tokens(model) or NO_BOUND, max_tokens or NO_BOUND)
        super().__init__(model, tokenizer, max_running=max_running, max_waiting=max_waiting, context_tokens=context)
        self._model, self.cache = model, cache
        self._scheduler = Scheduler(cache, max_running, chunk_size)
        self._thread.start()

    def check(self, request: Request) -> None:
        self._scheduler.check(request)

    def work(self) -> None:
        for run in [run for run in self._scheduler.runs.values() if run.job.cancelled]:
            run.job.end_cancelled()
            self._end(run)
        self._admit()
        parts = self._scheduler.plan()
        if not parts:
            with self._changed:
                if self._waiting:
                    self._changed.wait(PAUSE_S)
            return
        try:
            logits_NV = forward_paged(self._model, self.cache, [(part.sequence, part.ids) for part in parts])
        except Exception as error:
            log.exception("a step of %d requests failed", len({part.run.job for part in parts}))
            self._fail([part.run for part in parts], error)
            return
        self._counts["steps"] += 1
        at: list[int] = []
        writing: list[tuple[Run, Answer]] = []
        for number, part in enumerate(parts):
            answers = self._has_read(part) if part.answer is None else [part.answer]
            at += [number] * len(answers)
            writing += [(part.run, answer) for answer in answers]
        if writing:
            self._write(logits_NV if at == list(range(len(parts))) else logits_NV[at], writing)

    def _admit(self) -> None:
        """Admit whose turn it is, as long as there is room. Nobody passes the one whose turn it is: it would wait forever."""
        while True:
            with self._changed:
                job = self._waiting.head()
            if job is None:
                return
            try:
                if not self._scheduler.admit(job):
                    return
                self.begin(job)
            except Exception as error:
                log.exception("request %s can't be begun", job.id)
                self.begin(job)
                job.fail(_said(error))
                self.end(job)

    def _has_read(self, part: Part) -> list[Answer]:
        """A piece of a prompt has been read; the answers that now begin."""
        run, job = part.run, part.run.job
        cached = 0 if job.read_tokens else part.sequence.cached_tokens
        self.count(job, len(part.ids), cached, 0)
        job.read(part.sequence.length, job.cached_tokens + cached)
        if run.left:
            return []
        try:
            self._scheduler.fork(run)
        except Exception as error:
            log.exception("request %s can't have %d answers", job.id, job.request.n)
            self._fail([run], error)
            return []
        return job.answers

    def _write(self, logits_NV: torch.Tensor, writing: Sequence[tuple[Run, Answer]]) -> None:
        """Go on with each of these answers by a token."""
        for (run, answer), choice in zip(writing, _choices(logits_NV, [answer for _, answer in writing]), strict=True):
            job = run.job
            if job.failed:
                continue  # by another of its answers
            try:
                if isinstance(choice, Exception):
                    raise choice
                job.take(answer, choice)
            except KtoptError as error:
                log.warning("request %s failed: %s", job.id, error)
                self._fail([run], error)
                continue
            except Exception as error:
                log.exception("request %s failed", job.id)
                self._fail([run], error)
                continue
            self.count(job, 0, 0, 1)
            if job.done:
                self._end(run)
            elif answer.ended is not None:
                self._scheduler.ended(run)

    def _fail(self, runs: Sequence[Run], error: Exception) -> None:
        for run in {run.job: run for run in runs}.values():
            run.job.fail(_said(error))
            self._end(run)

    def _end(self, run: Run) -> None:
        self._scheduler.ended(run)
        self.end(run.job)

    def give_up(self, error: Exception) -> None:
        self._fail([run for run in self._scheduler.runs.values() if not run.job.done], error)

    def pages(self) -> PageStatus:
        cache = self.cache
        cached = cache.cached_pages
        return PageStatus(cache.page_tokens, cache.pages, cache.used_pages, cached, cache.free_pages - cached)

    def memory_bytes(self) -> Mapping[str, int]:
        return {"memory": self.cache.nbytes}


def _choices(logits_NV: torch.Tensor, answers: Sequence[Answer]) -> list[Choice | Exception]:
    """A token for each answer, or why there is none."""
    try:
        found = choose(logits_NV, [answer.row for answer in answers])
    except Exception as error:
        if len(answers) == 1:
            return [error]
        return [_choices(logits_NV[at : at + 1], [answer])[0] for at, answer in enumerate(answers)]
    return [KtoptError(NO_CHOICE) if choice is None else choice for choice in found]


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, KtoptError) else f"{type(error).__name__}: {error}"
