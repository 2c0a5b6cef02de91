"""Latent attention by FlashInfer: what it is given and how its results are used, on a stand-in that computes in torch; and on the
real one where there is a GPU that it runs on.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from flashinfer_stand_in import BatchMLAPagedAttentionWrapper
from gguf_fixtures import tiny_model
from test_latent_attention import close, logits, replaced
from transformers import DynamicCache

from ktopt.cache.latent import latent_cache
from ktopt.kernels.cuda import latent as cuda_latent
from ktopt.operators import latent_memory
from ktopt.operators.modules import attention_mla
from ktopt.operators.modules.attention_mla import KDeepseekV2Attention

PROMPT = torch.arange(60).view(1, 60) * 7 % 300
REAL = torch.cuda.is_available() and not cuda_latent.refuses(torch.device("cuda:0"), 512, 64, torch.bfloat16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not REAL, reason="no GPU that FlashInfer runs on"))]
SIZES = {"num_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64, "sm_scale": 0.07}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[BatchMLAPagedAttentionWrapper]:
    """FlashInfer as if it ran on the CPU; the wrappers that are made."""
    made: list[BatchMLAPagedAttentionWrapper] = []

    def make(*args: Any, **kwargs: Any) -> BatchMLAPagedAttentionWrapper:
        made.append(BatchMLAPagedAttentionWrapper(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(cuda_latent, "wrapper_class", lambda: make)
    monkeypatch.setattr(cuda_latent, "refuses", lambda *args: "")
    monkeypatch.setattr(KDeepseekV2Attention, "_by_kernel", lambda *args: None)
    return made


@pytest.fixture
def only_flashinfer(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> list[BatchMLAPagedAttentionWrapper]:
    monkeypatch.setattr(KDeepseekV2Attention, "_by_tiles", None)
    return stand_in


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("queries", "tokens"), [(1, 1), (1, 64), (1, 190), (5, 130), (40, 40)])
@pytest.mark.parametrize("starts", [None, (0, 7, 64)])
def test_scattered_pages_and_empty_prefixes_are_told_as_the_wrapper_wants(
    device: str, queries: int, tokens: int, starts: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        monkeypatch.setattr(cuda_latent, "wrapper_class", lambda: BatchMLAPagedAttentionWrapper)
    pages = torch.randn(20, 64, 576).to(device, torch.bfloat16)
    table = torch.randperm(20)[:9].view(3, 3).int().to(device)
    query = torch.randn(3 * queries, 16, 576).to(device, torch.bfloat16)
    planner = cuda_latent.FlashInferLatent(torch.device(device))
    begins = None if starts is None else torch.tensor(starts)
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    planner.plan("step", table, queries, tokens, begins, 64, **SIZES, **dtypes)
    found = planner.run(query, pages, 512).float().cpu().view(3, queries, 16, 512)
    for b in range(3):
        start = min(0 if starts is None else starts[b], tokens)
        context = pages[table[b].long()].flatten(0, 1)[:tokens].double().cpu()
        for q in range(queries):
            seen = context[start : tokens - queries + 1 + q]
            scores = query[b * queries + q].double().cpu() @ seen.T * 0.07
            expected = scores.softmax(-1) @ seen[:, :512] if len(seen) else torch.zeros(16, 512)
            torch.testing.assert_close(found[b, q].double(), expected.double(), rtol=2e-2, atol=2e-2)


def test_prefill_and_decoding_give_transformers_logits(only_flashinfer: Any) -> None:
    model = tiny_model("deepseek_v3")
    ours, cache = replaced(model, absorb_for_prefill=True, page_size=8), DynamicCache(config=model.config)
    pieces = [logits(ours, piece, cache) for piece in PROMPT.split([20, 1, 1, 30, 7, 1], dim=1)]
    close(torch.cat(pieces, dim=1), logits(model, PROMPT))
    assert len(only_flashinfer) == 1
    assert cache.ktopt_flashinfer_cpu.plans == 6  # once a step, not once a layer


def test_a_long_prompt_is_planned_chunk_by_chunk(only_flashinfer: Any) -> None:
    model = tiny_model("deepseek_v3")
    ours, cache = replaced(model, absorb_for_prefill=True, page_size=8, chunk_size=25), DynamicCache(config=model.config)
    close(logits(ours, PROMPT, cache), logits(model, PROMPT))
    assert cache.ktopt_flashinfer_cpu.plans == 2 * 3


def test_many_queries_are_attended_to_by_some_heads_at_a_time(only_flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_memory, "OTHER_SCORES", 4096)
    model = tiny_model("deepseek_v3")
    ours, cache = replaced(model, absorb_for_prefill=True, page_size=8), DynamicCache(config=model.config)
    pieces = [logits(ours, piece, cache) for piece in PROMPT.split([50, 1, 9], dim=1)]
    close(torch.cat(pieces, dim=1), logits(model, PROMPT))
    assert [latent_memory.heads_a_run(4, queries, 3 * 32 + 2 * 16, 4) for queries in (50, 30, 15, 1)] == [1, 2, 4, 4]
    assert latent_memory.heads_a_run(128, 8192, 3 * 512 + 2 * 64, 2) == 1
    assert cache.ktopt_flashinfer_cpu.plans == 3


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("bounded", [False, True])
def test_left_padding_is_told_token_by_token(only_flashinfer: Any, chunk: int | None, bounded: bool) -> None:
    model = tiny_model("deepseek_v3")
    ours = replaced(model, absorb_for_prefill=True, page_size=8, chunk_size=chunk)
    cache = latent_cache(2, max_tokens=24, page_tokens=8) if bounded else DynamicCache(config=model.config)
    ids, mask = torch.zeros(2, 20, dtype=torch.long), torch.ones(2, 20, dtype=torch.long)
    ids[0], ids[1, 9:], mask[1, :9] = PROMPT[0, :20], PROMPT[0, 20:31], 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(ours, ids, cache, attention_mask=mask, position_ids=positions)
    close(found[0], logits(model, PROMPT[:, :20])[0])
    close(found[1, 9:], logits(model, PROMPT[:, 20:31])[0])


def test_long_prompts_are_expanded_where_that_is_asked_for(stand_in: Any) -> None:
    model = tiny_model("deepseek_v3")
    ours, cache = replaced(model, absorb_for_prefill=False), DynamicCache(config=model.config)
    close(logits(ours, PROMPT[:, :40], cache), logits(model, PROMPT[:, :40]))
    assert not stand_in
    logits(ours, PROMPT[:, 40:41], cache)
    assert len(stand_in) == 1


def test_a_bounded_cache_has_fixed_buffers_for_cuda_graphs(only_flashinfer: Any) -> None:
    model = tiny_model("deepseek_v3")
    ours, cache = replaced(model, absorb_for_prefill=True, page_size=8), latent_cache(2, max_tokens=64, page_tokens=8)
    logits(ours, PROMPT[:, :20], cache)
    wrapper = only_flashinfer[0]
    before = [buffer.data_ptr() for buffer in wrapper.buffers or ()]
    close(logits(ours, PROMPT[:, 20:21], cache), logits(model, PROMPT[:, :21])[:, 20:])
    assert [buffer.data_ptr() for buffer in wrapper.buffers or ()] == before
    assert wrapper.buffers is not None
    assert wrapper.buffers[3].tolist() == [21]


def test_copies_of_a_cache_and_fewer_of_its_sequences_are_planned_anew(only_flashinfer: Any) -> None:
    model = tiny_model("deepseek_v3")
    ours, cache = replaced(model, absorb_for_prefill=True, page_size=8), latent_cache(2, max_tokens=64, page_tokens=8)
    ids = torch.cat((PROMPT, PROMPT.flip(1)))
    logits(ours, ids[:, :20], cache)
    copied = copy.deepcopy(cache)
    assert copied.ktopt_flashinfer_cpu is not cache.ktopt_flashinfer_cpu  # type: ignore[attr-defined]
    close(logits(ours, ids[:, 20:22], copied), logits(model, ids[:, :22])[:, 20:])
    cache.batch_select_indices(torch.tensor([1]))
    close(logits(ours, ids[1:, 20:22], cache), logits(model, ids[1:, :22])[:, 20:])


def test_that_torch_computes_on_a_gpu_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    attention_mla._say_torch.cache_clear()
    for _ in range(2):
        attention_mla._say_torch("cuda", "it takes bfloat16 and float16, not torch.float32")
        attention_mla._say_torch("cpu", "it runs on NVIDIA GPUs, not on cpu")
    (record,) = caplog.records
    assert record.getMessage().endswith("computed by torch, not by FlashInfer: it takes bfloat16 and float16, not torch.float32")


def test_what_flashinfer_can_not_compute_is_refused_with_the_reason() -> None:
    assert cuda_latent.refuses(torch.device("cpu"), 512, 64, torch.bfloat16) == "it runs on NVIDIA GPUs, not on cpu"
