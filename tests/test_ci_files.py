"""The GitHub Action, the pre-commit hooks and their page: that they agree, and that what they run works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from ktopt.checking.settings import KEYS, read_settings
from ktopt.cli import COMMANDS
from ktopt.source import SourceFile
from ktopt.suppress import read_suppressions

ROOT = Path(__file__).resolve().parents[1]
ACTION: Any = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
HOOKS: Any = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
LIST_FORM = "- match: {name: '^model'}\n  replace: {class: default, kwargs: {generate_device: %s}}\n"
NATIVE = "version: 1\nrules:\n- match: class=Linear & @**.mlp.*\n  replace: default\n  kwargs: {generate_device: cpu}\n"


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language on the page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def step(name: str) -> str:
    """The script of a step of the action."""
    (found,) = [s["run"] for s in ACTION["runs"]["steps"] if s.get("name") == name]
    return str(found)


def test_the_page_lists_the_action_s_inputs() -> None:
    table = PAGE[PAGE.index("| input |") :].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE) == list(ACTION["inputs"])


def test_the_example_workflow_gives_inputs_that_the_action_has() -> None:
    workflow = yaml.safe_load((ROOT / "examples" / "workflow-ktopt-check.yml").read_text(encoding="utf-8"))
    (used,) = [s["with"] for s in workflow["jobs"]["check"]["steps"] if "/ktopt@" in s.get("uses", "")]
    assert used.keys() <= ACTION["inputs"].keys()
    assert {name for name, given in ACTION["inputs"].items() if given.get("required")} <= used.keys()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
class TestActionScript:
    @staticmethod
    def run(folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
        """Run the action's last step as GitHub does, with this interpreter's ktopt."""
        (folder / "bin").mkdir()
        program = folder / "bin" / "ktopt"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m ktopt "$@"\n')
        program.chmod(0o755)
        environment = {**os.environ, "FILES": "", "MODELS": "", "ARGS": "", **inputs, "GITHUB_ACTIONS": "true"}
        environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
        (folder / "step.sh").write_text(step("Check rule files"))
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(folder / "step.sh")]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)

    def test_files_alone(self, tmp_path: Path) -> None:
        (tmp_path / "rules").mkdir()
        (tmp_path / "rules" / "a.yaml").write_text(LIST_FORM % "gpu")
        done = self.run(tmp_path, FILES="rules")
        assert done.returncode == 1
        assert done.stdout.startswith("::error file=rules/a.yaml,line=2,")

    def test_several_models_files_and_arguments(self, tmp_path: Path) -> None:
        (tmp_path / "rules").mkdir()
        (tmp_path / "rules" / "a.yaml").write_text(LIST_FORM % "cpu")
        (tmp_path / "b.yaml").write_text(LIST_FORM % "cpu" * 2)
        done = self.run(
            tmp_path, FILES="rules/**/*.yaml\nb.yaml\n", MODELS="smollm2-135m\ngemma-3-270m", ARGS="--format json --select KT302"
        )
        assert done.returncode == 1, done.stderr
        (found,) = yaml.safe_load(done.stdout)
        assert (found["code"], found["file"], found["models"]) == ("KT302", "b.yaml", [])

    def test_what_an_input_says_is_never_run(self, tmp_path: Path) -> None:
        done = self.run(tmp_path, FILES="$(touch evil) ;touch evil", MODELS="`touch evil`", ARGS="; touch evil")
        assert done.returncode != 0
        assert not (tmp_path / "evil").exists()


def test_the_few_packages_that_the_action_installs_suffice(tmp_path: Path) -> None:
    (first, *_) = re.findall(r"pip install .* (pyyaml.*)", step("Install ktopt"))
    assert first.split() == ["pyyaml", "lark", "regex", "numpy"]
    assert "pip install pyyaml lark regex numpy" in PAGE
    (tmp_path / "a.yaml").write_text(LIST_FORM % "cpu")
    (tmp_path / "b.yaml").write_text(NATIVE)
    others = [
        re.split(r"[<>=\[ ]", text)[0].replace("-", "_")
        for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    blocked = sorted({*others, "tokenizers", "huggingface_hub"} - {"pyyaml", "lark", "regex", "numpy"})
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "from ktopt.cli import main\n"
        "sys.exit(main(['check', 'a.yaml', 'b.yaml', '-m', 'smollm2-135m', '-m', 'deepseek-v3', '--format', 'sarif']))"
    )
    assert "torch" in blocked
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_hooks_run_commands_that_there_are_on_files_in_folders_of_rules() -> None:
    for hook in HOOKS:
        program, command = hook["entry"].split()
        assert program == "ktopt"
        assert command in COMMANDS
        assert re.search(hook["files"], "sub/optimize_rules/DeepSeek-V3-Chat.yaml")
        assert re.search(hook["files"], "rules/a.yml")
        assert not re.search(hook["files"], ".github/workflows/ci.yml")
    (configured,) = [yaml.safe_load(block) for block in blocks("yaml") if "repos:" in block]
    assert {h["id"] for h in configured["repos"][0]["hooks"]} <= {hook["id"] for hook in HOOKS}


def test_the_settings_on_the_page_are_all_that_there_are() -> None:
    (text,) = blocks("toml")
    table = tomllib.loads(text)["tool"]["ktopt"]
    assert set(table) == set(KEYS)
    assert read_settings(table, ROOT / "pyproject.toml").fail_on == "warning"


def test_the_ignore_comment_on_the_page_is_one() -> None:
    (text,) = [block for block in blocks("yaml") if "# ktopt:" in block]
    found = read_suppressions(SourceFile("page", text))
    assert found.problems == []
    assert [code.code for ignore in found.ignores for code in ignore.codes] == ["KT305"]
