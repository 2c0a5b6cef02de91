"""An engine that runs one request at a time, on a context that it keeps: `ktopt chat`, and the server's backend `ktransformers`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ktopt.diagnostics import KtoptError
from ktopt.engine.answers import Answer
from ktopt.engine.contexts import CacheContext, Context
from ktopt.engine.jobs import Job
from ktopt.engine.request import Refused, Request
from ktopt.engine.sampling import choose
from ktopt.engine.worker import NO_BOUND, NO_CHOICE, Worker
from ktopt.runtime.generation import context_tokens

if TYPE_CHECKING:
    from ktopt.long_context.session import LongContextSession

log = logging.getLogger(__name__)


class Stopped(Exception):
    """A request was cancelled while its prompt was read."""


class SingleEngine(Worker):
    """One request after another.

    model, tokenizer   as `load_model` gives them
    max_waiting        requests that may wait, at most
    max_tokens         a prompt and its answer, at most, where that is to be less than the context
    context            what it runs on; by default a cache of the model's own kind
    """

    backend = "ktransformers"

    def __init__(
        self, model: Any, tokenizer: Any, *, max_waiting: int = 64, max_tokens: int | None = None, context: Context | None = None
    ) -> None:
        self._context: Context = context or CacheContext(model)
        most = self._context.most_tokens or context_tokens(model) or NO_BOUND
        super().__init__(model, tokenizer, max_running=1, max_waiting=max_waiting, context_tokens=min(most, max_tokens or most))
        self._thread.start()

    @classmethod
    def over_session(cls, session: LongContextSession, *, max_waiting: int = 64) -> SingleEngine:
        """One that runs on a session of mode long_context."""
        from ktopt.engine.session_context import SessionContext

        engine = cls(session.model, session.tokenizer, max_waiting=max_waiting, context=SessionContext(session))
        engine.backend = "long_context"
        return engine

    def check(self, request: Request) -> None:
        count, most = len(request.prompt_ids), self._context.most_prompt_tokens
        if most is not None and count > most:
            raise Refused(
                "context_length_exceeded", f"the prompt has {count} tokens, and a prompt may have {most}: shorten it, or raise "
                "`max_seq_len`", prompt_tokens=count, context_tokens=most,
            )  # fmt: skip

    def work(self) -> None:
        with self._changed:
            job = self._waiting.head()
        if job is None:
            return
        self.begin(job)
        try:
            for answer in job.answers:
                self._write(job, answer)
        except Stopped:
            job.end_cancelled()
        except KtoptError as error:
            log.warning("request %s failed: %s", job.id, error)
            job.fail(str(error))
        except BaseException:
            self._context.forget()
            raise
        self.end(job)

    def _write(self, job: Job, answer: Answer) -> None:
        """Write a choice from its prompt to its end."""
        logits_1V = self._context.read(job.request.prompt_ids, lambda read, reused: self._read(job, answer, read, reused))
        while True:
            choice = choose(logits_1V, [answer.row])[0]
            if choice is None:
                raise KtoptError(NO_CHOICE)
            job.take(answer, choice)
            self.count(job, 0, 0, 1)
            if job.cancelled and job.open_answers:
                raise Stopped
            if answer.ended is not None:
                return
            logits_1V = self._context.step(choice.token)

    def _read(self, job: Job, answer: Answer, read: int, reused: int) -> None:
        """A piece of the prompt has been read, for a choice."""
        if answer.index == 0:
            known, cached = max(job.read_tokens, reused), 0 if job.read_tokens else reused
            job.read(read, reused)
            self.count(job, read - known, cached, 0)
        if job.cancelled:
            raise Stopped

    def memory_bytes(self) -> Mapping[str, int]:
        return self._context.memory_bytes()

    def close(self, drain_s: float = 0.0) -> None:
        super().close(drain_s)
        self._context.close()
