"""Answers that must be JSON of a schema, match a regex, or follow a grammar: the library llguidance says which words may come next.

What strangers send is refused in bounded time where it can't be compiled: by its size, and by a process that tries it first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np

from ktopt.diagnostics import KtoptError
from ktopt.engine.grammar_check import Checker, limits, written
from ktopt.engine.request import GrammarSpec, Refused
from ktopt.engine.sampling import Array

MOST_CHARACTERS = 1 << 16
"""A schema, regex or grammar may have so many."""
KEPT = 64
"""Grammars that are kept compiled, and refusals that are remembered."""
NAMES = {"json_object": "JSON", "json_schema": "the JSON schema", "regex": "the regex", "lark": "the grammar"}


class Grammars:
    """The compiled grammars of a tokenizer.

    ends   tokens that end an answer, which may come where a grammar is complete
    words  of the model
    """

    def __init__(self, tokenizer: Any, words: int, ends: Iterable[int]) -> None:
        self._tokenizer, self._words, self._ends = tokenizer, words, sorted(ends)
        self._lock = threading.Lock()
        self._checker = Checker()
        self._found: OrderedDict[GrammarSpec, Any] = OrderedDict()  # a matcher, or why there is none
        self._lexicon: Any = None

    def matcher(self, spec: GrammarSpec) -> Matcher:
        """One for an answer. Refused as "invalid_schema" where the grammar can't be compiled, or no text is of it; as "unsupported"
        where llguidance isn't installed or doesn't know the tokenizer."""
        if len(spec.text) > MOST_CHARACTERS:
            raise Refused(
                "invalid_schema", f"{NAMES[spec.kind]} has {len(spec.text)} characters, and may have {MOST_CHARACTERS}",
                characters=len(spec.text), most_characters=MOST_CHARACTERS,
            )  # fmt: skip
        with self._lock:
            if spec not in self._found:
                self._found[spec] = self._compile(spec)
            self._found.move_to_end(spec)
            if len(self._found) > KEPT:
                self._found.popitem(last=False)
            found = self._found[spec]
        if isinstance(found, str):
            raise Refused("invalid_schema", f"{NAMES[spec.kind]} can't be followed: {found}")
        return Matcher(found.deep_copy())

    def _compile(self, spec: GrammarSpec) -> Any:
        """A matcher at its beginning, or what is wrong."""
        lexicon = self._known_words()
        if fault := self._checker.fault_of(spec):
            return fault
        from llguidance import LLMatcher

        found = LLMatcher(lexicon, written(spec), log_level=0, limits=limits())
        first = found.deep_copy()
        first.compute_bitmask()
        return _fault_of(first) or found

    def _known_words(self) -> Any:
        """The tokenizer as llguidance wants it; made once, which takes a second for a large vocabulary."""
        if self._lexicon is None:
            try:
                from llguidance.hf import from_tokenizer
            except ImportError:
                raise Refused("unsupported", "answers by a schema or grammar need llguidance: pip install 'ktopt[serve]'") from None
            words = self._words if self._words >= len(self._tokenizer) else None
            try:
                self._lexicon = from_tokenizer(self._tokenizer, n_vocab=words, eos_token=self._ends or None)
            except ValueError as error:
                raise Refused("unsupported", f"answers can't follow a grammar with this tokenizer: {error}") from error
        return self._lexicon

    def close(self) -> None:
        with self._lock:
            self._checker.close()


class Matcher:
    """How far one answer has come in its grammar. KtoptError where following it takes more than it may."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_stopped())

    def forbidden(self) -> Array:
        """The words that can't come next: bool (V)."""
        allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        self._check()
        forbidden: Array = allowed == 0
        return forbidden

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if fault := _fault_of(self._matcher):
            raise KtoptError(f"the answer can't follow its grammar any further: {fault}")


def _fault_of(matcher: Any) -> str:
    """Why a matcher has stopped where its grammar isn't complete; "" where it hasn't."""
    if matcher.is_error():
        return str(matcher.get_error()).removesuffix("<non-verbose/>").strip()
    return "no text goes on from there" if matcher.stop_reason() == "NoExtensionBias" else ""
