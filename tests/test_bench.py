"""`ktopt bench`: its loop makes generate's tokens, repeats start from the same cache, and its report says what it measured."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from apply_fixtures import PROMPT, greedy, make_model
from gguf_fixtures import make_gguf, tiny_model

from ktopt.cli import main
from ktopt.diagnostics import UsageError
from ktopt.runtime import foreign_load
from ktopt.runtime.benchmark import baseline_bytes, measure
from ktopt.runtime.decoding import Decoder, Prefix, cache_bytes, only_likeliest
from ktopt.runtime.foreign_load import ForeignLoad
from ktopt.runtime.memory import peak_own_bytes, peak_resident_bytes

RULES = """\
version: 1
dtype: float32
rules:
  - match: "class=Linear"
    replace: KTransformersLinear
    kwargs: {generate_op: KLinearCPUInfer}
"""


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3_text"])
def test_the_loop_makes_the_tokens_of_generate(kind: str) -> None:
    model = make_model(kind)
    model.generation_config.eos_token_id = None
    assert list(Decoder(model).tokens(PROMPT, 12)) == greedy(model)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_every_continuation_starts_from_the_same_cache(kind: str) -> None:
    """Gemma's layers look back over 64 tokens and forget what lies further back; Qwen3-Next's keep a running state."""
    decoder = Decoder(tiny_model(kind))
    ids = torch.arange(70)[None] % 320
    prefix = Prefix(decoder, ids)
    again = []
    for _ in range(3):
        cache, token, made = prefix.cache(), torch.tensor([[7]]), []
        for _ in range(6):
            token = decoder.step(token, cache)
            made.append(int(token))
        again.append(made)
    assert again[0] == again[1] == again[2]
    whole = torch.cat([ids, torch.tensor([[7]])], dim=1)
    assert again[0] == list(decoder.tokens(whole, 6))


def test_rows_say_what_was_measured() -> None:
    rows = list(measure(make_model(), [16, 40], 5, [0, 32], repeats=4))
    assert [(row.phase, row.n, row.depth) for row in rows] == [
        ("prefill", 16, 0), ("prefill", 40, 0), ("decode", 5, 0), ("decode", 5, 32),
    ]  # fmt: skip
    for row in rows:
        assert len(row.repeats) == 4
        assert row.tokens_per_s == statistics.median(row.repeats)
        assert (row.low, row.high) == (min(row.repeats), max(row.repeats))
        # 3 layers, keys and values of 2 heads of 16 float32 numbers a token
        assert row.cache_bytes == (row.n + row.depth) * 3 * 2 * 2 * 16 * 4


def test_more_tokens_than_the_context_are_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"516 tokens are asked for, and the model's context is 512"):
        measure(make_model(), [8], 16, [500], repeats=1)


@pytest.mark.parametrize(
    ("options", "likeliest"),
    [
        ({"do_sample": False}, True),
        ({"do_sample": False, "temperature": None, "top_k": None, "eos_token_id": [3, 4], "max_new_tokens": 8}, True),
        ({"do_sample": True}, False),
        ({"do_sample": False, "repetition_penalty": 1.3}, False),
        ({"do_sample": False, "num_beams": 2}, False),
        ({"do_sample": False, "min_new_tokens": 4}, False),
    ],
)
def test_only_plain_greedy_generation_takes_the_short_loop(options: dict[str, object], likeliest: bool) -> None:
    assert only_likeliest(make_model(), options) is likeliest


def test_a_penalty_in_the_generation_config_counts_too() -> None:
    model = make_model()
    model.generation_config.repetition_penalty = 1.2
    assert not only_likeliest(model, {"do_sample": False})


def test_the_cache_counts_its_tensors_once() -> None:
    decoder = Decoder(make_model())
    cache = decoder.new_cache()
    decoder.step(PROMPT, cache)
    assert cache_bytes(cache) == sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux says how busy all cores are")
def test_a_busy_process_is_foreign_load() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            time.sleep(0.1)  # until it spins
            load = ForeignLoad()
            time.sleep(0.5)
            foreign = load.cores()
        finally:
            other.kill()
    assert foreign is not None
    assert foreign > 0.2


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="only Linux says how busy all cores are")
def test_own_work_is_no_foreign_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of all cores is set to that of this process, so that nobody else works."""
    monkeypatch.setattr(foreign_load, "_busy_s", time.process_time)
    load = ForeignLoad()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    assert load.cores() == pytest.approx(0, abs=0.1)


def test_the_baseline_is_a_process_of_its_own() -> None:
    baseline = baseline_bytes()
    assert 50 << 20 < baseline < 4 << 30
    assert peak_own_bytes() <= peak_resident_bytes() + (1 << 20)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("bench")
    (folder / "rules.yaml").write_text(RULES)
    return str(folder / "rules.yaml"), str(make_gguf(folder / "tiny.gguf", tiny_model("llama"), "Q8_0"))


def test_the_command_writes_its_results(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "2000")
    rules, weights = files
    threads = torch.get_num_threads()
    out = tmp_path / "out.json"
    options = ["-p", "8,24", "-n", "4", "-d", "0,16", "-t", str(threads), "-r", "2", "--json", str(out)]
    assert main(["bench", rules, "--weights", weights, *options]) == 0
    found = json.loads(out.read_text())
    assert [(row["phase"], row["n"], row["depth"]) for row in found["results"]] == [
        ("prefill", 8, 0), ("prefill", 24, 0), ("decode", 4, 0), ("decode", 4, 16),
    ]  # fmt: skip
    assert all(row["tokens_per_s"] > 0 and len(row["repeats"]) == 2 for row in found["results"])
    assert (found["threads"], found["rules"], found["weights"]) == (threads, rules, weights)
    assert found["weights_bytes"] == Path(weights).stat().st_size
    assert found["versions"]["torch"] == torch.__version__.partition("+")[0] or found["versions"]["torch"] == torch.__version__
    assert found["peak_over_baseline_bytes"] == found["peak_bytes"] - found["baseline_bytes"]
    table = capsys.readouterr().out
    assert "prefill" in table
    assert "multiplied two small matrices" in table


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-p", "eight"], "--prefill eight: whole numbers, with commas between them"),
        (["-p", "8,,9"], "--prefill 8,,9: whole numbers"),
        (["-n", "4,5"], "--decode 4,5: one number"),
        (["-d", "-1"], "--depth"),
        (["-r", "0"], "--repeats 0: from 1 to"),
        (["-t", "0"], "--threads 0: a whole number from 1 to"),
        (["-p", "4096"], "the model's context is 512"),
    ],
)
def test_what_cant_be_measured_is_a_usage_error(
    files: tuple[str, str], options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rules, weights = files
    assert main(["bench", rules, "--weights", weights, *options]) == 2
    assert said in capsys.readouterr().err
