"""A chat without a terminal: what the model is asked, what stays when something goes wrong, commands, files, what is saved."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_program import CharacterTokenizer, FakeEngine, chat_over, words

from ktopt.chat.attachments import Attachment, read_text, with_files
from ktopt.chat.chatting import Chat, Stopped
from ktopt.chat.commands import COMMANDS, Leave, run_command
from ktopt.chat.conversation import Template, Turn
from ktopt.chat.history import MOST_BYTES, open_history
from ktopt.chat.safety import shown, typed
from ktopt.chat.screen import Screen
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.engine.events import Timings, Usage
from ktopt.engine.request import Sampling
from ktopt.render.style import Style


@pytest.fixture
def chat() -> Chat:
    return chat_over(FakeEngine(words), Screen(Style()))


def asked(chat: Chat, number: int = -1) -> str:
    """The prompt of a request."""
    engine: Any = chat.engine
    return CharacterTokenizer().decode(engine.requests[number].prompt_ids)


def test_each_message_goes_with_all_that_was_said(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.conversation.system = "be kind"
    chat.say("one")
    chat.say("two")
    assert asked(chat) == ("<system>be kind</><user>one</><assistant>You said: `'one'`</><user>two</><assistant>")
    captured = capsys.readouterr()
    assert captured.out == "You said: `'one'`\nYou said: `'two'`\n"
    assert "context" in captured.err
    assert "cached" in captured.err


def test_undo_gives_the_message_back_and_the_model_no_longer_sees_it(chat: Chat) -> None:
    chat.say("one")
    chat.say("tow")
    assert run_command(chat, "/undo") == "tow"
    chat.say("two")
    assert "tow" not in asked(chat)
    assert "<user>one</>" in asked(chat)


def test_retry_asks_the_same_with_another_seed_and_keeps_the_answer_where_it_fails(chat: Chat) -> None:
    chat.sampling = Sampling(seed=7)
    chat.say("one")
    run_command(chat, "/retry")
    engine: Any = chat.engine
    first, second = engine.requests
    assert first.prompt_ids == second.prompt_ids
    assert (first.sampling.seed, second.sampling.seed) == (7, 8)
    assert len(chat.conversation.turns) == 1
    engine.text_of = lambda _: iter(["FAIL"])
    with pytest.raises(KtoptError, match="it broke"):
        run_command(chat, "/retry")
    assert [turn.answer for turn in chat.conversation.turns] == ["You said: `'one'`"]


def test_an_answer_that_is_stopped_before_it_began_leaves_no_turn(chat: Chat) -> None:
    def stopped_at_once(_: str) -> Iterator[str]:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        yield "never"

    engine: Any = chat.engine
    engine.text_of = stopped_at_once
    with pytest.raises(Stopped, match="isn't part of the conversation"):
        chat.say("hello")
    assert not chat.conversation.turns


def test_system_is_set_shown_and_taken_away(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    run_command(chat, "/system speak French")
    chat.say("one")
    assert asked(chat).startswith("<system>speak French</>")
    capsys.readouterr()
    run_command(chat, "/system")
    assert capsys.readouterr().err == "speak French\n"
    run_command(chat, "/system -")
    chat.say("two")
    assert "French" not in asked(chat)


def test_a_template_that_takes_no_system_message_refuses_it_at_once(chat: Chat) -> None:
    from jinja2 import TemplateError

    class Strict(CharacterTokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
            if messages[0]["role"] == "system":
                raise TemplateError("System role not supported")
            return super().apply_chat_template(messages)

    chat.template = Template(Strict())
    with pytest.raises(KtoptError, match="System role not supported"):
        run_command(chat, "/system x")
    chat.say("hello")


def test_without_a_template_only_raw_works_and_continues_the_text() -> None:
    tokenizer: Any = CharacterTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match=r"no chat template.*--raw"):
        Template(tokenizer)
    turn = Turn("Once", " upon", "stop", Usage(4, 0, 1), Timings(0, 1, 1))
    assert tokenizer.decode(Template(tokenizer, raw=True).ids(None, [turn], " a time")) == "Once upon a time"


def test_answers_begin_with_a_thought_where_that_is_forced(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    engine: Any = chat.engine
    chat.template = Template(engine.tokenizer, opening="<think>\n")
    engine.text_of = lambda _: iter(["so.</think>", "ok"])
    chat.say("one")
    assert asked(chat) == "<user>one</><assistant><think>\n"
    assert [turn.answer for turn in chat.conversation.turns] == ["<think>\nso.</think>ok"]
    assert capsys.readouterr().out.startswith("<think>")


@pytest.mark.parametrize("ending", ["<think>", "<think>\n"])
def test_a_template_that_begins_with_a_thought_itself_has_no_second_one(ending: str) -> None:
    class Thinker(CharacterTokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
            made = super().apply_chat_template(messages)["input_ids"]
            return {"input_ids": [*made, *self(ending, add_special_tokens=False)["input_ids"]]}

    tokenizer: Any = Thinker()
    assert tokenizer.decode(Template(tokenizer, opening="<think>\n").ids(None, [], "one")) == "<user>one</><assistant><think>\n"


def test_files_go_with_the_next_message_and_stay_where_it_fails(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "a b.md").write_text("```\ncode\n```\n")
    run_command(chat, f"/file '{tmp_path}/a b.md'")
    engine: Any = chat.engine
    engine.text_of = lambda _: iter(["FAIL"])
    with pytest.raises(KtoptError):
        chat.say("what is it?")
    assert len(chat.files) == 1
    engine.text_of = words
    chat.say("what is it?")
    assert f"{tmp_path}/a b.md:\n\n````\n```\ncode\n```\n````\n\nwhat is it?" in asked(chat)
    chat.say("and?")
    assert asked(chat).endswith("<user>and?</><assistant>")


def test_files_that_can_not_be_read_say_why(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"ab\0c")
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "huge").write_bytes(b"x" * (4 << 20) + b"y")
    os.mkfifo(tmp_path / "pipe")
    for name, said in {
        "binary": "byte 2 is 0",
        "latin": "byte 3 is 0xe9",
        "empty": "nothing in it",
        "huge": "4,194,305 bytes, and a message may have 4,194,304",
        "pipe": "a device or a pipe",
        "missing": "No such file",
        "~nobody.of.this.name/x": "No such file",
        "": "Is a directory",
    }.items():
        with pytest.raises(UsageError, match=said):
            read_text(name if name[:1] == "~" else str(tmp_path / name))
    (tmp_path / "windows").write_bytes("\ufeffa\r\nb".encode())
    assert read_text(str(tmp_path / "windows")) == "a\nb"


def test_a_file_of_more_tokens_than_the_context_is_refused_with_both_numbers(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("x" * 3_000_000)
    counted: list[int] = []
    chat.template._tokenizer = lambda text, **_: counted.append(len(text)) or {"input_ids": [0] * len(text)}
    with pytest.raises(KtoptError, match=r"at least [0-9,]+ tokens, and the context holds 100,000"):
        run_command(chat, f"/file {tmp_path}/long.txt")
    assert not chat.files
    assert sum(counted) < 200_000, "the rest isn't looked at"


def test_a_fence_is_longer_than_those_in_the_file() -> None:
    assert with_files("q", [Attachment("n", "a ```` b")]) == "n:\n\n`````\na ```` b\n`````\n\nq"


def test_saved_as_json_and_as_markdown_and_never_over_another_file_unasked(chat: Chat, tmp_path: Path) -> None:
    chat.conversation.system = "be kind"
    chat.say("one")
    chat.say("escape")
    run_command(chat, f"/save {tmp_path}/talk.json")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [(m["role"], m["content"]) for m in saved["messages"][:3]] == [
        ("system", "be kind"), ("user", "one"), ("assistant", "You said: `'one'`"),
    ]  # fmt: skip
    assert saved["messages"][2]["usage"]["completion_tokens"] == 2
    with pytest.raises(KtoptError, match=r"talk\.json exists"):
        run_command(chat, f"/save {tmp_path}/talk.json")
    questions: list[str] = []
    chat.confirm = lambda question: bool(questions.append(question)) or True
    chat.say("three")
    run_command(chat, f"/save {tmp_path}/talk.json")
    assert questions
    assert len(json.loads((tmp_path / "talk.json").read_text())["messages"]) == 7
    run_command(chat, f"/save {tmp_path}/talk.md")
    text = (tmp_path / "talk.md").read_text()
    assert "## User\n\none\n\n## Assistant\n\nYou said: `'one'`\n" in text
    assert "\x1b" not in text
    for path, said in {"talk.txt": "must end in .md or .json", "nowhere/talk.md": "can't be written"}.items():
        with pytest.raises(UsageError, match=said):
            run_command(chat, f"/save {tmp_path}/{path}")
    with pytest.raises(UsageError, match="can't be written"):
        run_command(chat, "/save ~nobody.of.this.name/talk.md")


def test_a_full_context_is_refused_with_numbers_and_what_to_do_and_nothing_is_lost() -> None:
    chat = chat_over(FakeEngine(words, 300), Screen(Style()))
    chat.say("a message of some length, for the room it takes")
    chat.say("a second one, as long as that before it, or nearly")
    with pytest.raises(
        KtoptError, match=r"has \d+ tokens, and the context holds 300.*/drop 1 lets the model forget the oldest 1 turn of 2"
    ):
        chat.say("a third one, which is too much for the context now")
    assert len(chat.conversation.seen) == 2
    run_command(chat, "/drop")
    chat.say("a third one, which is too much for the context now")
    assert "a message of some length" not in asked(chat)
    assert [len(chat.conversation.turns), len(chat.conversation.seen)] == [3, 2]
    with pytest.raises(KtoptError, match="The message alone is too long"):
        chat.say("x" * 290)
    with pytest.raises(KtoptError, match="the message has at least 400 tokens; the context holds 300"):
        chat.say("x" * 400)


def test_a_prompt_may_have_less_than_the_context() -> None:
    chat = chat_over(FakeEngine(words, 300), Screen(Style()), most_prompt_tokens=100)
    chat.say("a message of some length, for the room it takes")
    with pytest.raises(KtoptError, match=r"has 163 tokens, and a prompt may have 100 \(max_seq_len\)\. /drop 1 "):
        chat.say("a second one")


def test_an_answer_has_no_more_tokens_than_the_context_has_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_over(FakeEngine(words, 100), Screen(Style()))
    chat.say("long")
    engine: Any = chat.engine
    assert engine.requests[0].max_tokens == 100 - len(engine.requests[0].prompt_ids)
    said = " ".join(capsys.readouterr().err.split())
    assert "for which the context had room" in said
    assert "the context is full" in said


@pytest.mark.parametrize(("line", "said"), [
    ("/hlep", "no command /hlep: did you mean /help?"),
    ("/etc/passwd?", "needs a blank before it"),
    ("/zzz", "commands are /help, /system"),
    ("/file", "PATH is missing"),
    ("/stats now", "takes nothing"),
    ("/drop x", "from 1 on, not x"),
    ("/drop 0", "from 1 on, not 0"),
    (f"/drop {'9' * 5000}", "from 1 on, not 9"),
    ("/drop", "no turns"),
    ("/undo", "no turn"),
    ("/retry", "no message"),
    ("/save x.md", "nothing to save"),
])  # fmt: skip
def test_what_commands_can_not_do_is_said(chat: Chat, line: str, said: str) -> None:
    with pytest.raises(KtoptError, match=said.replace("?", r"\?")):
        run_command(chat, line)


def test_help_lists_every_command_and_clear_and_quit_do_as_they_say(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    run_command(chat, "/help")
    out = capsys.readouterr().err
    assert all(f"{name} " in out for name in COMMANDS)
    chat.say("one")
    run_command(chat, "/clear")
    chat.say("two")
    assert "one" not in asked(chat)
    with pytest.raises(Leave):
        run_command(chat, "/quit")


def test_stats_tell_of_all_answers_and_of_the_tiers(chat: Chat, capsys: pytest.CaptureFixture[str]) -> None:
    chat.tiers = lambda: "tier  bytes\nhost  7"
    chat.say("one")
    chat.say("two")
    capsys.readouterr()
    run_command(chat, "/stats")
    out = capsys.readouterr().err
    assert "turns     2\n" in out
    assert "written   4 tokens (1.0 tokens/s)" in out
    assert "in cache  1.0 MB" in out
    assert out.endswith("tier  bytes\nhost  7\n")


def test_control_characters_are_left_out_and_emoji_and_scripts_are_not() -> None:
    assert shown("a\x1b]0;t\x07b\x9bc\r\nd\u202ee\ud800") == "a]0;tbc\nde?"
    kept = "👩‍👩‍👧 שלום é e\u0301 \u200fx\t日本語"
    assert shown(kept) == typed(kept) == kept
    assert typed("a\r\nb\rc\x1b\ud800") == "a\nb\nc?"


def test_a_history_that_can_not_be_kept_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    history, why = open_history()
    assert "Not a directory" in why
    history.append_string("kept for this chat")

    def without_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "expanduser", without_home)
    assert "home directory" in open_history()[1]


def test_a_long_history_keeps_its_newer_half(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    history, _ = open_history()
    for number in range(MOST_BYTES // 1000 + 50):
        history.append_string(f"# {number}\n" + "x" * 1000)
    again, _ = open_history()
    found = list(again.load_history_strings())
    assert found[0].startswith(f"# {MOST_BYTES // 1000 + 49}\n")
    assert all(entry.startswith("# ") and len(entry.split("\n")[1]) == 1000 for entry in found)
    assert (tmp_path / "ktopt" / "chat_history").stat().st_size <= MOST_BYTES
    history.append_string("x" * 40_000)
    assert (tmp_path / "ktopt" / "chat_history").stat().st_size <= MOST_BYTES
