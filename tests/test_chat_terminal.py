"""`ktopt chat` on a terminal: what is typed, what is drawn, what Ctrl-C does. The model is a stand-in (chat_program.py)."""

from __future__ import annotations

import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from terminals import Terminal

TESTS = Path(__file__).parent
Start = Callable[..., Terminal]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Terminal] = []

    def begin(*arguments: str, columns: int = 80, rows: int = 24, **environment: str) -> Terminal:
        environment = {"XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(TESTS), "HOME": str(tmp_path), **environment}
        made = Terminal([sys.executable, "-P", str(TESTS / "chat_program.py"), *arguments], columns, rows, **environment)
        running.append(made)
        made.wait_for("ready")
        made.wait_for(">")
        return made

    yield begin
    for terminal in running:
        terminal.close()


def answered(terminal: Terminal, count: int) -> None:
    """Wait for so many answers, and for the prompt after the last."""
    terminal.read(lambda: terminal.flat.count("memory 5.0 MB") >= count and terminal.lines_with_text[-1].startswith((">", "(")))


def test_messages_of_several_lines_are_typed_and_pasted(start: Start) -> None:
    terminal = start()
    terminal.type("one\x1b\rtwo\\\rthree\r")
    terminal.wait_for(r"'one\ntwo\nthree'")
    answered(terminal, 1)
    terminal.type("\x1b[200~four\r\nfive\n\x1b[201~six\r")
    terminal.wait_for(r"'four\nfive\nsix'")


def test_earlier_messages_come_back_with_arrow_keys_and_search_and_in_the_next_chat(start: Start, tmp_path: Path) -> None:
    terminal = start()
    for number, text in enumerate(("first message", "another one"), 1):
        terminal.type(f"{text}\r")
        answered(terminal, number)
    terminal.type("\x1b[A\x1b[A\r")
    answered(terminal, 3)
    assert terminal.shown.count("'first message'") == 2
    terminal.type("/quit\r")
    assert terminal.end() == 0
    assert (tmp_path / "ktopt" / "chat_history").stat().st_mode & 0o777 == 0o600
    again = start()
    again.type("\x12another")
    again.wait_for("another one")
    again.type("\r")
    again.type("\r")
    again.wait_for("'another one'")


def test_ctrl_c_stops_the_answer_and_not_the_program(start: Start) -> None:
    terminal = start()
    terminal.type("long\r")
    terminal.wait_for("word40")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    answered(terminal, 1)
    terminal.type("still there?\r")
    terminal.wait_for("'still there?'")
    answered(terminal, 2)
    terminal.type("abandoned\x03\x03")
    terminal.wait_for("Ctrl-C again leaves")
    terminal.type("\x03")
    terminal.wait_for("left")
    assert terminal.end() == 0
    assert "'abandoned'" not in terminal.shown


def test_ctrl_d_leaves_and_the_terminal_echoes_again(start: Start) -> None:
    terminal = start()
    terminal.type("\x04")
    terminal.wait_for("left")
    assert terminal.end() == 0
    assert terminal.raw.count(b"\x1b[?25h") >= terminal.raw.count(b"\x1b[?25l")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("answering", [True, False])
def test_a_signal_to_end_leaves_the_terminal_as_it_was(start: Start, answering: bool, number: int) -> None:
    terminal = start()
    if answering:
        terminal.type("long\r")
        terminal.wait_for("word40")
    os.kill(terminal.pid, number)
    assert terminal.end() == 128 + number
    assert termios.tcgetattr(terminal._terminal)[3] & termios.ECHO
    assert terminal.raw.rfind(b"\x1b[?25h") >= terminal.raw.rfind(b"\x1b[?25l")
    assert b"Traceback" not in terminal.raw


def test_keys_that_are_pressed_during_an_answer_wait_for_the_next_message(start: Start) -> None:
    terminal = start()
    terminal.type("300\r")
    terminal.wait_for("line 20")
    terminal.type("early")
    answered(terminal, 1)
    terminal.wait_for("> early")
    assert terminal.shown.count("early") == 1
    terminal.type("\r")
    terminal.wait_for("'early'")


def test_a_long_answer_scrolls_and_is_whole_with_nothing_twice(start: Start) -> None:
    terminal = start(columns=50, rows=10)
    terminal.type("120\r")
    answered(terminal, 1)
    assert [line for line in terminal.lines if line.startswith("line ")] == [f"line {n}" for n in range(120)]


def test_a_terminal_that_changes_its_size_gets_an_answer_whole(start: Start) -> None:
    terminal = start(columns=70, rows=12)
    terminal.type("long\r")
    terminal.wait_for("word130")
    terminal.resize(100, 20)
    terminal.wait_for("word300")
    terminal.type("\x03")
    terminal.wait_for("(stopped)")
    words = [word for line in terminal.lines for word in line.split() if word.startswith("word")]
    last = max(int(word[4:]) for word in words)
    assert not [n for n in range(last) if f"word{n}" not in words], terminal.shown


def test_narrow_columns_do(start: Start) -> None:
    terminal = start(columns=24, rows=12)
    terminal.type("20\r")
    answered(terminal, 1)
    assert [line for line in terminal.lines if line.startswith("line ")] == [f"line {n}" for n in range(20)]


def test_control_sequences_of_an_answer_do_not_reach_the_terminal_and_markup_means_nothing(start: Start) -> None:
    terminal = start()
    before = len(terminal.raw)
    terminal.type("escape\r")
    answered(terminal, 1)
    assert "a[31mred]0;title [bold]b[/bold] 1m c" in terminal.shown
    new = terminal.raw[before:]
    assert b"\x1b]0;" not in new
    assert b"\x07" not in new
    assert b"\xc2\x9b" not in new


def test_no_color_has_no_colours(start: Start) -> None:
    terminal = start(NO_COLOR="1")
    terminal.type("hello\r")
    answered(terminal, 1)
    assert "`" not in terminal.shown.partition("You said")[2].partition("\n")[0]
    assert not [code for code in (b"\x1b[3", b"\x1b[9", b";3", b"\x1b[0;3") for _ in [0] if code + b"6m" in terminal.raw]


def test_a_dumb_terminal_gets_the_text_as_it_is(start: Start) -> None:
    terminal = start(TERM="dumb")
    terminal.type("hello\r")
    terminal.wait_for("You said: `'hello'`")
    terminal.wait_for("memory 5.0 MB")
    terminal.type("/quit\r")
    terminal.wait_for("left")


def test_what_an_engine_fails_at_is_said_and_the_message_comes_back(start: Start) -> None:
    terminal = start()
    terminal.type("fail\r")
    terminal.wait_for("error: the answer failed: it broke")
    terminal.read(lambda: terminal.lines_with_text[-1] == "> fail")


def test_a_full_context_asks_before_turns_are_forgotten(start: Start, tmp_path: Path) -> None:
    terminal = start("300")
    for number in range(4):
        terminal.type(f"message number {number} which takes some room\r")
        terminal.read(lambda number=number: terminal.flat.count("memory 5.0") > number or "[y/N]" in terminal.screen)
        if "[y/N]" in terminal.screen:
            break
    terminal.wait_for("the context holds 300")
    terminal.type("n\r")
    terminal.wait_for("lets the model forget the oldest")
    terminal.read(lambda: terminal.lines_with_text[-1].startswith("> message number"))
    terminal.type("\r")
    terminal.read(lambda: terminal.shown.count("[y/N]") == 2)
    terminal.type("y\r")
    answered(terminal, number + 1)
    terminal.type(f"/save {tmp_path}/talk.md\r")
    terminal.wait_for(f"{number + 1} turns")
    assert (tmp_path / "talk.md").read_text().count("## User") == number + 1


def test_commands_and_paths_are_completed(start: Start, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("some notes")
    terminal = start()
    terminal.type("/fi\t")
    terminal.wait_for("> /file")
    terminal.type(f" {tmp_path}/no\t")
    terminal.wait_for("notes.txt")
    terminal.type("\r")
    terminal.wait_for("10 tokens, goes with the next message")
    terminal.wait_for("(1 file) >")


def test_standard_output_that_is_no_terminal_gets_the_answers_alone(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    program = f"{sys.executable} -P {TESTS}/chat_program.py > {out}"
    environment = {"XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(TESTS), "PATH": os.environ["PATH"]}
    terminal = Terminal(["/bin/sh", "-c", program], **environment)
    try:
        terminal.wait_for(">")
        terminal.type("hello\r")
        terminal.wait_for("memory 5.0 MB")
        terminal.type("\x04")
        assert terminal.end() == 0
    finally:
        terminal.close()
    assert out.read_text() == "ready\nYou said: `'hello'`\nleft\n"
