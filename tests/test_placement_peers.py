"""Placements beside those by llama.cpp's and accelerate's rules, on a dozen models and machines: by one estimate, never worse."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def peers() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import placement
    return placement


def test_no_placement_is_worse_than_llama_cpp_s_or_accelerate_s_and_some_are_better(peers: ModuleType) -> None:
    rows = [peers.compare(*case) for case in peers.CASES]
    assert len(rows) > 12
    for row in rows:
        assert row.ktopt is not None
        for other in (row.llama_cpp, row.accelerate):
            assert other is None or row.ktopt <= other * (1 + 1e-9), row
        assert row.popular is None or row.popular <= row.ktopt * (1 + 1e-9), row
    assert sum(row.popular is not None and row.popular < 0.9 * row.ktopt for row in rows) >= 6
    assert sum(row.llama_cpp is not None and row.ktopt < 0.9 * row.llama_cpp for row in rows) >= 4


def test_the_table_of_the_docs_has_these_cases(peers: ModuleType) -> None:
    text = (ROOT / "docs" / "placement.md").read_text()
    assert all(f"| {model} | {machine} |" in text for model, machine, _ in peers.CASES)


def test_llama_cpp_s_rules_put_layers_on_cards_from_the_last_one_and_share_them_out_by_memory(peers: ModuleType) -> None:
    problem = peers.problem_of("qwen3-30b-a3b", "2x3090+64GB", peers.PLAIN)
    made = list(peers.llama_cpp(problem))
    first, last = made[0], made[-1]
    assert first.homes == (0, *[1] * 25, *[2] * 23, 2)
    assert set(first.experts) == {None, 1, 2}
    assert set(last.homes) == {0}
    assert next(a for a in made if a.experts[1:4] == (0, 0, 1)).homes == first.homes
