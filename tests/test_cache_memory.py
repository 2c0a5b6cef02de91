"""What a cache of blocks takes by tier, against figures reckoned by hand from the models' dimensions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ktopt
from ktopt.cache.blocks import memory
from ktopt.cache.blocks.memory import CacheBytes, LayerShape, TierBytes, cache_bytes, layer_shapes, middle_blocks, tiers
from ktopt.cli import main
from ktopt.config import CacheSettings, Config, LongContextSettings, ModelSettings, settle
from ktopt.diagnostics import KtoptError
from ktopt.plan import Plan
from ktopt.source import SourceFile
from ktopt.trees import load_tree
from ktopt.working_memory import DISK, fitting_chunk, working_memory

CONTEXT = 139_264
GB = 10**9


def long(**settings: Any) -> LongContextSettings:
    return settle(LongContextSettings(**{"max_seq_len": CONTEXT, "chunk_size": 512, "dense_layer_num": 0, **settings}))


def shapes_of(model: str) -> list[LayerShape]:
    return [shape for shape in layer_shapes(load_tree(model).config) if shape is not None]


def bytes_of(model: str, **settings: Any) -> CacheBytes:
    return cache_bytes(shapes_of(model), long(**settings), CONTEXT)


def test_of_1088_blocks_one_is_the_sink_32_are_the_window_and_one_is_on_its_way() -> None:
    assert middle_blocks(long(), CONTEXT) == 1088 - 1 - 32 - 1
    assert middle_blocks(long(), 128 + 4096 + 128) == 0
    assert middle_blocks(long(), 128 + 4096 + 129) == 1
    assert middle_blocks(long(block_size=16, local_windows_len=512), 2048) == 128 - 4 - 32 - 1  # 64 tokens of sink


@pytest.mark.parametrize(("kv_type", "row"), [("FP16", 256), ("Q8_0", 4 * 34), ("Q4_0", 4 * 18), ("FP32", 512)])
def test_llama_2_70b_at_139k(kv_type: str, row: int) -> None:
    """80 layers of 8 heads of 128 numbers: a block is 128 keys and 128 values of a row."""
    found = bytes_of("llama-2-70b", kv_type=kv_type)
    assert found.blocks == 1054 * 80 * 8 * 2 * 128 * row
    token = 8 * 2 * 128 * (4 if kv_type == "FP32" else 2)
    assert found.windows == 80 * (128 + 4096 + 128 + 256) * token
    assert found.staging == (4096 + 128 + 512 + 8192) * token
    assert found.anchors == 80 * 8 * 1055 * 256


def test_deepseek_v3_at_139k_keeps_one_latent_of_576_numbers_a_layer() -> None:
    half, eight = bytes_of("deepseek-v3", kv_type="FP16"), bytes_of("deepseek-v3", kv_type="Q8_0")
    assert half.blocks == 1054 * 61 * 128 * 1152
    assert eight.blocks == 1054 * 61 * 128 * 18 * 34
    assert half.windows == eight.windows == 61 * (128 + 4096 + 128 + 256) * 1152


@pytest.mark.parametrize(("anchor_type", "each"), [
    ("BLOCK_MEAN", 256), ("QUEST", 512), ("KEY_INT4", 3 * 256 + 128 * (64 + 4 + 16 + 2)),
])  # fmt: skip
def test_anchors_are_of_the_layers_that_choose(anchor_type: str, each: int) -> None:
    assert bytes_of("llama-2-70b", anchor_type=anchor_type).anchors == 80 * 8 * 1055 * each
    fewer = bytes_of("llama-2-70b", anchor_type=anchor_type, dense_layer_num=2, layer_step=4)
    assert fewer.anchors == 20 * 8 * 1055 * each


def test_layers_with_a_sliding_window_keep_that_and_layers_without_attention_nothing() -> None:
    gemma = layer_shapes(load_tree("gemma-3-270m").config)
    assert [shape.window for shape in gemma if shape] == [512, 512, 512, 512, 512, None] * 3
    token = 1 * 2 * 256 * 2
    found = cache_bytes([shape for shape in gemma if shape], long(), CONTEXT)
    assert found.windows == 15 * 512 * token + 3 * (128 + 4096 + 128 + 256) * token
    following = layer_shapes(load_tree("qwen3-next-80b-a3b").config)
    assert [shape is not None for shape in following] == [False, False, False, True] * 12


def test_a_gpu_has_copies_of_blocks_which_lie_in_main_memory_and_then_on_disk() -> None:
    cache = bytes_of("llama-2-70b", kv_type="Q8_0")
    assert cache.copies == bytes_of("llama-2-70b", kv_type="FP16").blocks
    here = cache.always - cache.index
    where = tiers(cache, CacheSettings(cpu_memory_size_GB=16, disk_path="d"), kind="cuda", device_bytes=10 * GB)
    assert (where.device, where.host) == (10 * GB, 16 * GB)
    assert where.disk == cache.blocks + cache.index - 16 * GB
    named = CacheSettings(gpu_memory_size_GB=20, utilization_percentage=0.5, cpu_memory_size_GB=64)
    assert tiers(cache, named, kind="cuda", device_bytes=80 * GB) == TierBytes(10 * GB, cache.blocks + cache.index, 0)
    assert tiers(cache, CacheSettings(), kind="cuda").device == here
    assert tiers(cache, CacheSettings(), kind="cuda", device_bytes=80 * GB).device == here + cache.copies
    assert tiers(cache, CacheSettings(gpu_only=True), kind="cuda").device == here + cache.copies


def test_on_a_cpu_all_of_memory_is_main_memory() -> None:
    cache = bytes_of("smollm2-135m")
    where = tiers(cache, CacheSettings(gpu_memory_size_GB=0.25, cpu_memory_size_GB=0.5, disk_path="d"), kind="cpu")
    assert (where.device, where.host) == (GB // 4, GB // 2)
    assert where.disk == cache.together - 3 * GB // 4
    assert tiers(cache, CacheSettings(), kind="cpu").host == cache.together


@pytest.mark.parametrize(("settings", "kind", "said"), [
    ({"cpu_memory_size_GB": 0.1, "disk_path": "d"}, "cpu", "it may take 0.10 GB there"),
    ({"gpu_memory_size_GB": 1}, "cuda", "it may take 1.00 GB there: raise `gpu_memory_size_GB`, or make"),
    ({"gpu_only": True}, "cuda", "all blocks in 16 bits, and the cache may take 10.00 GB there: write `gpu_only: false`"),
    ({"cpu_memory_size_GB": 16}, "cuda", "28.22 GB of the cache's blocks don't fit into the 16.00 GB .* write `disk_path`"),
])  # fmt: skip
def test_a_cache_that_does_not_fit_is_refused_with_the_numbers(settings: dict[str, Any], kind: str, said: str) -> None:
    with pytest.raises(KtoptError, match=said):
        tiers(bytes_of("llama-2-70b", kv_type="FP16"), CacheSettings(**settings), kind=kind, device_bytes=10 * GB)


def test_the_reckoning_has_the_store_s_own_numbers() -> None:
    from ktopt.cache.blocks import pools, residency

    assert residency.PART_INDEX_BYTES == memory.PART_INDEX_BYTES
    assert pools.SLOT_INDEX_BYTES == memory.SLOT_INDEX_BYTES


def test_layers_that_choose_by_a_prompts_last_queries_keep_128_of_each_head() -> None:
    assert bytes_of("llama-2-70b", preselect_block=True).queries == 80 * 64 * 128 * (128 + 1) * 4
    assert bytes_of("llama-2-70b", anchor_type="QUEST", preselect_block=False).queries == 0
    latent = bytes_of("deepseek-v3", dense_layer_num=1, layer_step=2)
    assert latent.queries == 30 * 128 * 128 * (576 + 1) * 4
    assert latent.always == latent.windows + latent.staging + latent.anchors + latent.queries + latent.index


SMALL_CONFIG = Config(
    ModelSettings(name_or_path="smollm2"),
    given={
        "long_context": {"max_seq_len": 2048, "local_windows_len": 256, "chunk_size": 256, "preselect_block": False,
                         "anchor_type": "KEY_INT4", "max_new_tokens": 0},
        "kvc2": {"cpu_memory_size_GB": 1},
    },
)  # fmt: skip
BLOCKS = """\
version: 1
long_context: {kv_type: KV, local_windows_len: 4096, dense_layer_num: 0}
kvc2: {cpu_memory_size_GB: 16, disk_path: d}
place:
  cpu: "@model.layers.*.mlp"
  "cuda:0": "@**"
rules:
  - {match: "@model.layers.*.self_attn", replace: KDynamicAttention, kwargs: {generate_device: "cuda:0"}}
"""


@pytest.fixture
def plan() -> Plan:
    return ktopt.compile(SourceFile("rules.yaml", BLOCKS.replace("KV", "FP16")), "llama-3.1-8b")


def test_the_memory_of_a_plan_has_the_cache_by_tier(plan: Plan) -> None:
    """Llama-3.1-8B keeps 32 layers of 8 heads of 128 numbers."""
    found = {each.device: each for each in working_memory(plan, CONTEXT)}
    blocks, index = 1054 * 32 * 8 * 2 * 128 * 256, 32 * 8 * (1055 * 13 + 1054 * 12)
    assert list(found) == ["cpu", "cuda:0", DISK]
    assert found["cpu"].cache_bytes == 16 * GB
    assert found[DISK].cache_bytes == blocks + index - 16 * GB
    card = {each.device: each for each in working_memory(plan, CONTEXT, limits={"cuda:0": 24 * GB})}
    assert card["cuda:0"].together == 24 * GB
    assert card[DISK] == found[DISK]


def test_a_chunk_that_lets_the_cache_fit_is_found(plan: Plan) -> None:
    tight = replace(plan, kvc2={"cpu_memory_size_GB": 16, "gpu_memory_size_GB": 0.75})
    chunk = fitting_chunk(tight, CONTEXT // 4, {"cuda:0": 24 * GB})
    assert chunk is not None
    working_memory(tight, CONTEXT // 4, chunk)
    with pytest.raises(KtoptError, match="chunk_size"):
        working_memory(tight, CONTEXT // 4, 2 * chunk)


def test_the_command_shows_the_disk_too(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(BLOCKS.replace("KV", "FP16"))
    assert main(["plan", str(rules), "--model", "llama-3.1-8b", "--context", str(CONTEXT)]) == 0
    out = capsys.readouterr().out
    assert "\ndisk " in out
    rules.write_text(BLOCKS.replace("KV", "Q8_0"))
    assert main(["plan", str(rules), "--model", "llama-3.1-8b", "--context", str(CONTEXT)]) == 0
    assert "\ndisk " not in capsys.readouterr().out


def test_heads_that_q8_0_can_not_hold_are_kept_in_float16_unless_it_is_asked_for() -> None:
    narrow = LayerShape(2, 80, 80)
    assert memory.block_layout(narrow, long()).kind == "F16"
    assert memory.block_layout(LayerShape(2, 96, 96), long()).kind == "Q8_0"
    with pytest.raises(KtoptError, match="Q8_0 keeps 32 numbers together"):
        memory.block_layout(narrow, long(kv_type="Q8_0"))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("anchor_type", ["KEY_INT4", "DYNAMIC"])
def test_a_real_cache_of_smollm2_takes_what_is_reckoned(smollm2: Path, anchor_type: str) -> None:
    """Its store's pools and index, its windows, sinks, anchors, kept queries and memory of the moment, counted as they are; within
    5 %."""
    given = {**SMALL_CONFIG.given, "long_context": {**SMALL_CONFIG.given["long_context"], "anchor_type": anchor_type}}
    model, _ = ktopt.load_model(smollm2, mode="long_context", config=replace(SMALL_CONFIG, given=given))
    with model.ktopt_session as session:
        session.chunk_prefill(torch.arange(2000))
        plan = model.ktopt_plan
        whole, kvc2 = session.attention[0].settings
        assert kvc2.cpu_memory_size_GB == 1
        reckoned = cache_bytes(shapes_of("smollm2-135m"), whole, session.length)
        blocks = session.cache.ktopt_blocks
        layers = blocks.layers.values()
        held = blocks.statistics.device_bytes + blocks.statistics.host_bytes
        windows = sum(tensor.nbytes for layer in layers for tensor in layer.stored)
        anchors = sum(layer.anchors.nbytes for layer in layers if layer.anchors is not None)
        moment = sum(tensor.nbytes for tensor in blocks._staging.values())
        queries = sum(tensor.nbytes for layer in layers for tensor in (layer.asked._queries_BNQD, layer.asked._log_sums_BNQ))
    assert held == pytest.approx(reckoned.blocks, rel=0.05)
    assert windows == pytest.approx(reckoned.windows, rel=0.05)
    assert anchors == pytest.approx(reckoned.anchors, rel=0.05)
    assert blocks.statistics is None
    assert queries == reckoned.queries
    assert bool(queries) is (anchor_type == "DYNAMIC")
    total = held + windows + anchors + moment + queries
    assert total == pytest.approx(reckoned.together - reckoned.index, rel=0.05)
    shown = {each.device: each for each in working_memory(plan, session.length)}
    assert shown["cpu"].cache_bytes == pytest.approx(total, rel=0.05)


def test_the_page_s_table_is_what_is_reckoned() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "long-context.md").read_text(encoding="utf-8")
    rows = [row.strip("| ").split(" | ") for row in page.splitlines() if row.startswith(("| llama-2-70b", "| deepseek-v3"))]
    assert len(rows) == 8
    kvc2 = CacheSettings(gpu_memory_size_GB=12, cpu_memory_size_GB=16, disk_path="d")
    for model, kv_type, anchor_type, *shown in rows:
        settings = settle(LongContextSettings(max_seq_len=CONTEXT, kv_type=kv_type, anchor_type=anchor_type))  # type: ignore[arg-type]
        found = cache_bytes(shapes_of(model), settings, CONTEXT)
        where = tiers(found, kvc2, kind="cuda")
        rest = found.windows + found.staging + found.queries + found.index
        values = (found.blocks, found.anchors, rest, found.together, where.device, where.host, where.disk)
        assert shown == [f"{value / GB:.2f}" for value in values], model
