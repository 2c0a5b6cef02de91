"""Exit codes: every command against the table that `ktopt --help` prints, and mistakes that are nobody's bug."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ktopt.cli import COMMANDS, EXIT_CODES, main

MODEL = ("-m", "smollm2-135m")
RULES = "version: 1\nrules:\n  - {match: 'class=Linear', replace: KTransformersLinear}\n"
WRONG = "version: 1\nrules:\n  - {match: 'class=Linear', replace: KTransformersLinar}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(RULES)
    Path("wrong.yaml").write_text(WRONG)
    Path("afile").write_text("x")
    Path("w.gguf").write_bytes(b"GGUF")
    return tmp_path


def test_the_table_is_in_the_help(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"{code:<5}{meaning}" in out for code, meaning in EXIT_CODES.items())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_answers_an_unknown_option_with_2(command, capsys):
    assert main([command, "--no-such-option"]) == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", ""],
        ["check", "r.yaml", "-m", "nope"],
        ["check", "r.yaml", "-m", ""],
        ["check", "r.yaml", "-m", "./nope.gguf"],
        ["check", "r.yaml", "--hardware", "nope"],
        ["check", "r.yaml", "--hardware", "0x24GB"],
        ["check", "r.yaml", *MODEL, "--locked"],
        ["check", "r.yaml", "--device", "gpu"],
        ["check", "r.yaml", "--remap", "cuda"],
        ["check", "r.yaml", "--select", "XX9"],
        ["check", "r.yaml", *MODEL, "-w", "nope.gguf"],
        ["plan", "r.yaml"],
        ["plan", "r.yaml", *MODEL, "--device", "cuda:-1"],
        ["plan", "r.yaml", *MODEL, "-o", "."],
        ["plan", "r.yaml", *MODEL, "-o", "afile/x.json"],
        ["plan", "r.yaml", *MODEL, "-w", "x" * 5000],
        ["why", "model.nope", "r.yaml", *MODEL],
        ["diff", "r.yaml", "r.yaml"],
        ["apply", "r.yaml", "-w", "w.gguf", "-o", ""],
        ["apply", "r.yaml", "-w", "w.gguf", "-o", "afile/x"],
        ["apply", "r.yaml", "-w", "w.gguf", "-o", "afile"],
        ["apply", "r.yaml", "-w", "w.gguf", "-o", "/proc/x"],
        ["apply", "r.yaml", "-o", "new"],
        ["run", "r.yaml", "-w", "w.gguf", "-p", "x", "--temperature", "nan"],
        ["run", "r.yaml", "-w", "w.gguf", "-p", "x", "--temperature", "inf"],
        ["run", "r.yaml", "-w", "w.gguf", "-p", "x", "--temperature", "1e-300"],
        ["run", "r.yaml", "-w", "w.gguf", "-p", "x", "--seed", "99999999999999999999999"],
        ["run", "r.yaml", "-w", "w.gguf", "-p", "x", "--seed", "-1"],
        ["run", "r.yaml", "-w", "w.gguf", "-p", "x", "-n", "99999999999999"],
        ["run", "r.yaml", "-w", "w.gguf", "-p", "a\udcff"],
        ["run", ".", "-p", "x", *MODEL],
        ["run", ".", "-p", "x", "--device", "cpu"],
        ["inspect", *MODEL, "deepseek-v3"],
        ["inspect", "nope"],
        ["operators", "nope"],
        ["graph", "r.yaml", *MODEL, "-o", "."],
        ["doctor", "nope"],
        ["explain", "KT999"],
        ["fmt", ""],
        ["init", *MODEL, "-o", "r.yaml"],
        ["init", *MODEL, "-o", "afile/x.yaml"],
        ["init", "-m", "nope"],
        ["migrate", "r.yaml", "-m", "nope"],
        ["schema", "nope"],
        ["completion", "tcsh"],
    ],
)
def test_what_is_asked_wrongly_is_2_and_says_why(arguments, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert "error: " in err
    assert "ktopt itself failed" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "wrong.yaml"],
        ["check", "missing.yaml"],
        ["plan", "wrong.yaml", *MODEL],
        ["plan", ".", *MODEL],
        ["plan", "missing.json"],
        ["why", "lm_head", "wrong.yaml", *MODEL],
        ["graph", "wrong.yaml", *MODEL],
        ["diff", "wrong.yaml", "r.yaml", *MODEL],
        ["apply", "r.yaml", "-w", "w.gguf", "-o", "new"],
        ["run", "r.yaml", "-w", "w.gguf", "-p", "x"],
        ["run", ".", "-p", "x"],
        ["check", "r.yaml", "-m", "afile"],
        ["check", "r.yaml", "--hardware", "."],
        ["check", "r.yaml", "--hardware", "afile"],
        ["inspect", "w.gguf"],
        ["doctor", "."],
        ["migrate", "r.yaml"],
        ["fmt", "missing.yaml"],
    ],
)
def test_what_is_found_wrong_is_1(arguments, capsys):
    assert main(arguments) == 1
    assert "ktopt itself failed" not in capsys.readouterr().err


def test_an_error_of_ktopt_s_own_is_3(monkeypatch, capsys):
    monkeypatch.setattr("ktopt.cli.explain.page", lambda code: 1 / 0)
    assert main(["explain", "KT302"]) == 3
    assert "ktopt itself failed: ZeroDivisionError" in capsys.readouterr().err


def ktopt(*arguments: str, **rest) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "ktopt", *arguments], stderr=subprocess.PIPE, text=True, check=False, timeout=60, **rest
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_told_in_a_line():
    with open("/dev/full", "w") as full:
        ended = ktopt("plan", "r.yaml", *MODEL, stdout=full)
        assert (ended.returncode, ended.stderr) == (1, "error: No space left on device\n")
        assert ktopt("--help", stdout=full).returncode == 1
        ended = subprocess.run([sys.executable, "-P", "-m", "ktopt", "plan", "r.yaml"], stderr=full, check=False)
        assert ended.returncode == 2


def test_a_working_directory_that_is_gone_is_told(tmp_path):
    command = f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -P -m ktopt check r.yaml"
    ended = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "error: the working directory is gone\n")


def test_closed_standard_streams_are_no_bug():
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        command = f"{sys.executable} -P -m ktopt plan r.yaml -m smollm2-135m {closed}"
        assert subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=False).returncode == 0, closed


def test_no_home_and_no_cache_are_no_error(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME")}
    for extra in ({}, {"HOME": "/proc/nowhere"}, {"XDG_CACHE_HOME": str(tmp_path / "afile")}):
        assert ktopt("plan", "r.yaml", *MODEL, stdout=subprocess.DEVNULL, env={**environment, **extra}).returncode == 0


def test_an_interrupt_is_quiet_wherever_it_comes():
    for module in ("argparse", "ktopt.diagnostics", "ktopt.cli.plan", "ktopt.match"):
        code = (
            "import sys\n"
            "class Interrupts:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name == {module!r}: raise KeyboardInterrupt\n"
            "from ktopt.cli import main\n"
            "sys.meta_path.insert(0, Interrupts())\n"
            "sys.exit(main(['plan', 'r.yaml', '-m', 'smollm2-135m']))\n"
        )
        ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", ""), module


def test_a_real_interrupt_ends_it_with_130(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ktopt", "check", "-"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test run in the background ignores it
    )  # fmt: skip
    process.stdin.write("# a comment\n" * 50_000)  # more than a pipe holds: once it is written, ktopt is reading
    process.stdin.flush()
    for _ in range(30):  # Python sees a signal between two reads only when the next one is interrupted
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2)  # its stdin is still open: nothing but the signal has ended it
            break
    assert (process.stdout.read(), process.stderr.read(), process.returncode) == ("", "", 130)
    for stream in (process.stdout, process.stderr):
        stream.close()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()


def test_an_optimized_folder_as_a_model_says_what_it_is(tmp_path, capsys):
    made = tmp_path / "made"
    made.mkdir()
    (made / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "ktopt"}}')
    assert main(["check", "r.yaml", "-m", str(made)]) == 2
    assert "is what `ktopt apply` wrote" in capsys.readouterr().err


def test_several_codes_and_classes_are_explained(capsys):
    assert main(["explain", "KT305", "kt309"]) == 0
    pages = capsys.readouterr().out
    assert pages.startswith("KT305: ")
    assert "\nKT309: " in pages
    assert main(["explain", "KT3"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) > 5
    assert all(line.startswith("KT3") for line in listed)


def test_hardware_files_are_explained_and_doctor_writes_one(capsys):
    assert main(["explain", "hardware"]) == 0
    explained = capsys.readouterr().out
    Path("explained.yaml").write_text(explained.partition("JSON:\n")[2])
    assert main(["plan", "r.yaml", *MODEL, "--hardware", "explained.yaml"]) == 0
    assert "on my workstation" in capsys.readouterr().out
    main(["doctor", "--json"])
    Path("here.json").write_text(capsys.readouterr().out)
    from ktopt.hardware import detect, load_hardware

    assert load_hardware("here.json") == detect()
