"""The long-context config file: what KTransformers' users write is read, and what can't be is said with place and remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import jsonschema
import pytest
import yaml
from rulefiles import CASES, needs_cases

from ktopt.cli import main
from ktopt.config import Config
from ktopt.config_file import check_config, is_config, read_config
from ktopt.diagnostics import CompileError, Diagnostic, Report, Severity
from ktopt.parse import parse
from ktopt.schema import config_schema
from ktopt.source import SourceFile

MODEL = "model: {name_or_path: smollm2-135m}\n"


def checked(text: str) -> tuple[Config | None, list[Diagnostic]]:
    report = Report()
    config = check_config(parse(SourceFile("config.yaml", dedent(text)), report), report)
    return config, report.sorted()


def long(settings: str) -> str:
    return MODEL + "long_context: {" + settings + "}\n"


def settled(settings: str) -> Any:
    config, found = checked(long(settings))
    assert [d for d in found if d.severity is Severity.ERROR] == []
    assert config is not None
    return config.long_context


@needs_cases
def test_the_config_of_the_long_context_case_is_read_and_its_length_rounded_up() -> None:
    path = CASES / "long_context" / "config.yaml"
    config = read_config(path)
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert config.model.to_kwargs() == written["model"]
    assert config.long_context.to_kwargs() == {
        **written["long_context"], "max_seq_len": 1086 * 128, "anchor_num": 1, "prefill": "exact", "max_new_tokens": 1024
    }  # fmt: skip
    assert config.kvc2.to_kwargs().items() >= written["kvc2"].items()
    report = Report()
    check_config(parse(SourceFile(str(path), path.read_text(encoding="utf-8")), report), report)
    (finding,) = report
    assert (finding.code, finding.severity, finding.span.start.line) == ("KT211", Severity.INFO, 8)
    assert "139000` is rounded up to 139008" in finding.message


def test_what_is_left_out_has_a_default() -> None:
    config, found = checked(MODEL)
    assert config is not None
    assert found == []
    assert config.long_context.anchor_num == 1
    assert config.kvc2.gpu_only is False


@pytest.mark.parametrize(("settings", "name", "value"), [
    ("anchor_type: QUEST", "anchor_num", 2),
    ("anchor_type: DYNAMIC, anchor_num: 4", "anchor_num", 4),
    ("anchor_type: KEY_INT4", "anchor_num", 1),
    ("token_step: null", "token_step", 1),
    ("second_block_count: 7", "second_select_num", 7),
    ("representative_type: FIXED", "anchor_type", "FIXED"),
    ("max_seq_len: 32768", "max_seq_len", 32768),
    ("max_seq_len: 1", "max_seq_len", 256),
    ("max_seq_len: 5, block_size: 8", "max_seq_len", 72),
    ("max_seq_len: 1000, chunk_size: 4096", "chunk_size", 1024),
    ("local_windows_len: 4000", "local_windows_len", 4096),
    ("max_seq_len: 8192", "local_windows_len", 4096),
    ("max_seq_len: 8192", "preselect_block_count", 31),
    ("max_seq_len: 2000", "local_windows_len", 1024),
    ("max_seq_len: 4096, preselect_block_count: 24", "local_windows_len", 896),
    ("max_seq_len: 4096, preselect_block: false", "local_windows_len", 3968),
    ("max_seq_len: 8192, local_windows_len: 8064", "preselect_block", False),
    ("kv_type: FP16, block_size: 48, max_seq_len: 48000", "block_size", 48),
])  # fmt: skip
def test_settings_are_settled(settings: str, name: str, value: Any) -> None:
    assert getattr(settled(settings), name) == value


@pytest.mark.parametrize(("text", "code", "line", "said"), [
    (long("anchor_type: QUEST, anchor_num: 1"), "KT210", 2, "QUEST` needs `anchor_num: 2`, not 1"),
    (long("anchor_type: BLOCK_MAX, anchor_num: 2"), "KT210", 2, "BLOCK_MAX` needs `anchor_num: 1`, not 2"),
    (long("anchor_type: FIXED, anchor_num: 129"), "KT210", 2, "has no 129 keys"),
    (long("kv_type: Q8_0, block_size: 48"), "KT210", 2, "a multiple of 32, not 48"),
    (long("max_seq_len: 8192, local_windows_len: 4096, preselect_block_count: 32"), "KT210", 2, "are 65 blocks"),
    (long("max_seq_len: 4096, local_windows_len: 4096, preselect_block: false"), "KT210", 2, "are 33 blocks"),
    (long("block_size: 0"), "KT210", 2, "at least 1, not 0"),
    (MODEL + "kvc2: {utilization_percentage: 1.5}\n", "KT210", 2, "from 0 to 1, not 1.5"),
    (MODEL + "kvc2: {prefix_reuse: true}\n", "KT210", 2, "there is no `disk_path`"),
    (MODEL + "kvc2: {cpu_memory_size_GB: .nan}\n", "KT210", 2, "at least 0, not nan"),
    (long("anchor_num: 1, representative_num: 1"), "KT210", 2, "another spelling of `anchor_num`"),
    (long("block_sise: 128"), "KT202", 2, "did you mean `block_size`?"),
    (long("cpu_memory_size_GB: 3"), "KT202", 2, "it belongs under `kvc2:`"),
    (MODEL + "long_contxt: {}\n", "KT202", 2, "did you mean `long_context`?"),
    (MODEL + "block_size: 128\n", "KT202", 2, "it belongs under `long_context:`"),
    (MODEL + "sever: {port: 1}\n", "KT202", 2, "unknown key `sever`"),
    ("model: {name_or_path: m, path: n}\n", "KT210", 1, "another spelling of `name_or_path`"),
    (long("anchor_type: Fix"), "KT207", 2, "did you mean FIXED?"),
    (long("kv_type: fp16"), "KT207", 2, "did you mean FP16?"),
    (long("head_select_mode: EACH"), "KT207", 2, 'is "EACH"'),
    (long("block_size: 12.5"), "KT206", 2, "must be a whole number, not 12.5"),
    (long("preselect_block: 'yes'"), "KT206", 2, "must be true or false"),
    (long("layer_step: null"), "KT205", 2, "`layer_step` is empty"),
    ("model: {device: cpu}\n", "KT203", 1, "`name_or_path` is missing"),
    ("model: {name_or_path: m, device: gpu}\n", "KT501", 1, "did you mean cuda:0?"),
    ("kvc2: {gpu_only: true}\n", "KT203", 1, "`model` is missing"),
    (MODEL + "long_context:\n", "KT205", 2, "`long_context:` is empty"),
])  # fmt: skip
def test_what_can_not_be_is_one_error_at_its_line_and_leaves_no_config(text: str, code: str, line: int, said: str) -> None:
    config, found = checked(text)
    errors = [d for d in found if d.severity is Severity.ERROR]
    assert [(d.code, d.span.start.line) for d in errors] == [(code, line)], [str(d) for d in found]
    assert said in errors[0].message
    assert config is None


UPSTREAMS = """\
log: {dir: logs, file: lexllama.log, level: debug, backup_count: -1}
server: {ip: 0.0.0.0, port: 10002}
db: {type: sqllite, database: server.db, host: ./, pool_size: 10}
user: {secret_key: "", algorithm: HS256}
model:
  type: balance_serve
  name: DeepSeek-Coder-V2-Instruct
  path: deepseek-ai/DeepSeek-V2-Lite-Chat
  gguf_path: ./DeepSeek-V2-Lite-Chat-GGUF
  device: cuda:0
  cache_lens: 8192
  max_new_tokens: 500
web: {mount: False, open_cross_domain: True}
ext: {cpu_infer: 10}
long_context:
  max_seq_len: 32000
  block_size: 128
  local_windows_len: 4096
  second_select_num: 32
  anchor_type: DYNAMIC
  kv_type: FP16
  dense_layer_num: 2
  anchor_num: 1
  preselect_block: True
  head_select_mode: SHARED
  preselect_block_count: 32
  layer_step: 1
  token_step:
local_chat: {prompt_file: ""}
async_server: {sched_strategy: FCFS, max_batch_size: 4}
attn: {page_size: 256, chunk_size: 256}
kvc2: {gpu_only: true, utilization_percentage: 1.0, cpu_memory_size_GB: 500}
"""
"""The keys of the file that KTransformers installs."""


def test_the_config_that_ktransformers_installs_is_read_and_what_nothing_reads_is_said_once_a_mapping() -> None:
    config, found = checked(UPSTREAMS)
    assert config is not None
    assert config.model.name_or_path == config.model["path"] == "deepseek-ai/DeepSeek-V2-Lite-Chat"
    assert config.long_context.head_select_mode == "SHARED"
    assert config.kvc2.cpu_memory_size_GB == 500
    assert {d.severity for d in found} == {Severity.INFO}
    assert [d.span.start.line for d in found] == [1, 6]
    assert "`log`, `server`, `db`, `user`, `web`, `ext`, `local_chat`, `async_server`, `attn`" in found[0].message
    assert "`type`, `name`, `gguf_path`, `cache_lens`, `max_new_tokens`" in found[1].message


def test_reading_a_wrong_config_raises_with_every_finding(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(long("block_sise: 128, layer_step: 0"))
    with pytest.raises(CompileError) as caught:
        read_config(path)
    assert sorted(d.code for d in caught.value.report) == ["KT202", "KT210"]
    path.write_text("- a\n")
    with pytest.raises(CompileError, match="a config is a mapping"):
        read_config(path)


@pytest.mark.parametrize(("text", "expected"), [
    (MODEL, True), ("kvc2: {}\n", True), ("version: 1\nrules: []\nlong_context: {}\n", False), ("- match: {name: model}\n", False),
    ("rules: []\n", False), ("", False),
])  # fmt: skip
def test_a_config_is_told_from_a_rule_file(text: str, expected: bool) -> None:
    assert is_config(parse(SourceFile("a.yaml", text), Report())) is expected


def test_the_command_checks_configs_beside_rule_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, rules = tmp_path / "config.yaml", tmp_path / "rules.yaml"
    config.write_text(long("anchor_type: QUEST, anchor_num: 1"))
    rules.write_text("- match: {name: '^model'}\n  replace: {class: default, kwargs: {generate_device: cpu}}\n")
    assert main(["check", str(config), str(rules), "--format", "concise"]) == 1
    out = capsys.readouterr().out
    assert f"{config}:2:" in out
    assert "KT210 error" in out
    config.write_text(MODEL)
    assert main(["check", str(config), "--model", "smollm2-135m"]) == 0
    assert capsys.readouterr().out == "No problems in 1 file.\n"


def test_junit_says_that_a_config_has_no_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(MODEL)
    assert main(["check", str(config), "--format", "junit"]) == 0
    out = capsys.readouterr().out
    assert 'tests="7" failures="0" skipped="5"' in out
    assert "a config has no rules" in out


@pytest.fixture(scope="module")
def schema() -> jsonschema.Draft7Validator:
    made = config_schema()
    jsonschema.Draft7Validator.check_schema(made)
    return jsonschema.Draft7Validator(made)


@needs_cases
def test_the_schema_takes_the_case(schema: jsonschema.Draft7Validator) -> None:
    written = yaml.safe_load((CASES / "long_context" / "config.yaml").read_text(encoding="utf-8"))
    assert [e.message for e in schema.iter_errors(written)] == []


@pytest.mark.parametrize(("text", "path"), [
    (long("block_size: 0"), "$.long_context.block_size"), (long("anchor_type: Fix"), "$.long_context.anchor_type"),
    (long("block_sise: 1"), "$.long_context"), (MODEL + "kvc2: {utilization_percentage: 2}\n", "$.kvc2.utilization_percentage"),
    ("model: {}\n", "$.model"), ("model: {name_or_path: m, device: gpu}\n", "$.model.device"),
])  # fmt: skip
def test_the_schema_refuses_what_the_check_does(schema: jsonschema.Draft7Validator, text: str, path: str) -> None:
    assert [e.json_path for e in schema.iter_errors(yaml.safe_load(text))] == [path]
    assert checked(text)[0] is None


def test_the_schema_ships(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "config"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(config_schema()))


def test_reading_a_config_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(MODEL)
    code = (
        "import sys; from ktopt.config_file import read_config; read_config('config.yaml');"
        "print([m for m in ('torch', 'transformers', 'numpy', 'lark', 'jsonschema') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
