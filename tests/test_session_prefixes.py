"""A session whose prompt begins like an earlier one's takes its blocks from disk, in whatever process that was."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from apply_fixtures import make_model, make_tokenizer
from gguf_fixtures import make_folder, make_gguf, tiny_model

from ktopt import load_model
from ktopt.cache.blocks import prefix
from ktopt.config import Config, ModelSettings
from ktopt.diagnostics import KtoptError
from ktopt.long_context.session import LongContextSession
from ktopt.source import SourceFile

pytestmark = pytest.mark.usefixtures("one_thread")

AS_IT_IS = SourceFile("rules.yaml", "version: 1\nrules: []\n")
LONG = {
    "max_seq_len": 512, "block_size": 16, "local_windows_len": 32, "second_select_num": 64, "preselect_block": False,
    "dense_layer_num": 0, "kv_type": "FP32", "max_new_tokens": 16, "anchor_type": "KEY_INT4",
}  # fmt: skip
PROMPT = torch.randint(0, 256, (1, 300), generator=torch.Generator().manual_seed(1))
OTHER = torch.cat((PROMPT[:, :200], torch.randint(0, 256, (1, 80), generator=torch.Generator().manual_seed(2))), dim=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("prefix")
    for name, seed in (("tiny", 3), ("another", 4)):
        make_tokenizer().save_pretrained(make_folder(made / name, make_model("llama", seed=seed)))
    make_tokenizer().save_pretrained(make_folder(made / "latent", tiny_model("deepseek_v3", 3)))
    make_tokenizer().save_pretrained(make_folder(made / "wide", tiny_model("llama", 5, num_hidden_layers=3, head_dim=32)))
    return made


def opened(folder: Path, disk: Path, name: str = "tiny", rules: Any = AS_IT_IS, **long: Any) -> LongContextSession:
    kvc2 = {"disk_path": str(disk), "prefix_reuse": True, "cpu_memory_size_GB": 1}
    config = Config(ModelSettings(name_or_path=name), given={"long_context": {**LONG, **long}, "kvc2": kvc2})
    session: LongContextSession = load_model(folder / name, rules, mode="long_context", config=config)[0].ktopt_session
    return session


def answer(session: LongContextSession, prompt: torch.Tensor) -> list[int]:
    with session:
        return list(session.generate(prompt, 8))


@pytest.fixture(scope="module")
def fresh(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The answer to OTHER of a session that has nothing to begin with."""
    return answer(opened(folder, tmp_path_factory.mktemp("empty")), OTHER)


@pytest.mark.parametrize("anchor_type", ["KEY_INT4", "QUEST", "DYNAMIC", "BLOCK_MEAN"])
def test_the_same_beginning_is_not_read_again_and_the_answer_is_the_same(
    folder: Path, tmp_path: Path, fresh: list[int], anchor_type: str
) -> None:
    answer(opened(folder, tmp_path, anchor_type=anchor_type), PROMPT)
    session = opened(folder, tmp_path, anchor_type=anchor_type)
    assert session.kvc2.match(OTHER) == 192
    assert answer(session, OTHER) == fresh
    assert session.statistics.reused_tokens == 192
    assert session.statistics.prompt_tokens == OTHER.shape[1] - 192


def test_latents_are_kept_and_taken_too(folder: Path, tmp_path: Path) -> None:
    plain = load_model(folder / "latent", AS_IT_IS)[0]
    made = plain.generate(OTHER, attention_mask=torch.ones_like(OTHER), max_new_tokens=8, do_sample=False, eos_token_id=None)
    answer(opened(folder, tmp_path, "latent"), PROMPT)
    session = opened(folder, tmp_path, "latent")
    assert answer(session, OTHER) == made[0, OTHER.shape[1] :].tolist()
    assert session.statistics.reused_tokens == 192


def test_a_small_choice_of_blocks_is_made_by_the_anchors_that_were_kept(folder: Path, tmp_path: Path) -> None:
    """With few blocks chosen, what is chosen hangs on them."""
    first = answer(opened(folder, tmp_path / "a", second_select_num=2, kv_type="FP32"), PROMPT)
    answer(opened(folder, tmp_path / "b", second_select_num=2), PROMPT)
    again = opened(folder, tmp_path / "b", second_select_num=2)
    assert answer(again, PROMPT) == first
    assert again.statistics.reused_tokens >= 240


@pytest.mark.parametrize("kv_type", ["FP32", "Q8_0"])
def test_the_last_tokens_of_a_prompt_are_in_the_window_as_they_came(folder: Path, tmp_path: Path, kv_type: str) -> None:
    """A prompt that ends soon after what is kept of a longer one: few blocks are chosen, so that the window counts."""
    shorter, few = PROMPT[:, :250], {"second_select_num": 1, "kv_type": kv_type, "block_size": 32}
    expected = answer(opened(folder, tmp_path / "a", name="wide", **few), shorter)
    answer(opened(folder, tmp_path / "b", name="wide", **few), PROMPT)
    again = opened(folder, tmp_path / "b", name="wide", **few)
    assert answer(again, shorter) == expected
    assert again.statistics.reused_tokens == (250 - 32 - 1) // 32 * 32


def test_what_was_decoded_is_not_kept(folder: Path, tmp_path: Path) -> None:
    """Such tokens have attended to chosen blocks, and so would what is read after them."""
    with opened(folder, tmp_path) as session:
        list(session.generate(PROMPT[:, :150], 16))
        longer = torch.cat((session.tokens, PROMPT[:, 150:]), dim=1)
        list(session.generate(longer, 4))
        assert session.kvc2.match(longer) == (150 - 32 - 1) // 16 * 16 + 32  # the others have left the window since
        session.chunk_prefill(PROMPT)
        assert session.kvc2.match(PROMPT) == (300 - 32 - 1) // 16 * 16


def test_sparse_prompts_are_known_by_what_chooses_their_blocks(folder: Path, tmp_path: Path) -> None:
    answer(opened(folder, tmp_path, prefill="sparse", second_select_num=4), PROMPT)
    for changes, found in (({}, 256), ({"second_select_num": 5}, 0), ({"prefill": "exact"}, 0)):
        with opened(folder, tmp_path, **{"prefill": "sparse", "second_select_num": 4, **changes}) as session:
            assert session.kvc2.match(PROMPT) == found, changes


def test_blocks_are_of_their_model_weights_and_settings(folder: Path, tmp_path: Path) -> None:
    answer(opened(folder, tmp_path), PROMPT)
    for changes in ({"name": "another"}, {"block_size": 32}, {"anchor_type": "QUEST"}, {"kv_type": "FP16"}):
        session = opened(folder, tmp_path, **changes)
        with session:
            assert session.kvc2.match(PROMPT) == 0, changes


def test_another_process_finds_them(folder: Path, tmp_path: Path, fresh: list[int]) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[3]); import test_session_prefixes as t;"
        "t.answer(t.opened(Path(sys.argv[1]), Path(sys.argv[2])), t.PROMPT)"
    )
    arguments = [str(folder), str(tmp_path), str(Path(__file__).parent)]
    subprocess.run([sys.executable, "-P", "-c", code, *arguments], check=True, capture_output=True)
    session = opened(folder, tmp_path)
    assert answer(session, OTHER) == fresh
    assert session.statistics.reused_tokens == 192


def test_a_damaged_file_is_read_again_from_the_prompt(folder: Path, tmp_path: Path, fresh: list[int]) -> None:
    answer(opened(folder, tmp_path), PROMPT)
    files = sorted((tmp_path / "prefixes").glob("*"), key=lambda file: file.stat().st_size)
    for file in files[-3:]:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    session = opened(folder, tmp_path)
    assert answer(session, OTHER) == fresh
    assert session.statistics.reused_tokens < 192


def test_reuse_goes_on_within_a_session_from_one_context_to_the_next(folder: Path, tmp_path: Path, fresh: list[int]) -> None:
    with opened(folder, tmp_path) as session:
        session.chunk_prefill(PROMPT)
        session.reset()
        session.chunk_prefill(OTHER)
        assert session.statistics.reused_tokens == 192
        assert [int(session.decode_wrapper(None, inputs=OTHER))] == fresh[:1]


def test_weights_that_are_no_file_have_no_prefixes(folder: Path, tmp_path: Path) -> None:
    session = opened(folder, tmp_path)
    session.close()
    with pytest.raises(KtoptError, match="load it from a GGUF file or a folder"):
        LongContextSession(session.model)


def test_without_a_disk_path_it_is_refused(folder: Path) -> None:
    config = Config(ModelSettings(name_or_path="tiny"), given={"long_context": LONG, "kvc2": {"prefix_reuse": True}})
    with pytest.raises(KtoptError, match="there is no `disk_path`"):
        load_model(folder / "tiny", AS_IT_IS, mode="long_context", config=config)


def test_a_model_with_sliding_windows_is_refused(tmp_path: Path) -> None:
    make_gguf(tmp_path / "gemma.gguf", tiny_model("gemma3_text"), "F32")
    kvc2 = {"disk_path": str(tmp_path / "d"), "prefix_reuse": True}
    config = Config(ModelSettings(name_or_path="gemma"), given={"long_context": LONG, "kvc2": kvc2})
    with pytest.raises(KtoptError, match="sliding windows"):
        load_model(tmp_path / "gemma.gguf", AS_IT_IS, mode="long_context", config=config)


def test_the_folder_holds_no_more_than_its_quota(folder: Path, tmp_path: Path) -> None:
    session = opened(folder, tmp_path)
    session.close()
    kvc2 = replace(session.kvc2.settings, disk_size_GB=0.0005)
    config = Config(ModelSettings(name_or_path="tiny"), given={"long_context": LONG, "kvc2": kvc2.to_kwargs()})
    answer(load_model(folder / "tiny", AS_IT_IS, mode="long_context", config=config)[0].ktopt_session, PROMPT)
    held = sum(file.stat().st_size for file in (tmp_path / "prefixes").iterdir() if file.is_file())
    assert 0 < held <= 500_000


def test_blocks_that_can_not_be_kept_are_said_and_the_answer_comes_all_the_same(
    folder: Path, tmp_path: Path, fresh: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = opened(folder, tmp_path)
    monkeypatch.setattr(session.prefixes, "keep", raises)
    assert answer(session, OTHER) == fresh
    assert "aren't kept for later ones: the disk is full" in caplog.text


@pytest.mark.parametrize("gone", ["prefixes", "."])
def test_where_the_folder_vanishes_the_answer_comes_all_the_same(
    folder: Path, tmp_path: Path, fresh: list[int], gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "kept"
    with opened(folder, kept) as session:
        shutil.rmtree(kept / gone)
        assert list(session.generate(OTHER, 8)) == fresh
        assert "the prompt is read from its first token on" in caplog.text
        assert "aren't kept for later ones" in caplog.text
        session.reset()
        assert list(session.generate(OTHER, 8)) == fresh  # a new context makes the folder anew
    assert opened(folder, kept).kvc2.match(OTHER) == 240


def test_files_that_are_another_user_s_are_taken_though_they_can_not_be_marked_as_used(
    folder: Path, tmp_path: Path, fresh: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    answer(opened(folder, tmp_path), PROMPT)
    monkeypatch.setattr(os, "utime", refuse)
    session = opened(folder, tmp_path)
    assert answer(session, OTHER) == fresh
    assert session.statistics.reused_tokens == 192


def test_the_tokens_of_a_prompt_are_hashed_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(opened(folder, tmp_path), PROMPT)
    done, hashes = [], prefix.chain_hashes
    monkeypatch.setattr(prefix, "chain_hashes", lambda *given: done.append(1) or hashes(*given))
    with opened(folder, tmp_path) as session:
        session.chunk_prefill(PROMPT)
    assert session.statistics.reused_tokens
    assert len(done) == 1


def raises(*_: Any) -> None:
    raise KtoptError("the disk is full")
