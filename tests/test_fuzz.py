"""Ten thousand broken rule files: each is answered by findings inside the file, without a traceback, soon, in little memory.

Real files are mutated (the shipped ones, and KTransformers' where they lie beside the checkout), with a seed, so that a failure
comes again. Text that has no rule file's shape is hypothesis' part.
"""

import json
import random
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ktopt
from ktopt.diagnostics import Diagnostic
from ktopt.source import SourceFile

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT.parent / "shared" / "cases"
SEEDS = [
    path.read_text(encoding="utf-8")
    for path in [
        *sorted((ROOT / "rules").rglob("*.yaml")),
        *sorted((CASES / "upstream_rules").rglob("*.yaml")),
        *sorted((CASES / "bad_rules").glob("*.yaml")),
    ]
]
WITHOUT_A_MODEL, ON_A_MODEL = 8000, 2000
MOST_BYTES = 500 << 20
WORDS: list[str] = json.loads((ROOT / "tests" / "data" / "fuzz_words.json").read_text(encoding="utf-8"))
"""What mutations insert: keys, values, slips, and characters that YAML or a terminal may stumble on."""


def mutants(count: int, seed: int) -> Iterator[str]:
    """`count` texts, each a seed text after one to six mutations."""
    rng = random.Random(seed)
    for _ in range(count):
        text = rng.choice(SEEDS)
        for _ in range(rng.randint(1, 6)):
            text = mutated(text, rng)
        yield text


def mutated(text: str, rng: random.Random) -> str:
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    place = rng.randrange(len(text) + 1)
    match rng.randrange(9):
        case 0:
            return text[:place] + rng.choice(WORDS) + text[place:]
        case 1:
            return text[:place] + text[place + rng.randint(1, 12) :]
        case 2:
            return text[:place] + chr(rng.randrange(1, 0x250)) + text[place + 1 :]
        case 3:
            return "\n".join(lines[:at] + lines[at + 1 :])
        case 4:
            return "\n".join([*lines[:at], lines[at], *lines[at:]])
        case 5:
            return "\n".join([*lines[:at], " " * rng.randint(1, 4) + lines[at], *lines[at + 1 :]])
        case 6:
            other = rng.choice(SEEDS).split("\n")
            return "\n".join([*lines[:at], *other[: rng.randint(1, 12)], *lines[at:]])
        case 7:
            words = re.findall(r"\w+", text) or ["a"]
            return text.replace(rng.choice(words), rng.choice(words), 1)
        case _:
            return text[:place]


def answer(text: str, model: str | None = None) -> list[Diagnostic]:
    """The findings on a text; fails where one lies outside it, or where it took more than a second of this process's time (half a
    second is allowed for what else may run in it)."""
    start = time.process_time()
    found = list(ktopt.check(SourceFile("fuzz.yaml", text), model))
    taken = time.process_time() - start
    assert taken < 1.5, f"{taken:.1f} s on {text!r}"
    lines = SourceFile("", text).lines or [""]
    for diagnostic in found:
        for place in (diagnostic.span.start, diagnostic.span.end):
            assert 1 <= place.line <= len(lines) + 1, (diagnostic, text)
            length = len(lines[place.line - 1]) if place.line <= len(lines) else 0
            assert 1 <= place.column <= length + 2, (diagnostic, text)
        assert diagnostic.span.start <= diagnostic.span.end, (diagnostic, text)
    return found


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_mutated_files_are_answered() -> None:
    before = peak_bytes()
    found = sum(bool(answer(text)) for text in mutants(WITHOUT_A_MODEL, seed=1))
    assert found > WITHOUT_A_MODEL / 2  # most mutations break something, so this tests what it is meant to
    assert peak_bytes() - before < MOST_BYTES


@pytest.mark.parametrize("model", ["smollm2-135m", "deepseek-v2-lite"])
def test_mutated_files_are_answered_on_a_model(model: str) -> None:
    before = peak_bytes()
    assert sum(bool(answer(text, model)) for text in mutants(ON_A_MODEL // 2, seed=2)) > ON_A_MODEL / 4
    assert peak_bytes() - before < MOST_BYTES


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=8)), max_size=30).map(" ".join) | st.text(max_size=400))
def test_any_text_is_answered(text: str) -> None:
    answer(text)
