"""What one step of many requests computes: which are admitted, what each reads or writes, whose pages come back.

Books alone, no model. A request is admitted when all pages that it can ever need are there, so nothing has to be taken from one
that runs. Pages of choices beyond the first are promised until the prompt is read and they fork from it.

A step has a token of every answer, and at most `chunk_size` tokens of prompts. The shortest rest goes first, less what others have
read since: so a short prompt passes a long one, and none waits long for others' beyond its own length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ktopt.engine.answers import Answer
from ktopt.engine.jobs import Job
from ktopt.engine.request import Refused, Request


class Pages(Protocol):
    """What the books need of a paged cache (`ktopt.cache.paged.PagedCache`)."""

    page_tokens: int

    @property
    def pages(self) -> int: ...

    @property
    def free_pages(self) -> int: ...

    def pages_for(self, tokens: int) -> int: ...

    def sequence(self, ids: Any) -> Any: ...

    def missing(self, sequence: Any, tokens: int) -> int: ...

    def reserve(self, sequence: Any, tokens: int) -> None: ...

    def fork(self, sequence: Any) -> Any: ...

    def release(self, sequence: Any) -> None: ...


@dataclass(slots=True, eq=False)
class Run:
    """A request that runs. `sequences` are the prompt's, and once it is read one a choice; None where that has ended."""

    job: Job
    sequences: list[Any]
    promised: int
    passed_over: int = 0

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.job.request.prompt_ids

    @property
    def left(self) -> int:
        """Tokens of the prompt that aren't read."""
        return 0 if self.sequences[0] is None else max(0, len(self.prompt) - self.sequences[0].length)


@dataclass(slots=True)
class Part:
    """New tokens of one sequence in a step: a piece of a prompt (`answer` is None), or the last token of an answer."""

    run: Run
    sequence: Any
    ids: list[int]
    answer: Answer | None = None


class Scheduler:
    """max_rows: answers that are written at once, at most; chunk_size: tokens of prompts in a step."""

    def __init__(self, cache: Pages, max_rows: int, chunk_size: int) -> None:
        self.cache, self.max_rows, self.chunk_size = cache, max_rows, chunk_size
        self.runs: dict[Job, Run] = {}
        self._denied: tuple[Job, int] | None = None  # who found no room, and how many pages were free

    def check(self, request: Request) -> None:
        """Refused where a request can't run even alone."""
        if request.n > self.max_rows:
            raise Refused(
                "no_room", f"n is {request.n}, and at most {self.max_rows} answers are written at once", n=request.n,
                max_running=self.max_rows,
            )  # fmt: skip
        if (needed := self._pages_alone(request)) > self.cache.pages:
            size = self.cache.page_tokens
            asked = f"{len(request.prompt_ids)} tokens of prompt and {request.n} times {request.max_tokens} new ones"
            raise Refused(
                "no_room", f"{asked} take {needed * size} of the cache, and it has {self.cache.pages * size}: ask for fewer, "
                "or make it larger", needed_tokens=needed * size, cache_tokens=self.cache.pages * size,
            )  # fmt: skip

    def _pages_alone(self, request: Request) -> int:
        return self.cache.pages_for(_tokens(request)) + self._pages_of_forks(request)

    def _pages_of_forks(self, request: Request) -> int:
        """Pages of the choices beyond the first, which share the prompt's whole pages."""
        each = self.cache.pages_for(_tokens(request)) - len(request.prompt_ids) // self.cache.page_tokens
        return (request.n - 1) * each

    @property
    def rows(self) -> int:
        """Answers that are being written, or will be once their prompt is read."""
        return sum(len(run.job.open_answers) for run in self.runs.values())

    def admit(self, job: Job) -> bool:
        """Admit a request if there is room for it now. Where there was none, its prompt is looked up again once pages come free."""
        if self.rows + job.request.n > self.max_rows or self._denied == (job, self.cache.free_pages):
            return False
        tokens, forks = _tokens(job.request), self._pages_of_forks(job.request)
        promised = sum(run.promised for run in self.runs.values())
        sequence = self.cache.sequence(job.request.prompt_ids)
        try:
            if self.cache.missing(sequence, tokens) + forks + promised <= self.cache.free_pages:
                self.cache.reserve(sequence, tokens)
                self.runs[job] = Run(job, [sequence], forks)
        finally:
            if job not in self.runs:
                self.cache.release(sequence)
                self._denied = (job, self.cache.free_pages)
        return job in self.runs

    def plan(self) -> list[Part]:
        """What the next step computes."""
        parts = [
            Part(run, sequence, [answer.tokens[-1]], answer)
            for run in self.runs.values()
            if not run.left
            for answer, sequence in zip(run.job.answers, run.sequences, strict=True)
            if sequence is not None
        ]
        reading = sorted((run for run in self.runs.values() if run.left), key=lambda run: run.left - run.passed_over)
        budget = self.chunk_size
        for run in reading:
            if not budget:
                break
            sequence = self._begun(run)
            piece = list(run.prompt[sequence.length : sequence.length + budget])
            parts.append(Part(run, sequence, piece))
            budget -= len(piece)
            run.passed_over -= len(piece)
        for run in reading:
            run.passed_over += self.chunk_size - budget
        return parts

    def _begun(self, run: Run) -> Any:
        """A prompt's sequence. Before its first piece it takes what others have read of the same prompt since it was admitted."""
        if run.job.read_tokens:
            return run.sequences[0]
        self.cache.release(run.sequences[0])
        run.sequences[0] = self.cache.sequence(run.prompt)
        self.cache.reserve(run.sequences[0], _tokens(run.job.request))
        return run.sequences[0]

    def fork(self, run: Run) -> None:
        """The prompt is read: a sequence for every choice."""
        run.promised = 0
        for _ in run.job.answers[1:]:
            child = self.cache.fork(run.sequences[0])
            run.sequences.append(child)
            self.cache.reserve(child, _tokens(run.job.request))

    def ended(self, run: Run) -> None:
        """Take back what choices that have ended hold; once all have, the request runs no longer."""
        for at, sequence in enumerate(run.sequences):
            if sequence is not None and (run.job.done or run.job.answers[at].ended is not None):
                self.cache.release(sequence)
                run.sequences[at] = None
        if run.job.done:
            del self.runs[run.job]


def _tokens(request: Request) -> int:
    """Tokens of one choice that a cache may come to hold: the last one isn't read again."""
    return len(request.prompt_ids) + request.max_tokens - 1
