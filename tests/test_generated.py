"""The generated files in the repository are what the declarations give today."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ktopt.operator import option_names
from ktopt.registry import catalogue, specs

ROOT = Path(__file__).resolve().parent.parent
GENERATED = (
    "schemas/catalogue.json",
    "schemas/ruleset.schema.json",
    "schemas/plan.schema.json",
    "schemas/config.schema.json",
    "schemas/operators.schema.json",
    "docs/operators.md",
    "docs/codes.md",
    "docs/graph.svg",
)


def generate(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", ROOT / "scripts" / "generate.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of every generated file."""
    for path in GENERATED:
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    return tmp_path


def test_no_generated_file_is_stale() -> None:
    run = generate("--check")
    assert (run.returncode, run.stderr) == (0, "")


def test_a_stale_and_a_missing_file_are_named_and_left_as_they_are(copied: Path) -> None:
    (copied / "docs/operators.md").write_text("old\n", encoding="utf-8")
    (copied / "schemas/catalogue.json").unlink()
    run = generate("--check", "--root", copied)
    assert run.returncode == 1
    assert [line.split()[0] for line in run.stderr.splitlines()] == ["schemas/catalogue.json", "docs/operators.md"]
    assert (copied / "docs/operators.md").read_text(encoding="utf-8") == "old\n"


def test_what_is_stale_is_written_and_nothing_else(copied: Path) -> None:
    (copied / "docs/operators.md").write_text("old\n", encoding="utf-8")
    run = generate("--root", copied)
    assert run.stdout == "wrote docs/operators.md\n"
    assert (copied / "docs/operators.md").read_bytes() == (ROOT / "docs/operators.md").read_bytes()


def test_the_operators_page_has_every_operator_kwarg_and_reason() -> None:
    page = (ROOT / "docs/operators.md").read_text(encoding="utf-8")
    sections = {name: text for name, _, text in (part.partition("\n") for part in page.split("\n## ")[1:])}
    shipped = [spec for spec in specs() if spec.name in catalogue()]
    assert set(sections) == {spec.name for spec in shipped}
    for spec in shipped:
        for key in option_names(spec.config):
            assert f"`{key}`" in sections[spec.name]
        if spec.forward_changed and not spec.implementation:
            assert spec.reason[1:] in sections[spec.name]


def test_every_catalogued_module_declares_its_names() -> None:
    names = json.loads((ROOT / "schemas/catalogue.json").read_text(encoding="utf-8"))
    assert names == catalogue()
    assert {module.rpartition(".")[0] for module in names.values()} == {"ktopt.operators"}
