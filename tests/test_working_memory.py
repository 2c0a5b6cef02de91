"""`ktopt plan --context`: weights, cache and transient bytes by device, and the chunk size that makes a plan fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf_fixtures import tiny_model

import ktopt
from ktopt.cli import main
from ktopt.operators.latent_memory import LatentSizes, steps, transient_bytes
from ktopt.working_memory import attention_working, fitting_chunk, prompt_piece, working_memory

RULES = str(Path(__file__).resolve().parents[1] / "rules" / "deepseek-v3" / "24gb.yaml")
V3 = LatentSizes(heads=128, nope=128, rope=64, value=128, latent=512, hidden=7168)
UNTOUCHED = "version: 1\nplace:\n  cpu: '@model.layers.*.mlp.experts'\n  cuda:0: '@**'\nrules: []\n"


def on_card(plan: ktopt.plan.Plan, context: int, chunk: int | None = None):  # type: ignore[no-untyped-def]
    return next(each for each in working_memory(plan, context, chunk) if each.device == "cuda:0")


def test_a_latent_cache_is_as_large_as_its_tokens_in_whole_pages() -> None:
    plan = ktopt.compile(RULES, "deepseek-v3")
    for context in (8192, 20_480, 139_264):
        assert on_card(plan, context).cache_bytes == context * 70_272
    assert on_card(plan, 8193).cache_bytes == (8192 + 64) * 70_272


@pytest.mark.parametrize("context", [8192, 20_480, 139_264])
def test_the_rule_set_for_24_gb_fits_24_gb_and_without_it_nothing_does(context: int, tmp_path: Path) -> None:
    assert on_card(ktopt.compile(RULES, "deepseek-v3"), context).together < 24e9
    rules = tmp_path / "plain.yaml"
    rules.write_text(UNTOUCHED)
    assert fitting_chunk(ktopt.compile(rules, "deepseek-v3"), context, {"cuda:0": int(24e9)}) is None


def test_the_transient_is_bounded_by_the_chunk_and_hardly_grows_with_the_context() -> None:
    plan = ktopt.compile(RULES, "deepseek-v3")
    assert prompt_piece(plan) == 2048
    short, long = on_card(plan, 8192).transient_bytes, on_card(plan, 139_264).transient_bytes
    assert long - short == 2048 * (139_264 - 8192)  # the mask, a byte for each pair
    assert on_card(plan, 139_264, 512).transient_bytes < 0.65 * long  # a tile of scores has its size in any case


def test_attention_that_expands_all_takes_the_memory_that_it_takes(tmp_path: Path) -> None:
    rules = tmp_path / "plain.yaml"
    rules.write_text(UNTOUCHED)
    plain = on_card(ktopt.compile(rules, "deepseek-v3"), 139_264)
    assert plain.transient_bytes > 139_264 * 128 * 448 * 2
    assert plain.cache_bytes == 139_264 * 70_272  # transformers caches latents too


def test_a_larger_chunk_on_the_command_line_wins_over_the_rules() -> None:
    plan = ktopt.compile(RULES, "deepseek-v3", chunk_size=4096)
    assert prompt_piece(plan) == 4096


def test_attention_that_nothing_gives_a_chunk_takes_8192_tokens_of_a_whole_prompt_at_a_time(tmp_path: Path) -> None:
    rules = tmp_path / "r.yaml"
    rules.write_text(
        "version: 1\nplace: {'cuda:0': '@**'}\nrules: [{match: '@model.layers.*.self_attn', replace: KDeepseekV2Attention}]\n"
    )
    plan = ktopt.compile(rules, "deepseek-v3")
    whole, eight = on_card(plan, 20_480).transient_bytes, on_card(plan, 20_480, 8192).transient_bytes
    attention = attention_working(plan, plan.by_path["model.layers.0.self_attn"], 20_480, 20_480).transient_bytes
    assert attention == transient_bytes(V3, 8192, 20_480, False, 2, "cuda") + 20_480 * (576 + 7168) * 2
    row = (8 * 4 * 7168 + 4 * 7168 + 2 * 64) * 2  # of 8 experts' rows four at a time, what is around, and the rotation
    assert whole == 20_480 * row
    assert eight == 8192 * (row + 20_480)  # and a mask


@pytest.mark.parametrize(("spelling", "kwarg", "section", "named", "option", "chunk"), [
    ("chunk_size", None, None, None, None, 8192),
    ("chunk_size", None, 200, None, None, 200),
    ("chunk_size", 300, 200, None, None, 300),
    ("chunck_size", 300, 200, None, None, 300),
    ("chunck_size", 300, 200, 400, None, 400),
    ("chunk_size", 300, 200, 400, 500, 500),
    ("chunk_size", None, None, 400, None, 400),
])  # fmt: skip
def test_the_chunk_is_the_option_s_then_a_named_config_s_then_the_rule_s_then_the_file_s(
    tmp_path: Path, spelling: str, kwarg: int | None, section: int | None, named: int | None, option: int | None, chunk: int
) -> None:
    from transformers import DynamicCache

    rules = tmp_path / "r.yaml"
    rules.write_text(
        "version: 1\nplace: {cpu: '@**'}\n"
        + (f"long_context: {{chunk_size: {section}}}\n" if section else "")
        + "rules:\n- {match: '@model.layers.*.self_attn', replace: KDeepseekV2Attention, kwargs: {"
        + (f"{spelling}: {kwarg}" if kwarg else "")
        + "}}\n"
    )
    config = None
    if named:
        config = tmp_path / "config.yaml"
        config.write_text(f"model: {{name_or_path: m}}\nlong_context: {{chunk_size: {named}}}\n")
    model = ktopt.apply(rules, tiny_model("deepseek_v3"), device="cpu", config=config, chunk_size=option)
    attention, taken = model.model.layers[0].self_attn, []
    attention._chunk = lambda x, *rest: taken.append(x.shape[1]) or type(attention)._chunk(attention, x, *rest)
    tokens = min(chunk + 30, 530)
    model(torch.zeros(1, tokens, dtype=torch.long), cache=DynamicCache())
    assert taken == ([chunk, 30] if tokens > chunk else [tokens])
    said = prompt_piece(ktopt.compile(rules, "deepseek-v3", config=config, chunk_size=option))
    assert said == (chunk if chunk < 8192 else None)  # by its own number attention alone takes a prompt in pieces


def test_the_chunk_that_fits_is_the_largest_power_of_two_that_does() -> None:
    plan = ktopt.compile(RULES, "deepseek-v3")
    weights = on_card(plan, 20_480).weight_bytes
    limit = weights + 20_480 * 70_272 + (1 << 30)
    fits = fitting_chunk(plan, 20_480, {"cuda:0": limit})
    assert fits is not None
    assert on_card(plan, 20_480, fits).together <= limit < on_card(plan, 20_480, 2 * fits).together
    assert fitting_chunk(plan, 20_480, {"cuda:0": weights}) is None


def test_the_command_says_what_does_not_fit_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", RULES, "--model", "deepseek-v3", "--context", "139264", "--chunk_size", "1024"])
    assert "memory for a context of 139,264 tokens, a prompt read 1,024 tokens at a time (chunk_size)" in capsys.readouterr().out
    main(["plan", RULES, "--model", "deepseek-v3", "--context", "-1"])
    assert "a number of tokens from 1 on" in capsys.readouterr().err


PLAIN_24GB = """
version: 1
place: {cpu: "@model.embed_tokens | @model.layers.*.mlp.experts", "cuda:0": "@**"}
rules:
  - {match: "@model.layers.*.self_attn.kv_b_proj", replace: KTransformersLinear, kwargs: {generate_op: KLinearTorch}}
  - match: "class=Linear - @model.layers.*.self_attn.kv_b_proj"
    replace: KTransformersLinear
    kwargs: {generate_op: KLinearMarlin, prefill_op: KLinearMarlin}
"""


def memory_said(rules: str, context: int, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    asked = ["plan", rules, "--model", "deepseek-v3", "--hardware", "1x24GB", "--context", str(context), *options]
    main(asked)
    return " ".join(capsys.readouterr().out.partition("memory for a context")[2].split())


@pytest.mark.parametrize("context", [8192, 20_480, 139_264])
def test_the_table_says_that_the_rule_set_fits_and_with_which_chunk(context: int, capsys: pytest.CaptureFixture[str]) -> None:
    said = memory_said(RULES, context, capsys)
    assert f"of {context:,} tokens, a prompt read 2,048 tokens at a time (chunk_size)" in said
    assert "cuda:0 has 25.8 GB: it fits, with" in said
    assert ("and does with a chunk_size of up to 8192" in said) == (context == 139_264)


def test_the_table_says_which_chunk_makes_it_fit_and_why_none_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "too little; --chunk_size 8192 makes it fit" in memory_said(RULES, 139_264, capsys, "--chunk_size", "16384")
    plain = tmp_path / "plain.yaml"
    plain.write_text(PLAIN_24GB)
    said = memory_said(str(plain), 139_264, capsys)
    assert (
        "no chunk_size makes it fit, since model.layers.0.self_attn and 60 others, which no KDeepseekV2Attention computes" in said
    )
    assert "expand keys and values of the whole context at once: 16.0 GB even for 16 tokens at a time" in said
    plain.write_text(UNTOUCHED)
    assert "no chunk_size makes it fit, since weights and cache alone take" in memory_said(str(plain), 139_264, capsys)


def test_a_chunk_of_tiles_takes_far_less_than_all_scores_at_once() -> None:
    step, tokens = steps(1, 128, 4096, "cuda")
    assert step * tokens * 128 <= 1 << 26
    for absorbed in (True, False):
        assert transient_bytes(V3, 4096, 139_264, absorbed, 2, "cuda") < 128 * 4096 * 139_264 * 4 / 100
