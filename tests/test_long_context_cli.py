"""`ktopt run --mode long_context`: with rules, without, by a config, and what is refused."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from gguf_fixtures import make_gguf, tiny_model

from ktopt.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = """\
model: {name_or_path: "MODEL", device: cpu}
long_context:
  max_seq_len: 256
  block_size: 16
  local_windows_len: 32
  second_select_num: 16
  preselect_block: false
  dense_layer_num: 0
  kv_type: FP32
"""
RULES = "version: 1\nrules:\n  - {match: 'class=Linear', replace: KTransformersLinear, kwargs: {generate_op: KLinearTorch}}\n"
ASKED = ["--greedy", "-n", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("run")
    make_gguf(made / "tiny.gguf", tiny_model("llama"), "F32")
    (made / "rules.yaml").write_text(RULES)
    (made / "config.yaml").write_text(CONFIG.replace("MODEL", str(made / "tiny.gguf")))
    return made


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["run", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_with_all_blocks_chosen_the_answer_is_that_of_the_plain_mode(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["rules.yaml", "--weights", "tiny.gguf", "--dtype", "float32", "-p", "the quick brown fox " * 4, *ASKED, "--quiet"]
    plain = text_of(capsys, *asked)
    assert plain.strip()
    assert text_of(capsys, *asked, "--mode", "long_context", "--config", "config.yaml") == plain


def test_without_rules_the_config_says_which_model_and_the_summary_has_speed_and_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    out = text_of(capsys, "--mode", "long_context", "--config", "config.yaml", "-p", "x" * 100, *ASKED)
    assert "tokens/s), then" in out
    assert [line.split()[0] for line in out.splitlines()[-4:]] == ["tier", "device", "host", "disk"]


def test_a_config_in_the_working_folder_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "ktopt.yaml").write_text((folder / "config.yaml").read_text())
    try:
        assert "of 1,280 tokens" in text_of(capsys, "--mode", "long_context", "-p", "x", *ASKED)
        assert "of 1,152 tokens" in text_of(capsys, "--mode", "long_context", "-p", "x", *ASKED, "--context", "120")
    finally:
        (folder / "ktopt.yaml").unlink()


def test_a_length_that_is_rounded_up_is_said_and_a_context_may_be_less_than_a_block(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "uneven.yaml").write_text((folder / "config.yaml").read_text().replace("max_seq_len: 256", "max_seq_len: 250"))
    named = ["--mode", "long_context", "--config", "uneven.yaml", "-p", "x", *ASKED]
    assert "of 1,280 tokens" in text_of(capsys, *named)
    assert "`max_seq_len: 250` is rounded up to 256, 16 blocks of 16 tokens" in caplog.text
    rules = ["rules.yaml", "--weights", "tiny.gguf", "--mode", "long_context", "-p", "x", *ASKED]
    assert "of 1,280 tokens" in text_of(capsys, *rules, "--context", "1")  # two blocks of 128, and an answer
    assert "of 1,120 tokens" in text_of(
        capsys, *rules, "--context", "20", "--config", "config.yaml"
    )  # 4 first ones, 2 of the window


def test_sampling_with_a_seed_repeats_itself(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--mode", "long_context", "--config", "config.yaml", "-p", "x", "-n", "12", "-q", "--temperature", "2"]
    texts = {text_of(capsys, *asked, "--seed", str(seed)) for seed in (1, 1, 2)}
    assert len(texts) == 2


def test_the_plan_shows_the_attention_and_what_a_context_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "rules.yaml", "--model", "smollm2-135m", "--mode", "long_context", "--context", "139264"]) == 0
    out = capsys.readouterr().out
    assert "KDynamicAttention" in out
    assert "memory for a context of 139,264 tokens" in out


def test_a_plan_needs_no_rules_either(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--mode", "long_context", "--context", "1000"]
    assert main([*asked, "--config", "config.yaml"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("(rules of mode long_context) for ")
    assert "KDynamicAttention" in out
    assert main([*asked, "--model", "llama-2-70b", "--device", "cuda:0"]) == 0
    assert "for llama-2-70b" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "which rules?"), (["--mode", "long_context"], "which model?"), (["--mode", "long_context", "--lock"], "--lock writes"),
])  # fmt: skip
def test_a_plan_of_nothing_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "code", "said"), [
    (["rules.yaml", "--context", "100"], 2, "--context goes with --mode long_context"),
    ([], 2, "which rules?"),
    (["--mode", "long_context", "--context", "0"], 2, "from 1 on, not 0"),
    (["--mode", "long_context"], 2, "where are the weights?"),
    (["--mode", "long_context", "--config", "config.yaml", "-p", "x" * 300], 1, "the prompt has 3"),
    (["--mode", "long_context", "--config", "nowhere.yaml"], 1, "can't be read"),
    ([".", "--mode", "long_context", "--weights", "tiny.gguf"], 2, "is a folder of `ktopt apply`"),
])  # fmt: skip
def test_what_can_not_be_is_refused(arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = [] if "-p" in arguments else ["-p", "x"]
    assert main(["run", *arguments, *prompt]) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_that_are_no_text_are_refused(
    errors: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a locale like C, Python's standard input takes any bytes for text."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe\x00abc"), encoding="utf-8", errors=errors))
    for prompt, said in (("-", "--prompt -: standard input isn't UTF-8 text"), ("\udcff", "--prompt isn't UTF-8 text")):
        assert main(["run", "--mode", "long_context", "--config", "config.yaml", "-p", prompt]) == 2
        assert said in capsys.readouterr().err
