"""`ktopt chat` with a model: through pipes, from a file, in mode long_context, by KTransformers' options; what passes the model."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apply_fixtures import make_tokenizer
from chat_program import chat_over
from gguf_fixtures import make_gguf, tiny_model
from terminals import Terminal

from ktopt import local_chat
from ktopt.chat.conversation import Template
from ktopt.chat.safety import shown
from ktopt.chat.screen import Screen
from ktopt.cli import main
from ktopt.engine.request import Sampling
from ktopt.engine.single import SingleEngine
from ktopt.render.style import Style

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = "version: 1\nrules:\n  - {match: 'class=Linear', replace: KTransformersLinear, kwargs: {generate_op: KLinearTorch}}\n"
CONFIG = """\
model: {name_or_path: tiny.gguf, device: cpu}
long_context:
  {max_seq_len: 256, block_size: 16, local_windows_len: 32, second_select_num: 16, preselect_block: false, kv_type: FP32}
"""
MODEL = ["--weights", "tiny.gguf", "--dtype", "float32", "--greedy", "-n", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("chat")
    make_gguf(made / "tiny.gguf", tiny_model("llama"), "F32")
    (made / "rules.yaml").write_text(RULES)
    (made / "config.yaml").write_text(CONFIG)
    (made / "first.txt").write_text("the first message\n")
    return made


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))


def test_a_question_through_a_pipe_is_answered_as_ktopt_run_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, "what is é?\n".encode())
    assert main(["chat", "rules.yaml", *MODEL, "--system", "be kind"]) == 0
    answer = capsys.readouterr()
    assert main(["run", "rules.yaml", *MODEL, "--quiet", "-p", "what is é?", "--system", "be kind"]) == 0
    assert answer.out == shown(capsys.readouterr().out)
    assert answer.out.strip()
    assert "context" in answer.err
    assert "memory" in answer.err


def test_a_prompt_file_comes_before_what_is_piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    piped(monkeypatch, b"")
    assert main(["chat", "rules.yaml", *MODEL, "-q", "--prompt_file", "first.txt"]) == 0
    first = capsys.readouterr()
    assert first.err == ""
    piped(monkeypatch, b"second")
    assert main(["chat", "rules.yaml", *MODEL, "-q", "--prompt-file", "first.txt"]) == 0
    both = capsys.readouterr().out
    assert both.startswith(first.out)
    assert len(both) > len(first.out)


@pytest.mark.parametrize(("data", "options", "code", "said"), [
    (b"", [], 2, "nothing is asked"),
    (b"caf\xe9", [], 2, "standard input isn't UTF-8 text: byte 3 is 0xe9"),
    (b"x" * (4 << 20) + b"y", [], 2, "more than 4,194,304 bytes"),
    (b"x", ["--prompt_file", "nowhere.txt"], 2, "nowhere.txt: No such file"),
    (b"x", ["--raw", "--system", "x"], 2, "--raw leaves out"),
    (b"x", ["--raw", "--force_think"], 2, "--raw leaves out"),
    (b"x", ["--seed", "-1"], 2, "--seed"),
    (b"x", ["--context", "9"], 2, "--context goes with"),
    (b"x" * 510, [], 1, "The message alone is too long"),
    (b"x" * 600, [], 1, "at least 600 tokens; the context holds 512"),
])  # fmt: skip
def test_what_can_not_be_is_refused(
    data: bytes, options: list[str], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, data)
    assert main(["chat", "rules.yaml", *MODEL, *options]) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_mode_long_context_answers_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    piped(monkeypatch, b"hello there, all of you")
    assert main(["chat", "rules.yaml", *MODEL, "-q"]) == 0
    plain = capsys.readouterr().out
    piped(monkeypatch, b"hello there, all of you")
    assert main(["chat", "--mode", "long_context", "--config", "config.yaml", *MODEL]) == 0
    assert capsys.readouterr().out == plain


@pytest.fixture
def counted() -> Iterator[tuple[Any, list[int]]]:
    """A chat on a tiny model that answers with letters, and how many tokens pass it, call by call."""
    model, tokenizer = tiny_model("llama", max_position_embeddings=4096).eval(), make_tokenizer()
    passed: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: passed.append(args[0].numel()))
    engine = SingleEngine(model, tokenizer)
    tokenizer.chat_template += "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
    letters = tuple((tokenizer(letter)["input_ids"][0], 100.0) for letter in "abcdefgh")
    sampling = Sampling(temperature=0.0, logit_bias=letters)
    chat: Any = chat_over(engine, Screen(Style()), sampling=sampling, max_tokens=12)  # type: ignore[arg-type]
    chat.template = Template(tokenizer)
    yield chat, passed
    engine.close()


def test_only_what_is_new_of_a_conversation_passes_the_model(counted: tuple[Any, list[int]]) -> None:
    chat, passed = counted
    for number in range(6):
        passed.clear()
        chat.say(f"message {number}")
        usage = chat.conversation.turns[-1].usage
        assert sum(passed) <= usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens
        if number > 2:
            assert usage.prompt_tokens > 120
            assert passed[0] < 40, "the prompt's new tokens: the end of the last answer, and the message"
            assert sum(passed) == passed[0] + 11, "and one call for each token of the answer but the last"


def test_a_template_that_writes_earlier_answers_otherwise_costs_only_what_differs(counted: tuple[Any, list[int]]) -> None:
    chat, passed = counted
    tokenizer = chat.template._tokenizer
    tokenizer.chat_template = tokenizer.chat_template.replace("m['content']", "'-' if m['role'] == 'assistant' else m['content']")
    question = "a long question, whose tokens are many " * 10
    chat.say(question)
    read = sum(passed)
    passed.clear()
    chat.say("more")
    assert chat.conversation.turns[-1].usage.cached_tokens > 0.9 * len(question)
    assert sum(passed) < read / 4


def test_on_a_terminal_it_greets_answers_a_file_and_messages_and_leaves(folder: Path) -> None:
    program = [sys.executable, "-P", "-m", "ktopt", "chat", "rules.yaml", *MODEL, "--prompt_file", "first.txt"]
    terminal = Terminal(program, columns=100, XDG_STATE_HOME=str(folder))
    try:
        terminal.wait_for("tiny.gguf; context 0 of 512 tokens. /help lists the commands", limit_s=60)
        terminal.wait_for("> 18 characters of a file")
        terminal.read(lambda: terminal.flat.count("memory") == 1 and terminal.lines_with_text[-1] == ">")
        terminal.type("hello\r")
        terminal.read(lambda: terminal.flat.count("memory") == 2)
        terminal.type("/stats\r")
        terminal.wait_for("turns")
        terminal.type("\x04")
        assert terminal.end() == 0
    finally:
        terminal.close()


def test_ktransformers_options_become_those_of_ktopt_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped(monkeypatch, b"hello")
    given = ["--model_path", "tiny.gguf", "--gguf_path=tiny.gguf", "--optimize_config_path", "rules.yaml", "--cpu_infer", "1"]
    given += ["--max_new_tokens=4", "--mode", "normal", "--use_cuda_graph=True", "--greedy", "-q", "--prompt_file", "first.txt"]
    assert local_chat.run(given) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(("given", "meant"), [
    (["--gguf_path", "w", "--optimize_config_path=r.yaml", "--cpu_infer", "33"], ["r.yaml", "--weights", "w", "--threads", "33"]),
    (["--model-path", "deepseek-ai/DeepSeek-V3"], ["--model", "deepseek-v3"]),
    (["--chunk_prefill_size", "8192"], ["--chunk_size", "8192"]),
    (["--max_new_tokens", "9", "--mode", "long_context"], ["--max-tokens", "9", "--mode", "long_context"]),
    (["--force_think", "False", "r.yaml"], ["r.yaml"]),
    (["--force_think", "true", "r.yaml"], ["--force_think", "r.yaml"]),
])  # fmt: skip
def test_each_of_ktransformers_options_has_its_place(given: list[str], meant: list[str]) -> None:
    assert local_chat.arguments(given) == meant


@pytest.mark.parametrize(("option", "said"), [
    ("--gguf_pth", "did you mean --gguf_path?"),
    ("--max_tokens=3", "did you mean --max-tokens?"),
    ("--zzzzz", "--help lists"),
    ("--force_think=maybe", "true or false"),
])  # fmt: skip
def test_other_options_are_refused_with_the_nearest(option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert local_chat.run([option]) == 2
    assert said in capsys.readouterr().err


def test_ktransformers_name_starts_in_a_process_of_its_own(folder: Path) -> None:
    command = [sys.executable, "-m", "ktopt.local_chat", "--no_such"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no option --no_such")
