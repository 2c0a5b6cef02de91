"""The benchmarks start as the README says. They are run by hand: a timed test would fail on a busy machine."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("common.py", "cpu_engines.py", "cpu_models.py")
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if path.name not in SHARED)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_explains_itself(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_the_readme_names_benchmarks_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = [word.removeprefix("benchmarks/") for word in text.split() if word.startswith("benchmarks/") and word.endswith(".py")]
    assert named
    assert set(named) <= set(SCRIPTS)
