"""Streaming: the pieces make up generate's own text, whole characters only, and the times add up."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
from apply_fixtures import hand_plan, make_model, make_tokenizer, source_of

from ktopt.applying import apply_plan
from ktopt.diagnostics import UsageError
from ktopt.runtime.generation import IncrementalText, Stats, generate_stream
from ktopt.runtime.memory import peak_resident_bytes
from ktopt.runtime.threads import SPIN_VARIABLES, calm_openmp


@pytest.fixture(scope="module")
def model():
    original = make_model("llama", seed=4)
    return apply_plan(hand_plan(original), weights=source_of(original))


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def test_the_pieces_are_generates_text(model, tokenizer):
    inputs = tokenizer("hello there", return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    stream = generate_stream(model, tokenizer, "hello there", 20, do_sample=False)
    assert stream.stats is None
    pieces = list(stream)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(pieces) > 3
    assert stream.stats.new_tokens == len(tokens)
    assert stream.stats.prompt_tokens == inputs["input_ids"].shape[1]


def test_messages_go_through_the_chat_template(model, tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    stream = generate_stream(model, tokenizer, messages, 3, do_sample=False)
    list(stream)
    assert stream.stats.prompt_tokens == len(tokenizer("<|start|>user hi<|end|>")["input_ids"])


def test_sampling_with_a_seed_repeats_itself(model, tokenizer):
    texts = []
    for _ in range(2):
        torch.manual_seed(5)
        texts.append("".join(generate_stream(model, tokenizer, "abc", 12, do_sample=True)))
    assert texts[0] == texts[1]


def test_times_and_memory_are_measured(model, tokenizer):
    start = time.perf_counter()
    stream = generate_stream(model, tokenizer, "hello", 16, do_sample=False, min_new_tokens=16, baseline_bytes=0)
    list(stream)
    stats = stream.stats
    assert stats.new_tokens == 16
    assert 0 < stats.first_token_s + stats.decode_s < time.perf_counter() - start
    assert stats.decode_tokens_per_s == pytest.approx(15 / stats.decode_s)
    assert stats.prefill_tokens_per_s == pytest.approx(stats.prompt_tokens / stats.first_token_s)
    assert 50 << 20 < stats.peak_bytes <= peak_resident_bytes()


def test_one_token_has_no_decoding_speed():
    assert Stats(4, 1, 0.5, 0.0, 0).decode_tokens_per_s == 0.0


def test_closing_early_stops_the_model(model, tokenizer):
    stream = generate_stream(model, tokenizer, "hello", 500, do_sample=False, min_new_tokens=500)
    next(stream)
    stream.close()
    assert stream.stats.new_tokens < 400


def test_an_error_in_the_model_reaches_the_reader(tokenizer):
    broken = make_model()
    broken.forward = lambda *args, **kwargs: (_ for _ in ()).throw(RuntimeError("no kernel"))
    with pytest.raises(RuntimeError, match="no kernel"):
        list(generate_stream(broken, tokenizer, "hello", 4))


def test_an_empty_prompt_is_refused(model, tokenizer):
    with pytest.raises(UsageError, match="prompt is empty"):
        generate_stream(model, tokenizer, "")


def test_messages_without_a_chat_template_are_refused(model):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="chat template"):
        generate_stream(model, tokenizer, [{"role": "user", "content": "hi"}])


def test_characters_of_several_tokens_come_whole(tokenizer):
    text = "naïve — 日本\nnext ü"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > len(text)
    stream = IncrementalText(tokenizer)
    pieces = [stream.add([token]) for token in ids]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_given_last(tokenizer):
    stream = IncrementalText(tokenizer)
    first = tokenizer("日")["input_ids"][:1]
    assert stream.add(first) == ""
    assert stream.rest() == "\N{REPLACEMENT CHARACTER}"


HOLDING = """
from ktopt.runtime.memory import peak_resident_bytes, resident_bytes
before = resident_bytes()
held = bytearray(256 << 20)
held[::4096] = b"x" * len(held[::4096])  # each page is written, so that it is resident
after, peak = resident_bytes(), peak_resident_bytes()
del held
print(before, after, peak, resident_bytes())
"""


def test_resident_memory_grows_with_what_is_held():
    said = subprocess.run([sys.executable, "-P", "-c", HOLDING], capture_output=True, text=True, check=True).stdout
    before, after, peak, freed = map(int, said.split())
    assert 192 << 20 < after - before < 512 << 20
    assert peak > before + (192 << 20)
    assert freed < after - (128 << 20)


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}])
def test_openmp_is_told_to_spin_briefly_unless_the_user_said_how(monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name in SPIN_VARIABLES:
        monkeypatch.setenv(name, "kept so that it is restored")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    calm_openmp()
    assert {n: os.environ[n] for n in SPIN_VARIABLES if n in os.environ} == (given or {"GOMP_SPINCOUNT": "2000"})
