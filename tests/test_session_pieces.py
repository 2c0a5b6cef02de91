"""A prompt attends to everything however it is cut into pieces; sessions in threads and forked processes; few blocks are chosen, so
that what is decoded differs from what is read."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from apply_fixtures import make_model, make_tokenizer
from blocked_models import OneLayer, blocked, logits_of
from gguf_fixtures import make_folder
from layer_fixtures import difference, random_model

from ktopt import load_model
from ktopt.config import Config, ModelSettings
from ktopt.long_context.session import LongContextSession
from ktopt.operators.modules import block_choice
from ktopt.source import SourceFile

pytestmark = pytest.mark.usefixtures("one_thread")

AS_IT_IS = SourceFile("rules.yaml", "version: 1\nrules: []\n")
LONG = {
    "max_seq_len": 512, "block_size": 8, "local_windows_len": 16, "second_select_num": 2, "preselect_block": False,
    "dense_layer_num": 0, "kv_type": "FP32", "max_new_tokens": 32, "anchor_type": "QUEST",
}  # fmt: skip
PROMPT = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_folder(tmp_path_factory.mktemp("pieces") / "tiny", make_model("llama", seed=3))
    make_tokenizer().save_pretrained(made)
    return made


def opened(folder: Path, kvc2: dict[str, Any] | None = None, **long: Any) -> LongContextSession:
    given = {"long_context": {**LONG, **long}, "kvc2": kvc2 or {"cpu_memory_size_GB": 1}}
    config = Config(ModelSettings(name_or_path="tiny"), given=given)
    model = load_model(folder, AS_IT_IS, mode="long_context", config=config)[0]
    return LongContextSession(model)  # the model's own is closed when the next one is loaded


@pytest.mark.parametrize("settings", [{}, {"preselect_block": True, "preselect_block_count": 4}, {"anchor_type": "DYNAMIC"}])
@pytest.mark.parametrize("chunk_size", [1, 7, 199])
def test_pieces_of_a_token_are_read_and_not_decoded(folder: Path, chunk_size: int, settings: dict[str, Any]) -> None:
    with opened(folder, **settings) as whole, opened(folder, chunk_size=chunk_size, **settings) as pieces:
        assert difference(whole.chunk_prefill(PROMPT), pieces.chunk_prefill(PROMPT)) < 1e-4
        assert list(whole.generate(PROMPT, 12)) == list(pieces.generate(PROMPT, 12))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_last_token_of_a_chunk_s_own_is_read_by_a_fused_layer_too(family: str) -> None:
    ids = torch.randint(0, 96, (1, 121), generator=torch.Generator().manual_seed(2))
    settings = {"chunk_size": 60, "second_select_num": 1}
    model = random_model(family)
    assert difference(logits_of(blocked(model, fuse=True, **settings), [ids]), logits_of(model, [ids])) < 2e-5


def test_an_answer_made_again_is_the_same(folder: Path) -> None:
    with opened(folder) as session:
        first = list(session.generate(PROMPT, 12))
        assert list(session.generate(PROMPT, 12)) == first


def test_guesses_taken_back_leave_what_the_prompt_has_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OneLayer(second_select_num=2, preselect_block=True, preselect_block_count=4, anchor_type="DYNAMIC")
    one.give(200)
    one.give(1)
    layer = one.layers[0]
    settled = layer.choice.shortlist_RM
    assert settled is not None
    monkeypatch.setattr(block_choice, "_importance", lambda held: pytest.fail("the prompt was looked at again"))
    for _ in range(10):
        one.give(5)
        layer.crop(-3)
        one.keys, one.values = one.keys[:, :, :-3], one.values[:, :, :-3]
        one.give(1)
        assert layer.choice.shortlist_RM is settled
    monkeypatch.undo()
    layer.crop(180 - layer.get_seq_length())
    one.keys, one.values = one.keys[:, :, :180], one.values[:, :, :180]
    one.give(1)
    assert layer.choice.shortlist_RM is not settled


def test_sessions_of_one_model_in_threads_keep_to_their_own_caches(folder: Path) -> None:
    prompts = [PROMPT, PROMPT.flip(1), PROMPT.roll(50, dims=1)]
    with opened(folder) as session:
        expected = [list(session.generate(prompt, 8)) for prompt in prompts]
        sessions = [LongContextSession(session.model) for _ in prompts]
    found: dict[int, list[int]] = {}

    def answer(number: int) -> None:
        found[number] = list(sessions[number].generate(prompts[number], 8))

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(len(prompts))]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
        for each in sessions:
            each.close()
    assert [found.get(number) for number in range(len(prompts))] == expected


def test_a_forked_process_is_told_that_the_blocks_are_its_parent_s(folder: Path, tmp_path: Path) -> None:
    """It doesn't wait for threads that it hasn't, and leaves the files alone."""
    with opened(folder, {"cpu_memory_size_GB": 0.0006, "disk_path": str(tmp_path)}, chunk_size=64) as session:
        answer = session.generate(PROMPT, 12)
        first = [next(answer) for _ in range(4)]
        store = session.blocks.store
        assert session.blocks.statistics.disk_bytes > 0
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                store.flush()
            except BaseException as error:
                os.write(writing, str(error).encode())
            session.close()
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(reading, 1000).decode()
        os.close(reading)
        os.close(writing)
        assert f"belongs to process {os.getpid()}, from which this one was forked" in said
        rest = list(answer)
    with opened(folder) as session:
        assert list(session.generate(PROMPT, 12)) == first + rest
