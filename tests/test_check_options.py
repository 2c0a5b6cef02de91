"""`ktopt check`: which findings are reported and fail a run, on which models, what is mended, and how it watches."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ktopt.cli import main
from ktopt.cli.check import Session
from ktopt.cli.watch import watch

CLEAN = """\
- match:
    name: '^model'
  replace:
    class: default
    kwargs:
      generate_device: cpu
      prefill_device: cpu
"""
OPEN_NUMBER = """\
- match:
    name: '^model\\.layers\\.1.*_proj$'
    class: torch.nn.Linear
  replace:
    class: KTransformersLinear
    kwargs:
      generate_device: cpu
      generate_op: KLinearTorch
      prefill_device: cpu
      prefill_op: KLinearTorch
"""
"""KT305 at line 2 and KT309, on a model with more than ten layers."""
MIXED = OPEN_NUMBER.replace("    class: torch.nn.Linear\n", "") + "  recursive: 0\n" + CLEAN.replace("cpu", "gpu", 1)
"""KT206, a warning with a safe fix, at line 10, and KT501, an error with an unsafe one, at line 16."""
NO_DEVICE = CLEAN.replace("generate_device: cpu", "generate_device: gpu")
QUOTED = CLEAN + '  recursive: "False"\n'
SMALL = ["--model", "smollm2-135m"]


class Result(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    for name in ("FORCE_COLOR", "NO_COLOR", "KTOPT_TRACEBACK", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str | Path) -> Result:
        code = main(["check", *map(str, arguments)])
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_file(text: str, name: str = "r.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def codes(result: Result) -> list[str]:
    return [d["code"] for d in json.loads(result.out)]


def standard_input(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


class TestCodes:
    def test_select_reports_those_codes_only_and_ignore_all_others(self, cli: Cli, write: Any) -> None:
        write(MIXED)
        assert codes(cli("r.yaml", "--format", "json")) == ["KT206", "KT501", "KT408"]
        assert codes(cli("r.yaml", "--format", "json", "--select", "KT5")) == ["KT501"]
        assert codes(cli("r.yaml", "--format", "json", "--ignore", "KT5,kt4")) == ["KT206"]
        assert codes(cli("r.yaml", "--format", "json", "--ignore", "KT5", "--ignore", "KT206", "--ignore", "KT4")) == []

    def test_the_longer_prefix_decides_and_ignore_wins_a_tie(self, cli: Cli, write: Any) -> None:
        write(MIXED)
        assert codes(cli("r.yaml", "--format", "json", "--select", "KT501", "--ignore", "KT5")) == ["KT501"]
        assert codes(cli("r.yaml", "--format", "json", "--select", "KT5", "--ignore", "KT501")) == []
        assert codes(cli("r.yaml", "--format", "json", "--select", "KT5", "--ignore", "KT5")) == []

    def test_an_unknown_code_is_wrong_usage(self, cli: Cli, write: Any) -> None:
        write(CLEAN)
        result = cli("r.yaml", "--select", "KT9")
        assert result.code == 2
        assert "--select: no code begins with 'KT9'; classes are KT1 (YAML), KT2 (shape)" in result.err
        assert cli("r.yaml", "--ignore", "E501").code == 2

    def test_a_file_that_can_t_be_read_is_never_hidden(self, cli: Cli, write: Any) -> None:
        write("- match: [\n")
        assert codes(cli("r.yaml", "--format", "json", "--ignore", "KT1", "--select", "KT3")) == ["KT101"]


class TestFailOn:
    @pytest.mark.parametrize(
        ("level", "text", "code"),
        [("error", QUOTED, 1), ("never", QUOTED, 0), ("warning", OPEN_NUMBER + "  recursive: 1\n", 1), ("error", OPEN_NUMBER, 0)],
    )
    def test_the_exit_code_follows_it(self, cli: Cli, write: Any, level: str, text: str, code: int) -> None:
        write(text)
        assert cli("r.yaml", "--fail-on", level).code == code

    def test_what_is_not_reported_does_not_fail(self, cli: Cli, write: Any) -> None:
        write(NO_DEVICE)
        assert cli("r.yaml").code == 1
        assert cli("r.yaml", "--ignore", "KT501").code == 0

    @pytest.mark.parametrize("arguments", [("--ignore", "KT"), ("--select", "KT7"), ("--ignore", "KT110")])
    def test_what_stops_the_plan_fails_whatever_is_ignored(self, cli: Cli, write: Any, arguments: tuple[str, ...]) -> None:
        write(QUOTED)
        result = cli("r.yaml", *arguments)
        assert result.code == 1
        assert "--select and --ignore don't hide what stops the plan (1 error)" in result.out


class TestModels:
    def test_a_finding_on_some_of_the_models_says_on_which(self, cli: Cli, write: Any) -> None:
        write(OPEN_NUMBER.replace("_proj", "(gate_up|q)_proj"))
        result = cli("r.yaml", *SMALL, "--model", "deepseek-v3", "--format", "json")
        named = {d["code"]: d["models"] for d in json.loads(result.out)}
        assert named["KT301"] == ["deepseek-v3"]
        write(OPEN_NUMBER)
        both = json.loads(cli("r.yaml", *SMALL, "--model", "llama-2-70b", "--format", "json").out)
        assert any(d["models"] == [] for d in both)

    def test_a_selection_that_is_right_on_one_model_is_not_rewritten_for_another(self, cli: Cli, write: Any) -> None:
        text = CLEAN.replace("name: '^model'", "class: LlamaAttention")
        path = write(text)
        assert cli("r.yaml", *SMALL, "-m", "deepseek-v3", "--unsafe-fixes").code == 1
        assert path.read_text() == text

    def test_a_finding_in_the_text_is_said_once_for_all_models(self, cli: Cli, write: Any) -> None:
        write(QUOTED)
        found = json.loads(cli("r.yaml", *SMALL, "-m", "deepseek-v3", "--format", "json").out)
        assert [(d["code"], d["models"]) for d in found if d["severity"] == "error"] == [("KT110", [])]

    def test_weights_and_locks_belong_to_one_model(self, cli: Cli, write: Any) -> None:
        write(CLEAN)
        assert cli("r.yaml", *SMALL, "-m", "deepseek-v3", "--weights", "w.gguf").code == 2
        assert cli("r.yaml", *SMALL, "-m", "deepseek-v3", "--locked").code == 2


class TestMatrix:
    def test_it_counts_modules_for_each_rule_and_model(self, cli: Cli, write: Any) -> None:
        write(OPEN_NUMBER + CLEAN)
        result = cli("r.yaml", "--matrix", *SMALL, "-m", "deepseek-v3", "--format", "json")
        (file,) = json.loads(result.out)
        first, second = file["rules"]
        assert (file["file"], first["line"], first["match"]) == ("r.yaml", 1, r"^model\.layers\.1.*_proj$ class torch.nn.Linear")
        small = first["models"]["smollm2-135m"]
        assert small == {"matches": 11 * 7, "decides": 11 * 7, "active": True}
        second_small = second["models"]["smollm2-135m"]
        assert second_small["matches"] - second_small["decides"] == 11 * 7
        assert first["models"]["deepseek-v3"]["matches"] == 11 * (4 + 3)

    def test_as_a_table(self, cli: Cli, write: Any) -> None:
        write(OPEN_NUMBER.replace("_proj", "_nothing") + CLEAN)
        result = cli("r.yaml", "--matrix", *SMALL, "-m", "deepseek-v3")
        assert result.code == 1
        header, first, *_ = result.out.splitlines()[1:]
        assert header.split() == ["rule", "smollm2-135m", "deepseek-v3"]
        assert first.endswith("nothing      nothing")
        assert "2 errors" in result.out

    def test_it_needs_a_model_and_changes_nothing(self, cli: Cli, write: Any) -> None:
        write(CLEAN)
        assert cli("r.yaml", "--matrix").code == 2
        assert cli("r.yaml", "--matrix", *SMALL, "--fix").code == 2
        assert cli("r.yaml", "--matrix", *SMALL, "--format", "sarif").code == 2


class TestFix:
    def test_safe_fixes_are_written_and_said_and_the_rest_is_reported(self, cli: Cli, write: Any) -> None:
        path = write(MIXED)
        result = cli("r.yaml", "--fix", "--format", "concise")
        assert result.code == 1
        assert path.read_text() == MIXED.replace("recursive: 0", "recursive: false")
        said, count, _, left, summary = result.out.splitlines()
        assert said == "r.yaml:10:14: KT206 fixed: write false"
        assert count == "Fixed 1 finding in 1 file."
        assert left.startswith("r.yaml:16:24: KT501 error")
        assert "--unsafe-fixes mends 1." in summary

    def test_unsafe_fixes_mend_what_is_a_guess_too(self, cli: Cli, write: Any) -> None:
        path = write(MIXED)
        assert cli("r.yaml", "--unsafe-fixes").code == 0
        assert 'generate_device: "cuda:0"' in path.read_text()
        assert "recursive: false" in path.read_text()

    def test_what_is_not_reported_is_not_mended(self, cli: Cli, write: Any) -> None:
        path = write(MIXED)
        cli("r.yaml", "--unsafe-fixes", "--select", "KT5")
        assert "recursive: 0" in path.read_text()
        assert "gpu" not in path.read_text()

    def test_without_fix_the_summary_says_what_could_be_mended_and_nothing_is_written(self, cli: Cli, write: Any) -> None:
        path = write(MIXED)
        assert "--fix mends 1, and --unsafe-fixes 1 more." in cli("r.yaml").out
        assert path.read_text() == MIXED

    def test_diff_prints_the_change_and_writes_nothing(self, cli: Cli, write: Any) -> None:
        path = write(QUOTED)
        result = cli("r.yaml", "--diff")
        assert result.code == 1
        assert result.out.splitlines()[:2] == ["--- r.yaml", "+++ r.yaml"]
        assert '-  recursive: "False"\n+  recursive: False\n' in result.out
        assert result.err == "1 finding would be fixed.\n"
        assert path.read_text() == QUOTED
        write(CLEAN)
        assert cli("r.yaml", "--diff") == (0, "", "nothing would be fixed.\n")

    def test_standard_input_is_given_back_mended(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        standard_input(monkeypatch, QUOTED)
        result = cli("-", "--fix")
        assert (result.code, result.out) == (0, CLEAN + "  recursive: False\n")
        assert "KT110 fixed" in result.err

    def test_formats_for_programs_are_not_mixed_with_what_was_fixed(self, cli: Cli, write: Any) -> None:
        write(QUOTED)
        result = cli("r.yaml", "--fix", "--format", "json")
        assert json.loads(result.out) == []
        assert "KT110 fixed" in result.err

    def test_a_file_that_can_t_be_written_is_a_plain_error(self, cli: Cli, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        write(QUOTED)

        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "replace", refuse)
        result = cli("r.yaml", "--fix")
        assert (result.code, result.err) == (1, "error: r.yaml: can't be written: Permission denied\n")


class TestIgnoreComments:
    def test_an_ignored_finding_neither_shows_nor_fails(self, cli: Cli, write: Any) -> None:
        write(NO_DEVICE.replace("gpu", "gpu  # ktopt: ignore[KT501] for the old version"))
        assert cli("r.yaml").code == 0

    def test_one_at_what_stops_the_plan_has_no_effect_and_is_said_to_have_none(self, cli: Cli, write: Any) -> None:
        import ktopt

        path = write(QUOTED.replace('"False"', '"False"  # ktopt: ignore[KT110]'))
        result = cli("r.yaml", *SMALL)
        assert result.code == 1
        assert "ignore[KT110] silences nothing: what stops the plan can't be ignored, only mended" in result.out
        assert [d.code for d in ktopt.check(path, "smollm2-135m").errors] == ["KT110"]

    @pytest.mark.parametrize("pattern", ["'('", "'^model'\n  replace: {class: Nope}\n- match:\n    name: x"])
    def test_add_ignore_refuses_what_stops_the_plan(self, cli: Cli, write: Any, pattern: str) -> None:
        path = write(CLEAN.replace("'^model'", pattern))
        before = path.read_text()
        result = cli("r.yaml", *SMALL, "--add-ignore")
        assert (result.code, path.read_text()) == (1, before)
        assert "What stops the plan can't be ignored, only mended: 1 error." in result.out

    def test_one_that_silences_nothing_is_a_warning_that_fix_takes_out(self, cli: Cli, write: Any) -> None:
        path = write(CLEAN.replace("class: default", "class: default  # ktopt: ignore[KT401]"))
        result = cli("r.yaml", "--format", "concise")
        assert result.out.startswith("r.yaml:4:37: KT111 warning: ignore[KT401] silences nothing")
        assert cli("r.yaml", "--fix").code == 0
        assert path.read_text() == CLEAN

    def test_one_for_a_model_s_findings_is_called_unused_with_a_model_only(self, cli: Cli, write: Any) -> None:
        write(CLEAN.replace("'^model'", "'^model'  # ktopt: ignore[KT302]"))
        assert codes(cli("r.yaml", "--format", "json")) == []
        assert codes(cli("r.yaml", "--format", "json", *SMALL)) == ["KT111"]
        assert codes(cli("r.yaml", "--format", "json", *SMALL, "--ignore", "KT302")) == []

    def test_one_that_one_of_the_models_needs_is_used(self, cli: Cli, write: Any) -> None:
        text = OPEN_NUMBER.replace("_proj", "(gate_up|q)_proj").replace("$'", "$'  # ktopt: ignore[KT301, KT305]")
        write(text)
        found = json.loads(cli("r.yaml", *SMALL, "-m", "deepseek-v3", "--format", "json").out)
        assert not [d for d in found if d["code"] in ("KT111", "KT301", "KT305")]

    def test_add_ignore_silences_what_is_found(self, cli: Cli, write: Any) -> None:
        path = write(NO_DEVICE)
        result = cli("r.yaml", "--add-ignore")
        assert (result.code, "Added ignores for 1 finding in 1 file." in result.out) == (0, True)
        assert "gpu  # ktopt: ignore[KT501]" in path.read_text()
        path.write_text(OPEN_NUMBER)
        assert cli("r.yaml", *SMALL, "--fail-on", "warning").code == 1
        assert cli("r.yaml", *SMALL, "--add-ignore", "--fail-on", "warning").code == 0
        assert "KT305" in path.read_text()
        assert cli("r.yaml", *SMALL, "--fail-on", "warning").code == 0

    def test_an_ignored_error_does_not_stand_in_the_way_of_a_plan(self, cli: Cli, write: Any) -> None:
        import ktopt

        twice = CLEAN + CLEAN
        path = write(twice)
        assert ktopt.compile(path, "smollm2-135m").errors
        path.write_text(CLEAN + CLEAN.replace("- match:", "- match:  # ktopt: ignore[KT302] for other models"))
        assert ktopt.compile(path, "smollm2-135m").errors == ()
        assert not ktopt.check(path, "smollm2-135m").errors

    def test_those_of_an_imported_file_count_there_and_are_not_called_unused(self, cli: Cli, write: Any) -> None:
        rules = "version: 1\nrules:\n- id: a\n  match: class=Linear\n  replace: default\n  kwargs: {generate_device: cpu}\n"
        common = rules.replace("- id: a", "- id: a  # ktopt: ignore[KT302] files that import this may be broader")
        write(common, "common.yaml")
        write(rules.replace("id: a", "id: b").replace("rules:", "import: [common.yaml]\nrules:"), "all.yaml")
        assert codes(cli("all.yaml", *SMALL, "--format", "json")) == []
        assert codes(cli("common.yaml", "all.yaml", *SMALL, "--format", "json")) == []
        assert codes(cli("common.yaml", *SMALL, "--format", "json")) == ["KT111"]


class TestSettings:
    def test_they_are_found_upwards_and_the_command_line_goes_before_them(self, cli: Cli, write: Any) -> None:
        settings = ['models = ["smollm2-135m"]', 'select = ["KT3"]', 'ignore = ["KT309"]', 'fail-on = "warning"']
        write("\n".join(["[tool.ktopt]", *settings]), "pyproject.toml")
        write(OPEN_NUMBER, "rules/deep/r.yaml")
        result = cli("rules/deep/r.yaml", "--format", "json")
        assert (result.code, codes(result)) == (1, ["KT305"])
        assert cli("rules/deep/r.yaml", "--fail-on", "error").code == 0
        assert codes(cli("rules/deep/r.yaml", "--format", "json", "--select", "KT4")) == []
        assert codes(cli("rules/deep/r.yaml", "--format", "json", "--model", "gemma-3-270m")) != []

    def test_the_nearest_table_counts_for_each_file(self, cli: Cli, write: Any) -> None:
        write('[tool.ktopt]\nignore = ["KT501"]\n', "pyproject.toml")
        write("[project]\nname = 'x'\n", "a/pyproject.toml")
        write("[tool.ktopt]\n", "b/pyproject.toml")
        for folder in "ab":
            write(NO_DEVICE, f"{folder}/r.yaml")
        assert cli("a/r.yaml").code == 0
        assert cli("b/r.yaml").code == 1
        assert cli("a/r.yaml", "b/r.yaml", "--format", "concise").out.startswith("b/r.yaml:6:24: KT501")

    def test_paths_in_them_are_relative_to_them(self, cli: Cli, write: Any) -> None:
        from ktopt.models.shipped import model_config

        write(json.dumps(model_config("smollm2-135m")), "sub/ours/config.json")
        write('[tool.ktopt]\nmodels = ["ours/config.json"]\nhardware = "1x24GB"\n', "sub/pyproject.toml")
        write(CLEAN.replace("^model", "^nothing"), "sub/r.yaml")
        assert codes(cli("sub/r.yaml", "--format", "json")) == ["KT301"]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("[tool.ktopt]\nmodel = ['x']\n", "[tool.ktopt] has no key model; did you mean models?"),
            ("[tool.ktopt]\nmodels = 'x'\n", "models must be a list of strings"),
            ("[tool.ktopt]\nselect = ['KT9']\n", "[tool.ktopt] select: no code begins with 'KT9'"),
            ("[tool.ktopt]\nfail-on = 'errors'\n", "fail-on is 'errors'; write one of error, warning, info, never"),
            ("[tool.ktopt]\nhardware = 3\n", "hardware must be a string"),
            ("[tool.ktopt\n", "isn't valid TOML"),
            ("tool.ktopt = 3\n", "tool.ktopt is not a table"),
            ("[tool.ktopt]\nmodels = ['no-such-model']\n", "unknown model 'no-such-model'"),
        ],
    )
    def test_what_is_wrong_in_them_is_an_error(self, cli: Cli, write: Any, text: str, said: str) -> None:
        write(text, "pyproject.toml")
        write(CLEAN)
        result = cli("r.yaml")
        assert result.code in (1, 2)
        assert said in result.err
        assert result.code == 2 or "model" in said

    def test_a_broken_pyproject_of_others_does_not_matter(self, cli: Cli, write: Any) -> None:
        write("[tool.black\nktopt\n", "pyproject.toml")
        write(CLEAN)
        assert cli("r.yaml").code == 0

    def test_standard_input_has_those_of_the_file_that_it_stands_for(
        self, cli: Cli, write: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write('[tool.ktopt]\nignore = ["KT501"]\n', "sub/pyproject.toml")
        standard_input(monkeypatch, NO_DEVICE)
        assert cli("-", "--stdin-filename", "sub/x.yaml").code == 0
        standard_input(monkeypatch, NO_DEVICE)
        assert cli("-").code == 1


class TestFormat:
    @pytest.mark.parametrize("name", ["nothing.gguf", "r.yaml"])
    def test_weights_that_can_not_be_read_are_a_finding_in_the_format_asked_for(self, cli: Cli, write: Any, name: str) -> None:
        write(CLEAN)
        result = cli("r.yaml", *SMALL, "--weights", name, "--format", "json")
        assert (result.code, codes(result)) == (1, ["KT703"])

    def test_github_is_chosen_by_itself_in_its_actions(self, cli: Cli, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        write(QUOTED)
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        assert cli("r.yaml").out.startswith("::error file=r.yaml,line=8,")
        assert cli("r.yaml", "--format", "concise").out.startswith("r.yaml:8:14: KT110")
        monkeypatch.setenv("GITHUB_ACTIONS", "false")
        assert not cli("r.yaml").out.startswith("::")

    def test_junit_of_a_green_run_lists_what_passed_and_what_needs_a_model(self, cli: Cli, write: Any) -> None:
        from junitparser import JUnitXml

        write(CLEAN)
        (suite,) = JUnitXml.fromstring(cli("r.yaml", "--format", "junit").out.encode())
        state = {case.name: case.is_passed for case in suite}
        assert [name for name, passed in state.items() if passed] == ["KT1 YAML", "KT2 shape", "KT4 operator"]
        (suite,) = JUnitXml.fromstring(cli("r.yaml", "--format", "junit", *SMALL).out.encode())
        assert (suite.name, suite.failures, suite.skipped) == ("r.yaml on smollm2-135m", 0, 1)

    def test_junit_says_which_checks_were_not_reached(self, cli: Cli, write: Any) -> None:
        from junitparser import JUnitXml

        write(QUOTED)
        (suite,) = JUnitXml.fromstring(cli("r.yaml", "--format", "junit", *SMALL).out.encode())
        assert (suite.failures, suite.skipped) == (1, 4)
        write("- [\n")
        (suite,) = JUnitXml.fromstring(cli("r.yaml", "--format", "junit").out.encode())
        assert (suite.failures, suite.skipped) == (1, 6)
        (suite,) = JUnitXml.fromstring(cli("missing.yaml", "--format", "junit").out.encode())
        assert (suite.failures, suite.skipped) == (1, 6)

    def test_sarif_of_a_run_names_files_as_they_were_given(self, cli: Cli, write: Any) -> None:
        write(QUOTED, "a/r.yaml")
        (result,) = json.loads(cli("a/r.yaml", "--format", "sarif").out)["runs"][0]["results"]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "a/r.yaml"
        assert place["region"]["snippet"]["text"] == '  recursive: "False"'


class TestWatch:
    @staticmethod
    def run(session: Session, steps: list[Callable[[], object]]) -> int:
        """Watch, doing one step at each look, then Ctrl-C."""

        def sleep(_: float) -> None:
            if not steps:
                raise KeyboardInterrupt
            steps.pop(0)()

        return watch(session, sleep)

    @staticmethod
    def session(cli: Cli, *arguments: str) -> Session:
        import argparse

        from ktopt.cli import check

        parser = argparse.ArgumentParser()
        check.configure(parser)
        return Session(parser.parse_args([*arguments, "--watch", "--format", "concise"]))

    def test_it_checks_again_when_a_file_changes_comes_or_goes(
        self, cli: Cli, write: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = write(CLEAN, "rules/r.yaml")
        steps: list[Callable[[], object]] = [
            lambda: None,
            lambda: path.write_text(QUOTED),
            lambda: write(QUOTED, "rules/s.yaml"),
            path.unlink,
            lambda: None,
        ]
        assert self.run(self.session(cli, "rules"), steps) == 0
        out = capsys.readouterr().out
        runs = out.split("\nWatching for changes; Ctrl-C ends it.\n")
        assert len(runs) == 5
        assert [run.count("KT110 error") for run in runs] == [0, 1, 2, 1, 0]
        assert "\x1b" not in out

    def test_settings_and_imports_are_watched_too(self, cli: Cli, write: Any, capsys: pytest.CaptureFixture[str]) -> None:
        write("version: 1\nimport: [common.yaml]\n", "all.yaml")
        common = write(
            "version: 1\nrules:\n- {match: class=Linear, replace: default, kwargs: {generate_device: cpu}}\n", "common.yaml"
        )
        steps: list[Callable[[], object]] = [
            lambda: common.write_text(common.read_text().replace("cpu", "gpu")),
            lambda: write("[tool.ktopt]\nignore = ['KT501']\n", "pyproject.toml"),
        ]
        self.run(self.session(cli, "all.yaml"), steps)
        runs = capsys.readouterr().out.split("\nWatching for changes")
        assert [run.count("KT501 error") for run in runs] == [0, 1, 0, 0]

    def test_an_error_that_the_next_change_may_mend_does_not_end_it(
        self, cli: Cli, write: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write(CLEAN)
        settings = write("[tool.ktopt]\nmodel = []\n", "pyproject.toml")
        assert self.run(self.session(cli, "r.yaml"), [settings.unlink]) == 0
        captured = capsys.readouterr()
        assert "has no key model" in captured.err
        assert "No problems in 1 file" in captured.out

    def test_standard_input_can_t_be_watched(self, cli: Cli) -> None:
        assert cli("-", "--watch").code == 2

    def test_ctrl_c_ends_a_real_one_cleanly(self, write: Any, tmp_path: Path) -> None:
        write(CLEAN)
        command = [sys.executable, "-P", "-m", "ktopt", "check", "r.yaml", "--watch"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        while "Ctrl-C" not in process.stdout.readline():
            pass
        write(QUOTED)
        while "KT110" not in process.stdout.readline():
            pass
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert (process.returncode, err) == (0, "")


class TestUsage:
    @pytest.mark.parametrize(
        "arguments", [["--fix", "--add-ignore"], ["--format", "xml"], ["--fail-on", "warn"], ["--matrix", "--add-ignore"]]
    )
    def test_what_can_t_be_meant_is_refused(self, cli: Cli, write: Any, arguments: list[str]) -> None:
        write(CLEAN)
        assert cli("r.yaml", *arguments).code == 2

    def test_standard_input_stands_alone(self, cli: Cli, write: Any) -> None:
        write(CLEAN)
        assert cli("r.yaml", "-").code == 2
        assert cli("-", "--add-ignore").code == 2


def test_checking_with_every_option_imports_nothing_heavy(write: Any, tmp_path: Path) -> None:
    write(QUOTED.replace("class: default", "class: default  # ktopt: ignore[KT401]"))
    code = (
        "import sys; from ktopt.cli import main; main(['check', 'r.yaml', '-m', 'smollm2-135m', '--fix', '--format', 'sarif'])\n"
        "heavy = ('torch', 'transformers', 'numpy', 'networkx', 'jsonschema', 'rich')\n"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
