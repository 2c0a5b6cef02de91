"""The benchmarks start as the README says. They are run by hand: a timed test would fail on a busy machine."""

import argparse
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = (
    "common.py", "context_plot.py", "cpu_engines.py", "cpu_models.py", "mla_plot.py", "quality_oracle.py", "quality_retrieval.py",
    "quality_texts.py", "serve_client.py", "serve_faults_load.py", "serve_references.py", "serve_servers.py",
)  # fmt: skip
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if path.name not in SHARED)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_explains_itself(script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("way", ["absorbed", "expanded", "auto"])
@pytest.mark.parametrize(("chunk", "context"), [(1024, 4096), (4096, 8192), (64, 20_480)])
def test_what_a_chunk_takes_on_a_gpu_is_within_ten_percent_of_the_plan_s_formula(
    way: str, chunk: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import mla

    row = mla.measure(way, chunk, context, "meta")
    assert 0.9 < row["measured"] / row["formula"] < 1.1, row


def test_the_plot_has_a_line_for_each_way_and_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from mla_plot import memory_plot

    ways, chunks, contexts = ("absorbed", "expanded"), (8192, 4096, 1024), (8192, 139_264)
    rows = [{"way": w, "chunk": c, "context": t, "measured": c * 1e5} for w in ways for c in chunks for t in contexts]
    drawn = ElementTree.fromstring(memory_plot(rows))
    paths = [(each.get("class"), each.get("stroke-dasharray")) for each in drawn if each.tag.endswith("path")]
    assert paths[::2] == paths[1::2]  # before its label, a piece of a line as it is drawn
    assert len(set(paths)) == 7
    assert {"expanded, chunk 4,096", "whole context expanded"} <= {each.text for each in drawn}


def test_decoding_is_plotted_by_way_and_budget_beside_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import long_context

    bench = long_context.Bench(argparse.Namespace(contexts=[4096, 139_264]))
    names = [f"{blocks} blocks, {way}" for way in long_context.WAYS for blocks in (129, 21)]
    bench.record = {"speeds": {name: {4096: 100.0, 139_264: 60.0} for name in names}, "peer": 20.0}
    drawn = ElementTree.fromstring(bench.plot())
    assert {*names, "llama.cpp, whole context"} <= {each.text for each in drawn}
    assert len({(each.get("class"), each.get("stroke-dasharray")) for each in drawn if each.tag.endswith("path")}) == 7


def test_the_readme_names_benchmarks_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = [word.removeprefix("benchmarks/") for word in text.split() if word.startswith("benchmarks/") and word.endswith(".py")]
    assert named
    assert set(named) <= set(SCRIPTS)
