"""Completion scripts, asked by the shells that they are for."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ktopt.cli import COMMANDS, main
from ktopt.cli.completion import SHELLS, commands
from ktopt.codes import CODES
from ktopt.models.shipped import known_models
from ktopt.render import FORMATS


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"there is no {shell} here")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ktopt.bash, ktopt.zsh and ktopt.fish, and a file "my rules.yaml"."""
    from ktopt.cli import shells

    folder = tmp_path_factory.mktemp("completion")
    for shell, write in (("bash", shells.bash), ("zsh", shells.zsh), ("fish", shells.fish)):
        (folder / f"ktopt.{shell}").write_text(write(commands()))
    (folder / "my rules.yaml").write_text("")
    return folder


def ask_bash(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words of a command line."""
    line = " ".join(f"'{word}'" for word in words)
    script = f'source ktopt.bash; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _ktopt; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "--norc", "-c", script], cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr == ""
    return [row for row in done.stdout.split("\n") if row]


def ask_fish(folder: Path, line: str) -> list[str]:
    script = f"source ktopt.fish; complete -C '{line}'"
    done = subprocess.run(["fish", "--no-config", "-c", script], cwd=folder, capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr == ""
    return [row.split("\t")[0] for row in done.stdout.splitlines()]


@needs("bash")
class TestBash:
    def test_commands(self, scripts: Path) -> None:
        assert set(COMMANDS) <= set(ask_bash(scripts, "ktopt", ""))
        assert ask_bash(scripts, "ktopt", "expl") == ["explain"]

    def test_options_of_the_command(self, scripts: Path) -> None:
        assert ask_bash(scripts, "ktopt", "check", "--fix") == ["--fix"]
        assert "--prompt" in ask_bash(scripts, "ktopt", "run", "--")
        assert "--prompt" not in ask_bash(scripts, "ktopt", "check", "--")

    def test_values(self, scripts: Path) -> None:
        assert ask_bash(scripts, "ktopt", "check", "a.yaml", "--format", "") == list(FORMATS)
        assert ask_bash(scripts, "ktopt", "check", "--format", "=", "js") == ["json", "jsonl"]
        assert ask_bash(scripts, "ktopt", "check", "--format", "=") == list(FORMATS)
        assert set(ask_bash(scripts, "ktopt", "check", "-m", "")) >= set(known_models())
        assert ask_bash(scripts, "ktopt", "explain", "KT11") == [code for code in CODES if code.startswith("KT11")]
        assert ask_bash(scripts, "ktopt", "completion", "") == list(SHELLS)

    def test_files_with_blanks_where_a_path_may_stand(self, scripts: Path) -> None:
        assert ask_bash(scripts, "ktopt", "check", "my") == ["my rules.yaml"]
        assert ask_bash(scripts, "ktopt", "explain", "my") == []


@needs("fish")
class TestFish:
    def test_commands_options_and_values(self, scripts: Path) -> None:
        assert set(ask_fish(scripts, "ktopt ")) == set(COMMANDS)
        assert ask_fish(scripts, "ktopt check --fi") == ["--fix"]
        assert sorted(ask_fish(scripts, "ktopt check a.yaml --format ")) == sorted(FORMATS)
        assert set(ask_fish(scripts, "ktopt check --model ")) >= set(known_models())
        assert sorted(ask_fish(scripts, "ktopt completion ")) == sorted(SHELLS)

    def test_files_where_a_path_may_stand(self, scripts: Path) -> None:
        assert ask_fish(scripts, "ktopt check my") == ["my rules.yaml"]
        assert ask_fish(scripts, "ktopt explain my") == []


class Zsh:
    """An interactive zsh on a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "TERM": "dumb", "ZDOTDIR": str(folder), "PS1": "> ", "COLUMNS": "200"}
        self.pid, self.terminal = pty.fork()
        if not self.pid:
            os.chdir(folder)
            os.execvpe("zsh", ["zsh", "-f", "-i"], environment)
        self.type("autoload -Uz compinit; compinit -D -u; source ./ktopt.zsh; zstyle ':completion:*' list-prompt ''; LISTMAX=999\n")
        self.type("echo it is re''ady\n")
        self.read_until("it is ready")

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def read_until(self, wanted: str, limit_s: float = 15) -> str:
        """What appears on the terminal, up to the text `wanted`."""
        seen, end = "", time.monotonic() + limit_s
        while wanted not in seen and time.monotonic() < end:
            if select.select([self.terminal], [], [], 0.2)[0]:
                seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(self.terminal, 65536).decode(errors="replace"))
        assert wanted in seen, seen
        return seen

    def close(self) -> None:
        os.close(self.terminal)
        os.waitpid(self.pid, 0)


@pytest.fixture
def zsh(scripts: Path) -> Iterator[Zsh]:
    shell = Zsh(scripts)
    yield shell
    shell.close()


@needs("zsh")
class TestZsh:
    def test_the_one_command_that_begins_so_is_completed(self, zsh: Zsh) -> None:
        zsh.type("ktopt expl\t")
        zsh.read_until("explain ")

    def test_values_are_listed(self, zsh: Zsh) -> None:
        zsh.type("ktopt completion \t\t")
        seen = zsh.read_until("zsh")
        assert "bash" in seen
        assert "fish" in seen

    def test_an_option_and_its_value_are_completed(self, zsh: Zsh) -> None:
        zsh.type("ktopt check --for\t con\t")
        zsh.read_until("--format")
        zsh.type("\x15ktopt check --format con\t")
        zsh.read_until("concise")

    def test_models_and_files_are_offered_where_either_may_stand(self, zsh: Zsh) -> None:
        zsh.type("ktopt check --model smoll\t")
        zsh.read_until("smollm2-135m")
        zsh.type("\x15ktopt check my\t")
        zsh.read_until("my\\ rules.yaml")


def test_every_option_of_every_command_is_in_each_script(scripts: Path) -> None:
    texts = {shell: (scripts / f"ktopt.{shell}").read_text() for shell in SHELLS}
    for command in commands():
        for argument in command.arguments:
            for name in argument.names:
                assert name in texts["bash"]
                assert f"{name}[" in texts["zsh"]
                assert re.search(rf" -[ls] {re.escape(name.lstrip('-'))}\b", texts["fish"])


def test_an_unknown_shell_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
