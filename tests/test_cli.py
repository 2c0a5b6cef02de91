"""The command line, called in process; a few runs in a process of their own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ktopt.cli
from ktopt.cli import COMMANDS, doctor, main
from ktopt.hardware import detect
from ktopt.placement import Device
from ktopt.working_memory import working_memory

RULES = """\
- match:
    name: "^model\\\\.layers\\\\..*\\\\.mlp\\\\.(gate|up|down)_proj$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformersLinear
    kwargs:
      generate_device: "cpu"
      prefill_device: "cpu"
      generate_op: "KLinearTorch"
      prefill_op: "KLinearTorch"
- match:
    name: "^model"
  replace:
    class: "default"
    kwargs:
      generate_device: "cpu"
      prefill_device: "cpu"
"""
MODEL = ["--model", "smollm2-135m"]


class Result(NamedTuple):
    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    for name in ("FORCE_COLOR", "NO_COLOR", "KTOPT_TRACEBACK", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> Result:
        code = main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yaml"
    path.write_text(RULES, encoding="utf-8")
    return path


@pytest.fixture
def bad_rules(tmp_path: Path) -> Path:
    path = tmp_path / "bad.yaml"
    path.write_text(RULES.replace('generate_op: "KLinearTorch"', 'generate_op: "KLinearTroch"'), encoding="utf-8")
    return path


def standard_input(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


class TestMain:
    def test_help_lists_every_command(self, cli: Cli) -> None:
        result = cli("--help")
        assert result.code == 0
        for name in COMMANDS:
            assert f"  {name} " in result.out

    def test_no_arguments_is_wrong_usage_and_prints_help(self, cli: Cli) -> None:
        result = cli()
        assert (result.code, "usage:" in result.out) == (2, True)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_help_of_each_command_shows_its_example(self, cli: Cli, name: str) -> None:
        result = cli(name, "--help")
        assert result.code == 0
        assert f"example:\n  {COMMANDS[name].example}" in result.out
        assert cli("help", name).out == result.out

    def test_an_unknown_command_is_wrong_usage_and_names_the_nearest(self, cli: Cli) -> None:
        result = cli("chek")
        assert result.code == 2
        assert result.err == "error: no command 'chek'; did you mean `ktopt check`?\n"

    def test_an_unknown_option_is_wrong_usage(self, cli: Cli) -> None:
        assert cli("check", "--nope").code == 2

    def test_version(self, cli: Cli) -> None:
        assert cli("--version").out == f"ktopt {ktopt.__version__}\n"

    def test_names_from_a_file_don_t_drive_the_terminal(self, cli: Cli, rules: Path, tmp_path: Path) -> None:
        plan = json.loads(cli("plan", rules, "--model", "smollm2-135m", "--format", "json").out)
        named = tmp_path / "named.json"
        named.write_text(json.dumps({**plan, "hardware": "a\x1b[31m\nb"}))
        assert "a\ufffd[31m\ufffdb" in cli("plan", named).out
        plan["steps"][3]["path"] = "model.\x1b[31m"
        named.write_text(json.dumps(plan))
        result = cli("plan", named)
        assert "model.\ufffd[31m: in the plan, not in the model" in result.err
        assert "\x1b" not in result.err

    def test_an_internal_error_is_short_and_says_how_to_report(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: Any) -> int:
            raise ZeroDivisionError("oops")

        monkeypatch.setattr(ktopt.cli, "_dispatch", broken)
        result = cli("check", "a b.yaml")
        assert result.code == 3
        assert "error: ktopt itself failed: ZeroDivisionError: oops" in result.err
        assert "KTOPT_TRACEBACK=1 ktopt check 'a b.yaml'" in result.err
        assert "Traceback" not in result.err
        monkeypatch.setenv("KTOPT_TRACEBACK", "1")
        with pytest.raises(ZeroDivisionError):
            main(["check"])

    def test_ctrl_c_is_quiet(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*_: Any) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(ktopt.cli, "_dispatch", interrupted)
        assert cli("check") == (130, "", "")

    def test_the_checkout_s_root_is_taken_off_the_import_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        root = str(Path(os.path.realpath(ktopt.cli.__file__)).parents[2])
        monkeypatch.chdir(root)
        monkeypatch.setattr(sys, "path", ["", root, "/elsewhere"])
        ktopt.cli.drop_checkout_root()
        assert sys.path == ["/elsewhere"]


class TestCheck:
    def test_a_clean_file(self, cli: Cli, rules: Path) -> None:
        result = cli("check", rules)
        assert result == (0, "No problems in 1 file. Selection and placement are checked with --model only.\n", "")
        assert cli("check", rules, *MODEL).out.startswith("No problems in 1 file")

    def test_a_mistake_is_shown_with_place_carets_and_the_right_word(self, cli: Cli, bad_rules: Path) -> None:
        result = cli("check", bad_rules)
        assert result.code == 1
        assert f"{bad_rules}:9:20: KT4" in result.out
        assert '9 |       generate_op: "KLinearTroch"' in result.out
        assert "^^^^^" in result.out
        assert "KLinearTorch" in result.out
        assert "Found 1 error in 1 file." in result.out

    def test_json_is_a_list_of_diagnostics(self, cli: Cli, bad_rules: Path) -> None:
        result = cli("check", bad_rules, "--format", "json")
        (found,) = json.loads(result.out)
        assert result.code == 1
        assert set(found) >= {"code", "severity", "message", "file", "span", "related", "help"}
        assert found["span"]["start"]["line"] == 9
        assert json.loads(cli("check", bad_rules, "--format", "jsonl").out) == found

    def test_json_of_a_clean_file_is_an_empty_list(self, cli: Cli, rules: Path) -> None:
        assert json.loads(cli("check", rules, "--format", "json").out) == []

    def test_concise_is_a_line_each(self, cli: Cli, bad_rules: Path) -> None:
        first, summary = cli("check", bad_rules, "--format", "concise").out.splitlines()
        assert first.startswith(f"{bad_rules}:9:20: KT4")
        assert summary.startswith("Found 1 error")

    def test_several_files_are_reported_together(self, cli: Cli, rules: Path, bad_rules: Path) -> None:
        result = cli("check", rules, bad_rules, rules.parent / "missing.yaml", "--format", "json")
        assert result.code == 1
        assert [Path(d["file"]).name for d in json.loads(result.out)] == ["bad.yaml", "missing.yaml"]

    def test_a_folder_stands_for_the_rule_files_in_it(self, cli: Cli, rules: Path, bad_rules: Path, tmp_path: Path) -> None:
        assert "Found 1 error in 2 files." in cli("check", rules.parent).out
        (tmp_path / "empty").mkdir()
        assert cli("check", tmp_path / "empty").code == 2

    def test_standard_input_is_called_as_asked(self, cli: Cli, monkeypatch: pytest.MonkeyPatch, bad_rules: Path) -> None:
        standard_input(monkeypatch, bad_rules.read_text())
        result = cli("check", "-", "--stdin-filename", "editor.yaml", "--format", "concise")
        assert result.out.startswith("editor.yaml:9:20:")

    def test_warnings_fail_only_when_asked_to(self, cli: Cli, rules: Path) -> None:
        rules.write_text(RULES.replace("prefill_op", 'out_device: "cpu"\n      prefill_op'))
        assert cli("check", rules).code == 0
        assert cli("check", rules, "--fail-on", "warning").code == 1

    def test_an_unknown_model_is_refused(self, cli: Cli, rules: Path) -> None:
        result = cli("check", rules, "--model", "deepseek-v33")
        assert result.code in (1, 2)
        assert result.err.startswith("error:")
        assert "deepseek-v3" in result.err

    def test_locked_needs_a_model_and_a_lock(self, cli: Cli, rules: Path) -> None:
        assert cli("check", rules, "--locked").code == 2
        result = cli("check", rules, *MODEL, "--locked")
        assert result.code == 2
        assert "rules.yaml has no lock file" in result.err
        assert "--lock` writes rules.yaml.lock.json" in result.err

    def test_locked_fails_when_the_plan_has_changed_and_names_what_did(self, cli: Cli, rules: Path) -> None:
        assert cli("plan", rules, *MODEL, "--lock").code == 0
        assert cli("check", rules, *MODEL, "--locked").code == 0
        rules.write_text("# a comment\n" + RULES)
        assert cli("check", rules, *MODEL, "--locked").code == 0
        rules.write_text(RULES.replace("(gate|up|down)", "(gate|up)"))
        result = cli("check", rules, *MODEL, "--locked")
        assert result.code == 1
        assert "model.layers.{0..29}.mlp.down_proj: operator KTransformersLinear -> default" in result.out
        assert "No problems" not in result.out

    def test_what_differs_from_the_lock_stands_at_the_deciding_rule_in_every_format(self, cli: Cli, rules: Path) -> None:
        assert cli("plan", rules, *MODEL, "--lock").code == 0
        text = RULES.replace("KLinearTorch", "KLinearCPUInfer")
        assert text != RULES
        rules.write_text(text)
        (found,) = json.loads(cli("check", rules, *MODEL, "--locked", "--format", "json", "--select", "KT6").out)
        assert (found["code"], found["severity"], found["file"]) == ("KT604", "error", str(rules))
        line = text.splitlines()[found["span"]["start"]["line"] - 1]
        assert "KTransformersLinear" in line
        assert "generate_op KLinearTorch -> KLinearCPUInfer" in found["message"]
        for style in ("concise", "github", "sarif", "junit", "jsonl"):
            result = cli("check", rules, *MODEL, "--locked", "--format", style)
            assert result.code == 1
            assert "KT604" in result.out
        assert cli("check", rules, *MODEL, "--format", "concise").code == 0

    def test_a_damaged_lock_is_a_finding(self, cli: Cli, rules: Path) -> None:
        Path(f"{rules}.lock.json").write_text("{")
        result = cli("check", rules, *MODEL, "--locked")
        assert result.code == 1
        assert "KT604 error: the lock file can't be read" in result.out


class TestPlan:
    def test_the_table_folds_layers_fits_a_hundred_columns_and_sums_bytes(self, cli: Cli, rules: Path) -> None:
        result = cli("plan", rules, *MODEL)
        assert result.code == 0
        assert "─ {0..29} " in result.out
        assert " x90 " in result.out
        assert "KTransformersLinear" in result.out
        assert "together" in result.out
        assert max(map(len, result.out.splitlines())) <= 100

    def test_json_is_the_plan_itself(self, cli: Cli, rules: Path) -> None:
        plan = json.loads(cli("plan", rules, *MODEL, "--format", "json").out)
        assert len(plan["steps"]) == 397

    def test_a_plan_file_is_written_and_compares_equal_to_its_rules(self, cli: Cli, rules: Path, tmp_path: Path) -> None:
        out = tmp_path / "plan.json"
        assert cli("plan", rules, *MODEL, "-o", out).code == 0
        assert cli("diff", out, rules, *MODEL) == (0, "the plans do not differ\n", "")
        assert cli("plan", out).out == cli("plan", rules, *MODEL).out

    def test_errors_of_the_file_stop_the_plan(self, cli: Cli, bad_rules: Path) -> None:
        result = cli("plan", bad_rules, *MODEL)
        assert (result.code, result.out) == (1, "")
        assert "KT4" in result.err

    def test_a_model_is_needed(self, cli: Cli, rules: Path) -> None:
        result = cli("plan", rules)
        assert result.code == 2
        assert "which model?" in result.err

    def test_a_bad_remap_is_wrong_usage(self, cli: Cli, rules: Path) -> None:
        assert cli("plan", rules, *MODEL, "--remap", "cuda").code == 2
        assert cli("plan", rules, *MODEL, "--remap", "gpu=cpu").code == 2

    def test_a_rule_that_asks_about_the_machine_needs_hardware(self, cli: Cli, tmp_path: Path) -> None:
        path = tmp_path / "n.yaml"
        path.write_text(
            "version: 1\nrules:\n  - id: fast\n    match: '@model.layers.*.mlp'\n    replace: default\n    when: hw.cuda_sm >= 80\n"
        )
        result = cli("plan", path, *MODEL)
        assert result.code == 1
        assert "--hardware" in result.err
        assert "fast" in result.err
        assert cli("plan", path, *MODEL, "--hardware", "1x24GB").code == 0
        inactive = cli("plan", path, *MODEL, "--hardware", "cpu")
        assert inactive.code == 0
        assert "inactive on this machine: fast" in inactive.out

    def test_a_shipped_rule_set_is_found_by_name(self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        assert cli("plan", "smollm2/reference", *MODEL).code == 0
        assert cli("plan", "rules/smollm2/reference.yaml", *MODEL).code == 0


class TestDiff:
    def test_what_differs_is_named_and_the_exit_code_is_one(self, cli: Cli, rules: Path, tmp_path: Path) -> None:
        other = tmp_path / "other.yaml"
        other.write_text(RULES.replace("(gate|up|down)", "(gate|up)"))
        result = cli("diff", rules, other, *MODEL)
        assert result.code == 1
        assert "  ~ model.layers.{0..29}.mlp.down_proj x30: operator KTransformersLinear -> default; 53.1 MB\n" in result.out
        assert json.loads(cli("diff", rules, other, *MODEL, "--format", "json").out)["rules"][0]["changes"]

    def test_a_file_that_is_no_plan_is_refused(self, cli: Cli, rules: Path, tmp_path: Path) -> None:
        path = tmp_path / "x.json"
        path.write_text("[]")
        result = cli("diff", path, rules, *MODEL)
        assert result.code == 1
        assert str(path) in result.err


class TestInspect:
    def test_no_name_lists_the_shipped_models(self, cli: Cli) -> None:
        assert "deepseek-v3" in cli("inspect").out
        assert "smollm2-135m" in json.loads(cli("inspect", "--format", "json").out)

    def test_the_tree_is_folded_and_counted(self, cli: Cli) -> None:
        result = cli("inspect", "deepseek-v3")
        assert "1,215 modules, 61 layers" in result.out
        assert "{3..60}.mlp" in result.out
        assert "model.layers.{3..60}.mlp.gate as class ktransformers.models.modeling_deepseek_v3.MoEGate" in result.out
        assert max(map(len, result.out.split("rules may also name")[0].splitlines())) <= 100

    def test_a_tied_weight_is_counted_once(self, cli: Cli) -> None:
        assert "134.52M parameters" in cli("inspect", "smollm2-135m").out
        assert "268.10M parameters" in cli("inspect", "gemma-3-270m").out

    def test_json_has_every_module(self, cli: Cli) -> None:
        tree = json.loads(cli("inspect", "smollm2-135m", "--format", "json").out)
        assert len(tree["modules"]) == 397
        assert tree["modules"][2]["tensors"] == [{"name": "weight", "shape": [49152, 576], "dtype": "bfloat16", "buffer": False}]

    def test_full_gives_each_module_its_own_lines(self, cli: Cli) -> None:
        result = cli("inspect", "smollm2-135m", "--full")
        assert "\nmodel.layers.7.mlp.up_proj  torch.nn.modules.linear.Linear  linear\n" in result.out


class TestOperators:
    def test_the_list_has_every_operator(self, cli: Cli) -> None:
        result = cli("operators")
        assert "\nKTransformersLinear " in result.out
        assert len(json.loads(cli("operators", "--format", "json").out)) == len(result.out.splitlines()) - 1

    def test_a_page_has_kwargs_ops_and_what_upstream_did(self, cli: Cli) -> None:
        page = cli("operators", "ktransformers.operators.linear.KTransformersLinear").out
        assert page.startswith("KTransformersLinear\n")
        assert "  generate_op: a string (default KLinearMarlin)" in page
        assert "  KLinearTorch (on cpu, cuda" in page
        assert "\nupstream\n" in page

    def test_an_unknown_operator_names_the_nearest(self, cli: Cli) -> None:
        result = cli("operators", "KTransformerLinear")
        assert result.code == 2
        assert "did you mean KTransformersLinear?" in result.err


class TestGraph:
    def test_dot_has_a_node_a_module_and_quotes_names(self, cli: Cli, rules: Path) -> None:
        result = cli("graph", rules, *MODEL, "--unfold")
        assert result.out.startswith('digraph "smollm2-135m" {')
        assert '"model.layers.3.mlp.up_proj" [label="up_proj\\nKTransformersLinear (KLinearTorch)\\ncpu' in result.out
        assert '"model.layers.3.mlp" -> "model.layers.3.mlp.up_proj";' in result.out
        assert '"model.layers.{0..29}.mlp" -> "model.layers.{0..29}.mlp.up_proj";' in cli("graph", rules, *MODEL).out

    def test_transfers_are_edges_in_both_formats(self, cli: Cli, rules: Path) -> None:
        rules.write_text(RULES.replace('generate_device: "cpu"', 'generate_device: "cuda:0"', 1))
        drawn = json.loads(cli("graph", rules, *MODEL, "--format", "json", "--unfold").out)
        moves = [e for e in drawn["edges"] if e["kind"] == "transfer"]
        assert {(e["from"], e["to"]) for e in moves} >= {("cpu", "cuda:0"), ("cuda:0", "cpu")}
        nodes = {n["id"]: n for n in drawn["nodes"]}
        assert all(e["source"] in nodes and e["target"] in nodes for e in drawn["edges"])
        assert nodes["model.layers.0.mlp.up_proj"]["device"] == "cuda:0"
        assert 'label="cpu to cuda:0' in cli("graph", rules, *MODEL).out

    def test_the_name_of_the_file_tells_the_format(self, cli: Cli, rules: Path, tmp_path: Path) -> None:
        begins = {"a.svg": "<svg ", "a.dot": "digraph ", "a.html": "<!doctype html>", "a.graphml": "<graphml ", "a.json": "{"}
        for name, text in begins.items():
            assert cli("graph", rules, *MODEL, "-o", tmp_path / name).code == 0
            assert (tmp_path / name).read_text(encoding="utf-8").startswith(text)
        result = cli("graph", rules, *MODEL, "-o", tmp_path / "a.png")
        assert result.code == 2
        assert "Give --format dot, json, graphml, svg, html" in result.err
        assert not (tmp_path / "a.png").exists()

    def test_a_context_is_in_the_bars_as_ktopt_plan_reckons_it(self, cli: Cli, rules: Path) -> None:
        data = json.loads(cli("graph", rules, *MODEL, "--format", "json", "--context", "4096").out)
        reckoned = {m.device: m for m in working_memory(ktopt.compile(rules, "smollm2-135m"), 4096)}
        assert len(data["devices"]) == len(reckoned)
        for device in data["devices"]:
            found = reckoned[device["name"]]
            assert device["bytes"] == found.weight_bytes + found.cache_bytes + found.transient_bytes
        assert any(device["by_kind"].get("cache") for device in data["devices"])
        assert cli("graph", rules, *MODEL, "--context", "0").code == 2
        assert cli("graph", rules, *MODEL, "--batch", "2").code == 2

    def test_a_context_that_a_machine_has_no_room_for_is_said(self, cli: Cli, rules: Path, tmp_path: Path) -> None:
        assert cli("plan", rules, *MODEL, "-o", tmp_path / "plan.json").code == 0
        (tmp_path / "small.yaml").write_text("{name: small, ram: 600MB, devices: [{name: cuda, memory: 1GB}]}")
        for of in ([tmp_path / "plan.json"], [rules, *MODEL]):
            result = cli("graph", *of, "--context", "100000", "--hardware", tmp_path / "small.yaml")
            assert result.code == 1
            assert "KT507" in result.err
            assert result.out.startswith("digraph ")

    def test_a_plan_file_is_drawn_as_its_rules_are(self, cli: Cli, rules: Path, tmp_path: Path) -> None:
        assert cli("plan", rules, *MODEL, "-o", tmp_path / "plan.json").code == 0
        for kind in ("svg", "graphml", "json"):
            assert cli("graph", tmp_path / "plan.json", "--format", kind).out == cli("graph", rules, *MODEL, "--format", kind).out


class TestDoctor:
    def test_it_reports_versions_machine_and_why_flashinfer_is_not_usable(self, cli: Cli) -> None:
        facts = json.loads(cli("doctor", "--json").out)
        assert facts["packages"]["torch"]
        assert facts["cpu"]["cores"] >= 1
        assert facts["flashinfer"]["usable"] or facts["flashinfer"]["why_not"]
        text = cli("doctor").out
        assert f"ktopt         {ktopt.__version__}" in text

    @pytest.mark.parametrize(
        ("installed", "sm", "wanted"),
        [
            ("0.7.4", 90, "cuda: FlashInfer, for keys of 64, 128 or 256 numbers"),
            (None, 90, "cuda: torch: FlashInfer is not installed"),
            ("0.7.4", 75, "cuda: torch: FlashInfer's kernels for it need compute capability 8.0"),
        ],
    )
    def test_it_says_what_computes_attention_to_blocks_and_why(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch, installed: str | None, sm: int, wanted: str
    ) -> None:
        found = doctor.installed
        machine = replace(detect(), devices=(Device("cuda:0", 80 << 30, "a GPU", sm),))
        monkeypatch.setattr(doctor, "installed", lambda name: installed if name == "flashinfer-python" else found(name))
        monkeypatch.setattr(doctor, "detect", lambda: machine)
        (line,) = [line for line in cli("doctor").out.splitlines() if "block attn" in line]
        assert "cpu: " in line
        assert wanted in line

    def test_a_missing_package_makes_it_fail(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ktopt.cli.doctor.NEEDED", ("torch", "no-such-package"))
        result = cli("doctor")
        assert result.code == 1
        assert "missing: pip install no-such-package" in result.out


class TestTerminal:
    def test_colour_follows_the_two_variables(self, cli: Cli, bad_rules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "\x1b[" not in cli("check", bad_rules).out
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert "\x1b[" in cli("check", bad_rules).out
        monkeypatch.setenv("NO_COLOR", "1")
        assert "\x1b[" not in cli("check", bad_rules).out


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=env, timeout=60)


LIGHT = """
import sys
from ktopt.cli import main
code = main(sys.argv[1:])
heavy = set("torch transformers networkx numpy rich jsonschema lark regex gguf prompt_toolkit".split()) & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize("command", [
    ["check"], ["plan"], ["why", "model.layers.3.mlp.up_proj"], ["graph"],
    ["plan", "--mode", "long_context", "--context", "139264"],
])  # fmt: skip
def test_checking_and_planning_a_known_model_import_nothing_heavy(rules: Path, command: list[str]) -> None:
    result = python("-P", "-c", LIGHT, *command, str(rules), *MODEL, cwd=rules.parent)
    assert result.returncode == 0, result.stderr


def test_the_module_form_exits_as_the_command_does(rules: Path, bad_rules: Path) -> None:
    assert python("-P", "-m", "ktopt", "check", str(rules), cwd=rules.parent).returncode == 0
    assert python("-P", "-m", "ktopt", "check", str(bad_rules), cwd=rules.parent).returncode == 1
    assert python("-P", "-m", "ktopt", "check", cwd=rules.parent).returncode == 2


def test_a_closed_pipe_is_quiet(rules: Path) -> None:
    command = f"{sys.executable} -P -m ktopt inspect deepseek-v3 --format json | head -n 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=rules.parent, timeout=60)
    assert result.stdout == "{\n"
    assert result.stderr == ""


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of two layers with a byte-level tokenizer and a chat template."""
    from gguf_fixtures import make_gguf, tiny_model

    return make_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", tiny_model("llama"), "Q8_0")


@pytest.fixture
def cpu_rules(tmp_path: Path) -> Path:
    path = tmp_path / "cpu.yaml"
    path.write_text(
        "- match: {class: torch.nn.Linear}\n"
        "  replace: {class: KTransformersLinear, kwargs: {generate_device: cpu, generate_op: KLinearTorch}}\n"
    )
    return path


CPU = ["--device", "cpu", "--dtype", "float32"]


class TestRun:
    def test_it_answers_and_says_what_it_took(self, cli: Cli, cpu_rules: Path, tiny_gguf: Path) -> None:
        result = cli("run", cpu_rules, "--weights", tiny_gguf, *CPU, "--prompt", "the", "-n", "5", "--greedy", "--show-plan")
        assert result.code == 0, result.err
        assert "KTransformersLinear" in result.out
        assert "tokens/s" in result.out
        assert "peak memory" in result.out
        again = cli("run", cpu_rules, "--weights", tiny_gguf, *CPU, "--prompt", "the", "-n", "5", "--temperature", "0", "--quiet")
        assert again.out.rstrip("\n") in result.out
        assert "tokens/s" not in again.out

    def test_a_seed_makes_sampling_repeatable(self, cli: Cli, cpu_rules: Path, tiny_gguf: Path) -> None:
        call = ["run", cpu_rules, "--weights", tiny_gguf, *CPU, "--prompt", "the", "-n", "8", "--temperature", "2", "-q", "--raw"]
        first, second, other = (cli(*call, "--seed", seed) for seed in ("1", "1", "2"))
        assert first.code == 0
        assert first.out == second.out != other.out

    def test_the_prompt_may_come_from_standard_input(
        self, cli: Cli, cpu_rules: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        standard_input(monkeypatch, "the")
        piped = cli("run", cpu_rules, "--weights", tiny_gguf, *CPU, "--prompt", "-", "-n", "4", "--greedy", "-q")
        assert piped.out == cli("run", cpu_rules, "--weights", tiny_gguf, *CPU, "-p", "the", "-n", "4", "--greedy", "-q").out

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ([], "where are the weights?"),
            (["--weights", "missing.gguf"], "no such file"),
            (["--weights", "W", "-n", "0"], "--max-tokens: from 1"),
            (["--weights", "W", "--greedy", "--temperature", "1"], "exclude each other"),
            (["--weights", "W", "--temperature", "-1"], "--temperature: 0, or a number from 0.001 on"),
            (["--weights", "W", "--raw", "--system", "Be brief."], "--system needs a chat template"),
        ],
    )
    def test_wrong_usage_is_told_in_a_line(
        self, cli: Cli, cpu_rules: Path, tiny_gguf: Path, options: list[str], message: str
    ) -> None:
        given = [str(tiny_gguf) if option == "W" else option for option in options]
        result = cli(
            "run", cpu_rules, *CPU, "--model", tiny_gguf.with_suffix(".json") if not given else tiny_gguf, "-p", "x", *given
        )
        assert result.code == 2
        assert message in result.err

    def test_weights_of_another_model_are_refused(self, cli: Cli, cpu_rules: Path, tiny_gguf: Path) -> None:
        result = cli("run", cpu_rules, *MODEL, "--weights", tiny_gguf, *CPU, "--prompt", "x")
        assert (result.code, result.out) == (1, "")
        assert "error: " in result.err
        assert tiny_gguf.name in result.err

    def test_a_device_that_is_not_here_is_refused_with_the_way_out(self, cli: Cli, cpu_rules: Path, tiny_gguf: Path) -> None:
        result = cli("run", cpu_rules, "--weights", tiny_gguf, "--device", "npu:3", "--prompt", "x")
        assert result.code == 1
        assert "--remap npu=cpu" in result.err


class TestApply:
    def test_the_folder_loads_in_transformers_and_holds_the_plan(
        self, cli: Cli, cpu_rules: Path, tiny_gguf: Path, tmp_path: Path
    ) -> None:
        result = cli("apply", cpu_rules, "--weights", tiny_gguf, *CPU, "--out", tmp_path / "out")
        assert result.code == 0, result.err
        assert {"config.json", "plan.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "out").iterdir()}
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert model.ktopt_plan.by_path["model.layers.0.mlp.up_proj"].operator == "KTransformersLinear"
        assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([258]) == "th"

    def test_the_folder_runs_as_the_rule_file_did(self, cli: Cli, cpu_rules: Path, tiny_gguf: Path, tmp_path: Path) -> None:
        asked = ["--prompt", "the", "-n", "6", "--greedy", "-q"]
        assert cli("apply", cpu_rules, "--weights", tiny_gguf, *CPU, "--out", tmp_path / "out", "--copy").code == 0
        result = cli("run", tmp_path / "out", *asked)
        assert result.code == 0, result.err
        assert result.out == cli("run", cpu_rules, "--weights", tiny_gguf, *CPU, *asked).out

    def test_a_plan_file_is_taken_back(self, cli: Cli, cpu_rules: Path, tiny_gguf: Path, tmp_path: Path) -> None:
        plan = tmp_path / "plan.json"
        assert cli("plan", cpu_rules, "--weights", tiny_gguf, *CPU, "-o", plan).code == 0
        assert cli("apply", plan, "--weights", tiny_gguf, "--out", tmp_path / "out").code == 0
        assert cli("diff", plan, tmp_path / "out" / "plan.json").code == 0
        refused = cli("apply", plan, "--weights", tiny_gguf, "--device", "cpu", "--out", tmp_path / "out")
        assert refused.code == 2
        assert "settles --device already" in refused.err

    @pytest.mark.parametrize("device", ["cuda:7", "npu:3"])
    def test_a_folder_for_devices_that_are_not_here_is_written_only_when_asked_for(
        self, device: str, cli: Cli, cpu_rules: Path, tiny_gguf: Path, tmp_path: Path
    ) -> None:
        call = ["apply", cpu_rules, "--weights", tiny_gguf, "--device", device, "--out", tmp_path / "out"]
        refused = cli(*call)
        assert refused.code == 1
        assert f"lacks devices that the plan uses:\n  {device}: " in refused.err
        assert f"--remap {device[:-2]}=cpu" in refused.err
        assert "--for-another-machine" in refused.err
        assert not (tmp_path / "out").exists()
        written = cli(*call, "--for-another-machine")
        assert written.code == 0, written.err
        assert f'"generate_device": "{device}"' in (tmp_path / "out" / "plan.json").read_text()
        assert cli("doctor", tmp_path / "out").code == 0
        assert "lacks devices" in cli("run", tmp_path / "out", "--prompt", "x").err

    def test_a_plan_with_errors_needs_force(self, cli: Cli, cpu_rules: Path, tiny_gguf: Path, tmp_path: Path) -> None:
        cpu_rules.write_text(cpu_rules.read_text() + "- match: {name: nothing_here}\n  replace: {class: default}\n")
        call = ["apply", cpu_rules, "--weights", tiny_gguf, *CPU, "--out", tmp_path / "out"]
        refused = cli(*call)
        assert refused.code == 1
        assert "KT301" in refused.err
        assert not (tmp_path / "out").exists()
        assert cli(*call, "--force").code == 0


def test_a_checkout_s_kernels_folder_is_not_taken_for_hugging_face_s_package(
    cpu_rules: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    checkout = Path(os.path.realpath(ktopt.cli.__file__)).parents[2]
    if not (checkout / "pyproject.toml").exists():
        pytest.skip("ktopt is not run from a checkout")
    from transformers.utils.import_utils import KERNELS_MIN_VERSION as version

    info = tmp_path / "site" / f"kernels-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    (info / "top_level.txt").write_text("kernels\n")
    asked = ["--weights", str(tiny_gguf), *CPU, "-p", "x", "-n", "1", "-q"]
    result = python("-m", "ktopt", "run", str(cpu_rules), *asked, cwd=checkout, PYTHONPATH=str(info.parent))
    assert result.returncode == 0, result.stderr
