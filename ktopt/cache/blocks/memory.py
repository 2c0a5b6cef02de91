"""What a cache of blocks takes at a context of so many tokens, by tier, reckoned from a model's config and the settings: no torch.

A layer's tokens are, in order, the sink's blocks, the middle's, and the window: the last ones and the partial block. A block goes
to the middle when the window holds more than its own length and a block. Middle blocks are of `kv_type` (Q8_0 without one), the
others of float16, or of `kv_type` where that isn't quantised. Sinks, windows and anchors are always in memory, the device's first;
blocks fill what that leaves, then the disk.

Symbols: T tokens of a block, M blocks of the middle, R rows of a layer (a KV head, or all heads' latent).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ktopt.cache.blocks.layout import BlockLayout, anchor_bytes
from ktopt.config import GROUP, QUANTISED, CacheSettings, LongContextSettings, capacity_blocks, sink_blocks
from ktopt.diagnostics import KtoptError

SLACK_TOKENS = 256
"""What a window has room for beyond what it must hold, so that it is moved to the front once in so many tokens."""
TILE_TOKENS = 8192
"""Tokens of blocks that are unpacked at a time."""
KEPT_QUERIES = 128
"""Of a prompt's last tokens, of layers that choose blocks by them, in float32 with a number each."""
KIND_OF = {"FP16": "F16", "BF16": "BF16", "FP32": "F32", "Q8_0": "Q8_0", "Q4_0": "Q4_0"}
"""A block's kind, of `kv_type`."""
PART_INDEX_BYTES, SLOT_INDEX_BYTES = 13, 12
"""What the store's index takes for a block of a row, and for its place in memory."""
GB = 1_000_000_000


@dataclass(frozen=True)
class LayerShape:
    """What a layer keeps of a token: R rows of a key and a value; of latents one row, whose value is a part of its key.

    window   the last tokens that it keeps at all, of a layer with a sliding window; None where it keeps everything
    heads    query heads of a row
    """

    rows: int
    key_dim: int
    value_dim: int
    shared: bool = False
    window: int | None = None
    heads: int = 0

    def token_bytes(self, kind: str) -> int:
        """Of a token of all rows, each number by itself."""
        layout = BlockLayout(1, self.key_dim, self.value_dim, kind, self.shared)
        return self.rows * (layout.key_row_bytes + (0 if self.shared else layout.value_row_bytes))


def layer_shapes(config: Mapping[str, Any]) -> list[LayerShape | None]:
    """Of each layer of a model, by its config; None for one that doesn't attend to tokens. KtoptError where the config doesn't
    tell."""
    config = config.get("text_config") or config
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int):
        raise KtoptError("the model's config has no num_hidden_layers and num_attention_heads, which its cache's bytes hang on")
    if isinstance(latent := config.get("kv_lora_rank"), int):
        return [LayerShape(1, latent + int(config["qk_rope_head_dim"]), latent, shared=True, heads=heads)] * layers
    dim = config.get("head_dim") or int(config.get("hidden_size") or 0) // heads
    rows = config.get("num_key_value_heads") or heads
    whole = LayerShape(rows, dim, dim, heads=heads // rows)
    sliding = replace(whole, window=config.get("sliding_window"))
    shapes = {"full_attention": whole, "sliding_attention": sliding}
    return [shapes.get(kind) for kind in _kinds(config, layers)]


def _kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """transformers' names of what each layer does."""
    if types := config.get("layer_types"):
        return list(types)
    if every := config.get("full_attention_interval"):
        return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    slides = isinstance(config.get("sliding_window"), int) and config.get("use_sliding_window", True) is not False
    return ["sliding_attention" if slides else "full_attention"] * layers


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of all layers together.

    windows   sinks and windows, with what lies unused in their memory, and what layers with a sliding window keep
    staging   memory of the moment: a prompt's chunk, and blocks that are unpacked to be attended to by it
    anchors   what blocks are chosen by
    queries   a prompt's last ones, by which some are
    index     where each part of a block lies
    blocks    the blocks of the middle
    copies    the same blocks as a GPU has copies of them, in 16 bits (in 32 those that are kept so); not counted with the rest
    """

    windows: int = 0
    staging: int = 0
    anchors: int = 0
    index: int = 0
    blocks: int = 0
    copies: int = 0
    queries: int = 0

    @property
    def always(self) -> int:
        """What never leaves memory."""
        return self.windows + self.staging + self.anchors + self.queries + self.index

    @property
    def together(self) -> int:
        return self.always + self.blocks


def middle_blocks(long: LongContextSettings, context: int) -> int:
    """M, of settled settings."""
    block = long.block_size
    return max(0, -(-(context - sink_blocks(block) * block - long.local_windows_len - block) // block))


def most_middle(long: LongContextSettings) -> int:
    """The most that M can come to be, for which anchors and index have room."""
    return max(1, capacity_blocks(long) - sink_blocks(long.block_size) - long.local_windows_len // long.block_size)


def cache_bytes(shapes: Sequence[LayerShape], long: LongContextSettings, context: int) -> CacheBytes:
    """What layers of these shapes take, under settled settings, when they have seen `context` tokens and have room for
    `max_seq_len`."""
    windows = anchors = index = blocks = copies = queries = 0
    block, middle, most = long.block_size, middle_blocks(long, context), most_middle(long)
    near = "F16" if (long.kv_type or "Q8_0") in QUANTISED else KIND_OF[str(long.kv_type)]
    kept = [shape for shape in shapes if shape.window is None]
    for shape in shapes:
        if shape.window is not None:
            windows += min(context, shape.window) * shape.token_bytes(near)
    standing = long.local_windows_len + block
    for number, shape in enumerate(kept):
        windows += (standing + SLACK_TOKENS + sink_blocks(block) * block) * shape.token_bytes(near)
        blocks += middle * shape.rows * block_layout(shape, long).nbytes
        copies += middle * block * shape.token_bytes(near)
        index += most * shape.rows * PART_INDEX_BYTES + middle * shape.rows * SLOT_INDEX_BYTES
        if number >= long.dense_layer_num and (number - long.dense_layer_num) % long.layer_step == 0:
            each = anchor_bytes(long.anchor_type, long.anchor_num or 1, block, shape.key_dim)
            anchors += most * shape.rows * each
            queries += shape.rows * shape.heads * query_bytes(long, shape.key_dim)
    moment = standing + long.chunk_size + tile_blocks(long) * block
    return CacheBytes(
        windows, max((moment * shape.token_bytes(near) for shape in kept), default=0), anchors, index, blocks, copies, queries
    )


def query_bytes(long: LongContextSettings, key_dim: int) -> int:
    """What a layer that chooses blocks keeps of a query head: nothing where they are chosen without a prompt's last queries."""
    return KEPT_QUERIES * (key_dim + 1) * 4 if long.preselect_block or long.anchor_type == "DYNAMIC" else 0


def block_layout(shape: LayerShape, long: LongContextSettings) -> BlockLayout:
    """Of a layer's blocks in the middle: without a kv_type Q8_0, or float16 for heads that it can't hold. KtoptError for a kv_type
    that can't hold them."""
    whole = not (shape.key_dim % GROUP or shape.value_dim % GROUP)
    kind = KIND_OF[long.kv_type or ("Q8_0" if whole else "FP16")]
    return BlockLayout(long.block_size, shape.key_dim, shape.value_dim, kind, shape.shared)


def tile_blocks(long: LongContextSettings) -> int:
    """Blocks that are unpacked at a time."""
    return max(1, min(TILE_TOKENS // long.block_size, capacity_blocks(long)))


@dataclass(frozen=True)
class TierBytes:
    """Bytes of a cache by the memory that they lie in."""

    device: int
    host: int
    disk: int


def tiers(cache: CacheBytes, kvc2: CacheSettings, *, kind: str, device_bytes: int | None = None) -> TierBytes:
    """Where a cache lies, whose layers run on a device of this kind.

    device_bytes   what a device that isn't the CPU has for it, where kvc2 says nothing; None where that isn't known, and copies of
                   blocks are then left out

    On a CPU both tiers are main memory, and what must be in memory may lie in either. A GPU has windows, anchors and the moment's
    memory, and in what is left copies of blocks; the blocks themselves are in main memory and on disk. KtoptError where memory
    doesn't hold what must be there, or where blocks are left over.
    """
    return _on_cpu(cache, kvc2) if kind == "cpu" else _on_gpu(cache, kvc2, device_budget(kvc2, device_bytes))


def _on_cpu(cache: CacheBytes, kvc2: CacheSettings) -> TierBytes:
    device = device_budget(kvc2, cache.together if kvc2.gpu_only else 0) or 0
    main = 0 if kvc2.gpu_only else int(kvc2.cpu_memory_size_GB * GB)
    _check_always(cache.always, device + main, "`gpu_memory_size_GB` or `cpu_memory_size_GB`")
    there = min(cache.always, device)
    host = cache.always - there
    first = min(cache.blocks, device - there)
    second = min(cache.blocks - first, main - host)
    _check_disk(cache.blocks - first - second, f"{in_words(device + main)} of main memory", kvc2)
    return TierBytes(there + first, host + second, cache.blocks - first - second)


def _on_gpu(cache: CacheBytes, kvc2: CacheSettings, budget: int | None) -> TierBytes:
    always = cache.always - cache.index
    budget = always + (cache.copies if kvc2.gpu_only else 0) if budget is None else budget
    _check_always(always, budget, "`gpu_memory_size_GB`")
    if kvc2.gpu_only and always + cache.copies > budget:
        raise KtoptError(
            f"`gpu_only` has {in_words(always + cache.copies)} on the device, all blocks in 16 bits, and the cache may take "
            f"{in_words(budget)} there: write `gpu_only: false`, or a smaller `max_seq_len`"
        )
    main = cache.blocks + cache.index if kvc2.gpu_only else int(kvc2.cpu_memory_size_GB * GB)
    _check_always(cache.index, main, "`cpu_memory_size_GB`")
    held = min(cache.blocks, main - cache.index)
    _check_disk(cache.blocks - held, f"{in_words(main)} of main memory", kvc2)
    return TierBytes(always + min(cache.copies, budget - always), cache.index + held, cache.blocks - held)


def _check_always(needed: int, allowed: int, key: str) -> None:
    if needed > allowed:
        raise KtoptError(
            f"what of the cache must lie in memory takes {in_words(needed)} (first block, local window, a prompt's chunk and last "
            f"queries, anchors, index), and it may take {in_words(allowed)} there: raise {key}, or make `local_windows_len` or "
            "`chunk_size` less"
        )


def _check_disk(left: int, memory: str, kvc2: CacheSettings) -> None:
    if left and kvc2.disk_path is None:
        raise KtoptError(
            f"{in_words(left)} of the cache's blocks don't fit into the {memory} that it may take: raise `cpu_memory_size_GB`, "
            "write `disk_path`, or a smaller `kv_type` or `max_seq_len`"
        )


def device_budget(kvc2: CacheSettings, device_bytes: int | None) -> int | None:
    """What the cache may take of the device's memory: kvc2's own number, or of what the device has for it."""
    if kvc2.gpu_memory_size_GB is not None:
        return int(kvc2.gpu_memory_size_GB * GB * kvc2.utilization_percentage)
    return None if device_bytes is None else int(device_bytes * kvc2.utilization_percentage)


def in_words(count: int) -> str:
    """Bytes for a message: "1.30 GB", "2.5 MB"."""
    return f"{count / GB:.2f} GB" if count >= GB // 10 else f"{count / 1e6:.1f} MB"


def disk_share(kvc2: CacheSettings) -> int | None:
    """Bytes that a session's blocks may take on disk, and kept prefixes too: half of disk_size_GB each where prefixes are kept.
    None for what is free."""
    if kvc2.disk_size_GB is None:
        return None
    return int(kvc2.disk_size_GB * GB) // (2 if kvc2.prefix_reuse else 1)
