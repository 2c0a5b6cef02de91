"""`ktopt rules`: which shipped sets suit a model and a machine, and why the others don't."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_fixtures import smollm2_file

from ktopt.choosing.fits import Asked, fits_of, longest_context, room_of
from ktopt.choosing.sets import ALSO_CALLED, ShippedSet, first_sentence, is_of, named, shipped_rules, shipped_sets
from ktopt.cli import main
from ktopt.hardware import load_hardware
from ktopt.models.shipped import known_models
from ktopt.trees import load_tree
from ktopt.working_memory import Reckoning, over_limits


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["rules", *arguments])
    return code, capsys.readouterr().out


def ask_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    _, out = ask(capsys, *arguments, "--format", "json")
    return {row["set"]: row for row in json.loads(out)}


def test_the_fastest_set_that_fits_comes_first_and_the_others_say_what_they_lack(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = ask(capsys, "--model", "qwen3-30b-a3b", "--hardware", "1x24GB+64GB")
    assert code == 0
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("suits"))
    assert [line.split()[0] for line in lines[first + 1 : first + 3]] == ["qwen3-30b-a3b/24gb", "qwen3-30b-a3b/cpu"]
    assert "qwen3-235b-a22b/24gb, qwen3-235b-a22b/2x24gb, qwen3-235b-a22b/8x80gb: for models of other sizes" in out
    assert "taken for granted: main memory reads 50 GB/s" in out
    (command,) = (line.split()[1:] for line in lines if line.startswith("  ktopt plan"))
    assert command[:2] == ["plan", "qwen3-30b-a3b/24gb"]
    assert main(command) == 0
    assert f"{len(shipped_sets()) - 5} other sets: for other architectures" in out


def test_too_little_main_memory_is_said_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = ask(capsys, "--model", "deepseek-v3", "--hardware", "1x24GB+24GB")
    assert code == 1
    assert "none suits" in out
    assert "ktopt init --model deepseek-v3 --hardware 1x24GB+24GB" in out
    rows = ask_json(capsys, "--model", "deepseek-v3", "--hardware", "1x24GB+24GB")
    held = next(m for m in rows["deepseek-v3/24gb"]["memory"] if m["device"] == "cpu")
    assert 380e9 < held["weight_bytes"] < 410e9
    assert held["room_bytes"] == int(24 * (1 << 30) * 0.95)
    assert rows["deepseek-v3/24gb"]["reason"].startswith("main memory would hold 39")
    assert "room for 24.5 GB" in rows["deepseek-v3/24gb"]["reason"]


def test_a_device_that_the_machine_lacks_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    rows = ask_json(capsys, "--model", "llama-3.1-70b", "--hardware", "1x24GB+256GB")
    assert rows["llama-3.1-70b/2x24gb"]["reason"] == "it needs 2 cards, and 1x24GB+256GB has 1"
    assert [name for name, row in rows.items() if row["suits"]] == ["llama-3.1-70b/24gb", "llama-3.1-70b/cpu"]


def test_a_longer_context_can_make_a_set_unfit(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--model", "llama-3.1-8b", "--hardware", "1x24GB+64GB")
    short, long = ask_json(capsys, *machine), ask_json(capsys, *machine, "--context", "131072")
    assert short["llama-3.1-8b/24gb"]["suits"]
    assert not long["llama-3.1-8b/24gb"]["suits"]
    assert "cuda:0 would hold" in long["llama-3.1-8b/24gb"]["reason"]


def test_the_longest_context_is_the_last_that_fits() -> None:
    (found,) = (each for each in fits_of(load_tree("llama-3.1-8b"), Asked()) if each.name == "llama-3.1-8b/24gb")
    assert found.plan is not None
    reckoning, room = Reckoning(found.plan), dict(found.room)
    assert not over_limits(reckoning.memory(found.longest, limits=room), room)
    assert over_limits(reckoning.memory(found.longest + 1024, limits=room), room)
    assert longest_context(reckoning, {}) == 131072


def test_a_machine_alone_lists_the_sets_of_all_models_that_fit_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = ask(capsys, "--hardware", "cpu+8GB")
    assert code == 0
    named = {line.split()[0] for line in out.splitlines() if "/cpu " in line or "/reference " in line}
    assert {"smollm2/cpu", "smollm2/reference", "gemma3/cpu", "llama-3.1-8b/cpu"} <= named
    assert not {"llama-3.1-70b/cpu", "deepseek-v3/cpu", "mixtral/cpu"} & named
    assert max(map(len, out.splitlines())) <= 100


def test_weights_are_model_and_storage(capsys: pytest.CaptureFixture[str]) -> None:
    file = smollm2_file()
    rows = ask_json(capsys, "--weights", str(file), "--hardware", "cpu+2GB")
    assert rows["smollm2/cpu"]["suits"]
    assert rows["smollm2/cpu"]["storage"] is None
    (held,) = rows["smollm2/cpu"]["memory"]
    assert held["weight_bytes"] == pytest.approx(file.stat().st_size, rel=0.05)


def test_a_file_s_name_tells_which_of_two_alike_sets_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(smollm2_file())
    code, out = ask(capsys, "--weights", file, "--hardware", "cpu+2GB")
    assert code == 0
    assert out.index("smollm2/cpu ") < out.index("llama/cpu ")
    assert f"ktopt plan smollm2/cpu --weights {file} --hardware" in out


def test_show_prints_a_set_s_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = ask(capsys, "--show", "kimi-k2/cpu")
    assert code == 0
    assert out == shipped_rules()["deepseek-v3/cpu"].read_text(encoding="utf-8")
    assert main(["rules", "--show", "kimi-k3/cpu"]) == 2
    assert "did you mean kimi-k2/cpu?" in capsys.readouterr().err


def test_a_name_that_no_set_of_a_model_has_is_answered_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mixtral/8x80gb", "--model", "mixtral-8x7b"]) == 2
    assert "there are mixtral/24gb, mixtral/2x24gb, mixtral/cpu" in capsys.readouterr().err


def test_every_set_says_what_it_is_for_by_its_name_and_first_sentence() -> None:
    for each in shipped_sets():
        assert each.name.partition("/")[2] == each.path.stem
        assert each.summary.endswith(".")
        assert len(each.summary) < 160
        load_hardware(each.machine)
    assert ShippedSet("a/8x80gb", Path()).machine == "8x80GB"
    assert ShippedSet("a/24gb", Path()).cards == (1, 24)
    assert first_sentence("# Of a model,\n# all of it. And more.\n#\n# Other.\nversion: 1\n") == "Of a model, all of it."


def test_other_names_are_of_known_models_and_lead_to_sets() -> None:
    for name, other in ALSO_CALLED.items():
        assert named(name) == named(other)
        assert any(is_of(name, model) for model in known_models())


def test_room_is_what_the_driver_and_the_system_leave() -> None:
    room = room_of(load_hardware("2x24GB+64GB"))
    assert room == {"cuda:0": (24 << 30) - (768 << 20), "cuda:1": (24 << 30) - (768 << 20), "cpu": int((64 << 30) * 0.95)}
    assert room_of(load_hardware("1x24GB")).keys() == {"cuda:0"}


def test_it_imports_no_torch() -> None:
    code = (
        "import sys, ktopt.cli; ktopt.cli.main(['rules', '--model', 'smollm2-135m']); "
        "assert not {'torch', 'transformers', 'scipy', 'numpy'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
