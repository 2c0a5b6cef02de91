"""A session's prompts and answers against transformers' own generate; the functions and script that KTransformers' users know."""

from __future__ import annotations

import logging
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from apply_fixtures import make_model, make_tokenizer
from gguf_fixtures import make_folder
from rulefiles import CASES, needs_cases
from torch import nn

import ktopt
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.long_context import current
from ktopt.long_context.config import Config
from ktopt.long_context.session import LongContextSession
from ktopt.source import SourceFile
from ktopt.util.utils import chunk_prefill, decode_wrapper, load_model

CONFIG = """\
model: {name_or_path: tiny, device: cpu}
long_context:
  max_seq_len: 160
  block_size: 8
  local_windows_len: 16
  second_select_num: 64
  preselect_block: false
  dense_layer_num: 0
  kv_type: FP32
  max_new_tokens: 32
  CHUNK
kvc2: {cpu_memory_size_GB: 1}
"""
pytestmark = pytest.mark.usefixtures("one_thread")
AS_IT_IS = SourceFile("rules.yaml", "version: 1\nrules: []\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model's folder, and its configs."""
    made = tmp_path_factory.mktemp("long")
    make_tokenizer().save_pretrained(make_folder(made / "tiny", make_model("llama", seed=3)))
    (made / "config.yaml").write_text(CONFIG.replace("CHUNK", ""))
    (made / "chunks.yaml").write_text(CONFIG.replace("CHUNK", "chunk_size: 7"))
    return made


@pytest.fixture(scope="module")
def plain(folder: Path) -> nn.Module:
    """The model as transformers runs it."""
    return ktopt.load_model(folder / "tiny")[0]  # type: ignore[no-any-return]


@pytest.fixture
def session(folder: Path) -> Iterator[LongContextSession]:
    """Of the model as it is, but for its attention: computed in float32, so that answers are exact."""
    model, _ = load_model(folder / "tiny", AS_IT_IS, mode="long_context", config=folder / "config.yaml")
    yield model.ktopt_session
    model.ktopt_session.close()


def prompt(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(seed))


def answer_of(model: Any, ids: torch.Tensor, count: int) -> list[int]:
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return made[0, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("tokens", [1, 8, 23, 24, 25, 120])
def test_where_all_blocks_are_chosen_the_answer_is_transformers_own(session: Any, plain: Any, tokens: int) -> None:
    assert list(session.generate(prompt(tokens), 16)) == answer_of(plain, prompt(tokens), 16)


def test_a_prompt_read_in_chunks_has_the_same_answer_and_tells_its_progress(folder: Path, plain: Any) -> None:
    model, tokenizer = load_model(folder / "tiny", AS_IT_IS, mode="long_context", config=folder / "chunks.yaml")
    told: list[tuple[int, int]] = []
    with LongContextSession(model, tokenizer, progress=lambda done, total: told.append((done, total))) as session:
        assert list(session.generate(prompt(60), 8)) == answer_of(plain, prompt(60), 8)
    assert told == [(done, 60) for done in (7, 14, 21, 28, 35, 42, 49, 56, 60)]


@pytest.mark.parametrize("tokens", [56, 57, 58])
def test_a_prompt_s_last_token_attends_to_everything_too(folder: Path, plain: Any, tokens: int) -> None:
    """Where it would stand alone in its chunk, and where a prompt comes again."""
    text = (folder / "chunks.yaml").read_text().replace("second_select_num: 64", "second_select_num: 1")
    (folder / "few.yaml").write_text(text)
    model, _ = load_model(folder / "tiny", AS_IT_IS, mode="long_context", config=folder / "few.yaml")
    with torch.no_grad(), model.ktopt_session as session:
        expected = plain(prompt(tokens)).logits[:, -1]
        torch.testing.assert_close(session.chunk_prefill(prompt(tokens)), expected, rtol=1e-4, atol=1e-5)
        list(session.generate(prompt(tokens), 2))
        assert [int(session.decode_wrapper(None, inputs=prompt(tokens)))] == expected.argmax(-1).tolist()


def test_what_a_prompt_begins_with_is_not_read_again(session: Any, plain: Any) -> None:
    list(session.generate(prompt(50), 4))
    before = session.statistics.prompt_tokens
    longer = torch.cat((prompt(40), prompt(30, seed=1)), dim=1)
    assert list(session.generate(longer, 8)) == answer_of(plain, longer, 8)
    assert session.statistics.prompt_tokens - before == 30
    assert list(session.generate(longer, 8)) == answer_of(plain, longer, 8)


def test_the_functions_go_as_the_article_calls_them(session: Any, plain: Any) -> None:
    ids = prompt(45)
    logits = chunk_prefill(inputs=ids, cache_position=torch.arange(45), past_key_values=None)
    with torch.no_grad():
        torch.testing.assert_close(logits, plain(ids).logits[:, -1], rtol=1e-4, atol=1e-5)
    generated = ids.clone()
    for _ in range(12):
        at = torch.tensor([generated.shape[1]])
        token = decode_wrapper(
            next_token=None, position_ids=at, cache_position=at, cuda_graph_runner=None, past_key_values=None,
            inputs=generated, seq_length=generated.shape[1],
        )  # fmt: skip
        generated = torch.cat([generated, token.unsqueeze(0)], dim=1)
    assert generated[0, 45:].tolist() == answer_of(plain, ids, 12)
    assert session.length == 45 + 11


def test_a_next_token_that_is_given_is_read_where_it_stands(session: Any, plain: Any) -> None:
    first = int(chunk_prefill(prompt(30)).argmax())
    at = torch.tensor([30])
    second = decode_wrapper(torch.tensor([first]), position_ids=at, cache_position=at)
    assert [first, int(second)] == answer_of(plain, prompt(30), 2)
    with pytest.raises(UsageError, match="position_ids is 7, and the next token stands at 31"):
        decode_wrapper(second, position_ids=torch.tensor([7]))


def test_inputs_that_differ_from_the_context_are_read_from_there_on(session: Any, plain: Any) -> None:
    chunk_prefill(prompt(60))
    other = torch.cat((prompt(35), prompt(10, seed=2)), dim=1)
    assert [int(decode_wrapper(None, inputs=other, seq_length=45))] == answer_of(plain, other, 1)
    assert session.length == 45
    shorter = prompt(20)
    assert [int(decode_wrapper(None, inputs=shorter))] == answer_of(plain, shorter, 1)


def test_a_prompt_is_continued_or_replaced_by_its_positions(session: Any, plain: Any) -> None:
    whole = prompt(40)
    chunk_prefill(whole[:, :25])
    logits = chunk_prefill(whole[:, 25:], cache_position=torch.arange(25, 40))
    assert int(logits.argmax()) == answer_of(plain, whole, 1)[0]
    again = torch.cat((whole[:, :30], prompt(5, seed=4)), dim=1)
    assert int(chunk_prefill(again[:, 30:], torch.arange(30, 35)).argmax()) == answer_of(plain, again, 1)[0]
    chunk_prefill(prompt(9))
    assert session.length == 9


@pytest.mark.parametrize(("call", "said"), [
    (lambda: chunk_prefill(prompt(161)), "the prompt has 161 tokens, and the cache holds 160"),
    (lambda: chunk_prefill(prompt(5), torch.arange(3, 8)), "begins at 3, and the context has 0 tokens"),
    (lambda: chunk_prefill(prompt(5), torch.arange(4)), "4 positions for 5 tokens"),
    (lambda: chunk_prefill(prompt(5), torch.tensor([0, 1, 2, 4, 5])), "must be 0 to 4"),
    (lambda: chunk_prefill(torch.zeros(2, 5, dtype=torch.long)), "tokens of one sequence"),
    (lambda: chunk_prefill(torch.zeros(1, 5)), "torch.float32"),
    (lambda: chunk_prefill(prompt(5), past_key_values=object()), "keeps its blocks itself"),
    (lambda: decode_wrapper(None), "needs next_token"),
    (lambda: decode_wrapper(None, inputs=prompt(5), seq_length=4), "seq_length is 4, and inputs are 5 tokens"),
    (lambda: chunk_prefill(torch.tensor([[1, 2, 320]])), "tokens of this model are from 0 to 319, and here is 320"),
    (lambda: chunk_prefill(torch.tensor([[1, -2]])), "from 0 to 319, and here is -2"),
    (lambda: chunk_prefill("text"), "must be whole numbers, as a tensor or a list, not str"),
    (lambda: chunk_prefill(prompt(5), torch.arange(5.0)), "cache_position must be whole numbers"),
    (lambda: decode_wrapper(torch.tensor([3]), position_ids=torch.tensor([], dtype=torch.long)), "0 positions for 1 tokens"),
    (lambda: list(current.current().generate(prompt(5), -1)), "whole number from 0 on, not -1"),
])  # fmt: skip
def test_what_can_not_be_is_refused_before_any_work(session: Any, call: Any, said: str) -> None:
    with pytest.raises(KtoptError, match=said):
        call()
    assert session.length == 0


def test_an_answer_has_room_beside_the_longest_prompt_and_no_more(session: Any) -> None:
    assert session.capacity == 192
    assert len(list(session.generate(prompt(160), 33))) == 33
    with pytest.raises(KtoptError, match="prompt and answer are 193 tokens, and the cache holds 192"):
        list(session.generate(prompt(160), 34))


def test_a_failure_while_reading_loses_the_context_and_not_the_session(session: Any, plain: Any) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    session.chunk_prefill(prompt(20))
    session.model.forward = fail
    with pytest.raises(KeyboardInterrupt):
        session.chunk_prefill(prompt(50))
    del session.model.forward
    assert session.length == 0
    assert list(session.generate(prompt(50), 4)) == answer_of(plain, prompt(50), 4)


def test_the_functions_need_a_model_and_a_closed_session_reads_nothing(session: Any) -> None:
    session.close()
    for call in (lambda: chunk_prefill(prompt(3)), session.reset, lambda: session.likeliest(prompt(3))):
        with pytest.raises(UsageError, match="closed"):
            call()
    current._last.clear()
    with pytest.raises(UsageError, match=r'load_model.*mode="long_context"'):
        chunk_prefill(prompt(3))


def test_statistics_count_prompts_and_answers_and_the_table_has_the_tiers(session: Any) -> None:
    assert session.table() == []
    list(session.generate(prompt(100), 5))
    done = session.statistics
    assert (done.prompt_tokens, done.new_tokens) == (100, 4)
    assert min(done.prompt_tokens_per_s, done.decode_tokens_per_s) > 0
    assert [row[0] for row in session.table()] == ["tier", "device", "host", "disk"]


def test_a_model_without_blocks_has_no_session(plain: Any) -> None:
    with pytest.raises(KtoptError, match="mode='long_context'"):
        LongContextSession(plain)


@needs_cases
def test_the_article_s_script_runs_with_its_import_lines_changed(
    tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On SmolLM2, with its path and device in the config; lengths so that the prompt fills the cache and is cut."""
    script = (CASES / "long_context" / "article_demo.py").read_text(encoding="utf-8").replace("from ktransformers.", "from ktopt.")
    text = (CASES / "long_context" / "config.yaml").read_text(encoding="utf-8")
    for old, new in (
        ('"meta-llama/Llama-2-70b"', f'"{smollm2}"'), ('"cuda:0"', '"cpu"'), ("139000", "700"), ("4096", "256"),
        ("true ", "false "),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "ktopt.yaml").write_text(text)
    (tmp_path / "demo.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    logging.disable(logging.WARNING)
    try:
        names = runpy.run_path("demo.py")
    finally:
        logging.disable(logging.NOTSET)
        current.current().close()
    assert names["input_ids"].shape[1] == 768 == Config("ktopt.yaml").max_seq_len
    assert names["generated"].shape[1] > 768
    assert "Detailed analysis of transformer scaling laws." in capsys.readouterr().out


def test_a_context_beyond_what_the_model_was_made_for_is_said_once(session: Any, caplog: pytest.LogCaptureFixture) -> None:
    session._made_for = 100
    list(session.generate(prompt(120), 3))
    assert caplog.text.count("the model was made for 100") == 1


def test_another_session_of_the_same_model_has_a_context_of_its_own(session: Any, plain: Any) -> None:
    list(session.generate(prompt(30), 2))
    with LongContextSession(session.model, session.tokenizer) as other:
        assert (other.capacity, other.length) == (session.capacity, 0)
        assert list(other.generate(prompt(50, seed=5), 4)) == answer_of(plain, prompt(50, seed=5), 4)
    assert session.length == 31
    assert list(session.generate(prompt(30), 4)) == answer_of(plain, prompt(30), 4)


def test_who_stops_it_between_chunks_loses_nothing_of_what_is_read(folder: Path, plain: Any) -> None:
    model, tokenizer = load_model(folder / "tiny", AS_IT_IS, mode="long_context", config=folder / "chunks.yaml")

    def stop(done: int, total: int) -> None:
        if done == 21:
            raise KeyboardInterrupt

    with LongContextSession(model, tokenizer, progress=stop) as session:
        with pytest.raises(KeyboardInterrupt):
            session.go_to(prompt(50))
        assert session.length == 21
        session.progress = None
        assert list(session.generate(prompt(50), 4)) == answer_of(plain, prompt(50), 4)
        assert session.statistics.prompt_tokens == 50 - 21
