"""Regular expressions from a rule file, which is a stranger's: compiled, judged for how they could backtrack, and run in a budget.

The parse tree tells how many ways a pattern can try to match (`steps_log2`). Cheap ones run in `re` as they are; middling ones run
in `re` against a clock; those with nested or overlapping repeats run in the `regex` package, whose search can be timed out.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from math import log2
from time import thread_time
from typing import Any

from ktopt.diagnostics import KtoptError

BUDGET_S = 0.5
"""Seconds that one pattern may take over a whole model, in all that a run does with it. They are the processor's, so that a busy
machine finds what an idle one does."""

TOTAL_S = 1.0
"""Seconds that all patterns of one run may take together which backtrack at all."""

MAX_LENGTH = 2000
MAX_REPEATED = 2000
"""Most characters that a pattern's counted repeats may demand. No module path is as long, and `regex` unrolls them into memory."""

SAFE_LOG2 = 10.5
CLOCKED_LOG2 = 18.0
PATH_LOG2 = 7.0
"""A repeat over a module path has about 2**7 places to stop at."""

_sre: Any = importlib.import_module("re._parser")
Finder = Callable[[str], object]


class PatternError(KtoptError):
    """A pattern that isn't one. `column` counts from 1 within the pattern."""

    def __init__(self, message: str, column: int, cause: re.error | None = None) -> None:
        super().__init__(f"invalid regex at column {column}: {message}")
        self.message = message
        self.column = column
        self.cause = cause


class PatternTimeout(KtoptError):
    """A pattern that took more than its budget of BUDGET_S seconds, or (`own` is False) was given up because it and those before it
    took more than TOTAL_S together."""

    def __init__(self, text: str, own: bool = True) -> None:
        why = (
            f"took more than {BUDGET_S:g} s: its repeats overlap, so that it backtracks for ever"
            if own
            else f"was given up: the patterns up to it took more than {TOTAL_S:g} s together, as those do whose repeats overlap"
        )
        super().__init__(f"the pattern {text!r} {why}; keep one `.*` where there are several, and none inside a repeated group")
        self.text = text
        self.own = own


class Pattern:
    """A compiled pattern with a budget of time: its own, or within `shared_budgets` that of all patterns of this text.

    `finder` is the fastest form of `search`: its result is truthy where the pattern is found.
    """

    __slots__ = ("_fullmatch", "finder", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        compiled, steps = _compiled(text)
        if steps <= SAFE_LOG2:
            self.finder: Finder = compiled.search
            self._fullmatch: Finder = compiled.fullmatch
        else:
            clock = _clock_of(text)
            timed = steps > CLOCKED_LOG2
            engine = _timed_regex(text) if timed else compiled
            self.finder = clock.watch(engine.search, timed)
            self._fullmatch = clock.watch(engine.fullmatch, timed)

    def search(self, s: str) -> bool:
        """Whether the pattern occurs anywhere in `s`. PatternTimeout when its budget is used up."""
        return bool(self.finder(s))

    def fullmatch(self, s: str) -> bool:
        """Whether the whole of `s` is the pattern. PatternTimeout when its budget is used up."""
        return bool(self._fullmatch(s))


class _Purse:
    """The time that the patterns of a run have left together, and the clock of each."""

    def __init__(self) -> None:
        self.left_s = TOTAL_S
        self.clocks: dict[str, _Clock] = {}


class _Clock:
    """What a pattern has spent of its own budget and of the purse."""

    def __init__(self, text: str, purse: _Purse) -> None:
        self.text, self.purse = text, purse
        self.left_s = BUDGET_S

    def watch(self, find: Callable[..., object], timed: bool) -> Finder:
        purse = self.purse

        def watched(s: str) -> object:
            left = min(self.left_s, purse.left_s)
            if left <= 0:
                raise self.timeout()
            start = thread_time()
            try:
                return find(s, timeout=left) if timed else find(s)
            except TimeoutError:
                self.left_s -= left  # the search was stopped by the wall clock
                purse.left_s -= left
                raise self.timeout() from None
            finally:
                spent = thread_time() - start
                self.left_s -= spent
                purse.left_s -= spent

        return watched

    def timeout(self) -> PatternTimeout:
        return PatternTimeout(self.text, own=self.left_s <= 0)


_purse: ContextVar[_Purse | None] = ContextVar("_purse", default=None)


@contextmanager
def shared_budgets() -> Iterator[None]:
    """Within this, a text has one budget however often it is compiled, and all texts have one together; one within another changes
    nothing."""
    if _purse.get() is not None:
        yield
        return
    token = _purse.set(_Purse())
    try:
        yield
    finally:
        _purse.reset(token)


def _clock_of(text: str) -> _Clock:
    shared = _purse.get()
    return _Clock(text, _Purse()) if shared is None else shared.clocks.setdefault(text, _Clock(text, shared))


def compile_pattern(text: str) -> Pattern:
    """A pattern ready to search. PatternError with a column where `text` is no regex, or one that no path could match."""
    return Pattern(text)


@lru_cache(maxsize=1024)
def _compiled(text: str) -> tuple[re.Pattern[str], float]:
    if len(text) > MAX_LENGTH:
        raise PatternError(f"it is too long: {len(text):,} characters, of which at most {MAX_LENGTH:,} are read", MAX_LENGTH)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of "[[", which would go to the terminal with ktopt's own source line
            tree = _sre.parse(text)
            if _repeated(tree) > MAX_REPEATED:
                raise PatternError(f"its counted repeats come to more than {MAX_REPEATED} characters", 1)
            return re.compile(text), steps_log2(tree)
    except re.error as error:
        raise PatternError(_plain_message(error), (error.pos or 0) + 1, error) from None
    except RecursionError:
        raise PatternError("it is nested too deeply", 1) from None
    except OverflowError:
        raise PatternError("a repeat count is too large", 1) from None


@lru_cache(maxsize=64)
def _timed_regex(text: str) -> Any:
    import regex

    try:
        return regex.compile(text, regex.VERSION0)
    except regex.error as error:
        raise PatternError(str(error), 1) from None


def _plain_message(error: re.error) -> str:
    found = re.fullmatch(r"bad character range (.+)", error.msg)
    return f'bad character range "{found[1]}"' if found else error.msg


def parse_tree(text: str) -> list[tuple[Any, Any]]:
    """The pattern as a list of (operation, argument), in the terms of Python's own regex parser. The text must be a valid regex."""
    return list(_sre.parse(text))


REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
LOOKS = ("ASSERT", "ASSERT_NOT")


def _repeated(items: Iterable[tuple[Any, Any]]) -> int:
    """Characters that the pattern spans, each counted repeat at its largest count."""
    total = 0
    for op, arg in items:
        name = str(op)
        if name in REPEATS:
            low, high, body = arg
            total += (low if high == _sre.MAXREPEAT else high) * max(1, _repeated(body))
        else:
            total += 1 + sum(_repeated(part) for part in _parts(name, arg))
    return total


def steps_log2(items: Iterable[tuple[Any, Any]]) -> float:
    """Base-2 logarithm of how many ways a search may try before it gives up: an upper bound, for paths of a hundred characters."""
    items = list(items)
    anchored = bool(items) and str(items[0][0]) == "AT" and str(items[0][1]) in ("AT_BEGINNING", "AT_BEGINNING_STRING")
    return _ways(items) + (0.0 if anchored else PATH_LOG2)


def _ways(items: Iterable[tuple[Any, Any]]) -> float:
    """Ways through a sequence. A look-around is tried once for each way to reach it, and adds no ways to what follows."""
    before = most = 0.0
    for op, arg in items:
        name = str(op)
        if name in LOOKS:
            most = max(most, before + _ways(arg[1]))
            continue
        before += _ways_of(name, arg)
        most = max(most, before)
    return most


def _ways_of(name: str, arg: Any) -> float:
    if name in REPEATS:
        low, high, body = arg
        unbounded = high == _sre.MAXREPEAT
        stops = PATH_LOG2 if unbounded else min(PATH_LOG2, log2(high - low + 1))
        inside = _ways(body)
        return stops + inside * (2**PATH_LOG2 if unbounded else min(high, 2**PATH_LOG2))
    parts = _parts(name, arg)
    return (log2(len(parts)) if len(parts) > 1 else 0.0) + max((_ways(part) for part in parts), default=0.0)


def _parts(name: str, arg: Any) -> list[Any]:
    """The sub-patterns of one operation."""
    if name == "BRANCH":
        return list(arg[1])
    if name == "SUBPATTERN":
        return [arg[3]]
    if name in LOOKS:
        return [arg[1]]
    if name == "ATOMIC_GROUP":
        return [arg]
    if name == "GROUPREF_EXISTS":
        return [part for part in arg[1:] if part]
    return []
