"""What the layers of one blocked cache have in common: settings, the store of their blocks, and the choices that layers share.

Legend: L layers, R rows (a KV head of a sequence), K picks of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ktopt.cache.blocks.disk import DiskTier
from ktopt.cache.blocks.folders import folder_at
from ktopt.cache.blocks.layout import BlockLayout, anchor_bytes
from ktopt.cache.blocks.memory import GB, KIND_OF, SLACK_TOKENS, disk_share, query_bytes, tile_blocks
from ktopt.cache.blocks.statistics import CacheStatistics
from ktopt.cache.blocks.store import BlockStore
from ktopt.config import CacheSettings, LongContextSettings, capacity_blocks, contradictions, settle, sink_blocks
from ktopt.diagnostics import KtoptError
from ktopt.kernels.cpu.block_io import reader
from ktopt.operators.modules.block_device import BlockDevice, pool_bytes
from ktopt.weights.ggml_types import BY_NAME

if TYPE_CHECKING:
    from ktopt.operators.modules.block_layer import BlockLayer

log = logging.getLogger(__name__)

WINDOW_DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}
"""What the last tokens are kept in, by kv_type; float16 for the others."""
PART_BYTES = 64
"""More than what the store's index and slots take for a row's part of a block."""


class BlockCache:
    """The state of one transformers Cache whose layers keep blocks.

    settings   long_context, settled: lengths in whole blocks
    memory     kvc2
    indices    the layers that keep blocks, by their number in the cache; the place in this list is a layer's own number here
    heads      query heads of a row
    """

    def __init__(self, settings: LongContextSettings, memory: CacheSettings, indices: Sequence[int], heads: int = 1) -> None:
        self.settings, self.memory, self.indices = checked(settings), memory, list(indices)
        self.heads = heads
        self.tokens = settings.block_size
        self.layers: dict[int, BlockLayer] = {}
        self.picks: dict[int, torch.Tensor | None] = {}
        self.prompt_picks: dict[int, dict[int, torch.Tensor]] = {}
        self.layout: BlockLayout | None = None
        self.tile_blocks = tile_blocks(self.settings)
        """Blocks that are unpacked at a time."""
        self.model_hash = ""
        """Of the model, where its blocks outlive the session."""
        self.reading = False
        """Whether what comes is a prompt, however few tokens come at a time. Nobody need say so: one token alone is then taken for
        one that is decoded, and a few for guesses."""
        self._store: BlockStore | None = None
        self.device = torch.device("cpu")
        self.gpu: BlockDevice | None = None
        self._staging: dict[torch.dtype, torch.Tensor] = {}

    @cached_property
    def sinks(self) -> int:
        """Blocks at the beginning that are always attended to."""
        return sink_blocks(self.tokens)

    @property
    def capacity(self) -> int:
        """Tokens that the cache can hold."""
        return self.settings.max_seq_len

    @property
    def window_dtype(self) -> torch.dtype:
        return WINDOW_DTYPES.get(self.settings.kv_type or "", torch.float16)

    @property
    def store(self) -> BlockStore:
        assert self._store is not None
        return self._store

    @property
    def statistics(self) -> CacheStatistics | None:
        """Of the store and a GPU's pool; None before the first token."""
        counts = None if self._store is None else self._store.statistics
        return counts if counts is None or self.gpu is None else self.gpu.counted(counts)

    def decodes(self, tokens: int) -> bool:
        """Whether so many new tokens are one that is decoded."""
        return tokens == 1 and not self.reading

    def leads(self, number: int) -> bool:
        """Whether a layer chooses blocks, for itself or for others too."""
        after = number - self.settings.dense_layer_num
        return after >= 0 and after % self.settings.layer_step == 0

    def group(self, number: int) -> int:
        """The layer whose choice a layer shares: its own number where it chooses for itself."""
        after = number - self.settings.dense_layer_num
        return number - after % self.settings.layer_step

    def dense(self, number: int) -> bool:
        """Whether a layer attends to everything."""
        return number < self.settings.dense_layer_num

    def open(self, rows: int, key_dim: int, value_dim: int, *, shared: bool = False, device: torch.device | None = None) -> None:
        """Take memory for so many rows. KtoptError where the budgets don't hold what a step needs, or where layers differ."""
        device = self.device if device is None else device
        layout = BlockLayout(self.tokens, key_dim, value_dim, self._kind(key_dim, value_dim), shared)
        if self._store is not None:
            if (layout, rows) != (self.layout, self._store.rows):
                raise KtoptError(
                    f"layers of one cache keep blocks of one size: {self._store.rows} rows of {self.layout}, not {rows} of {layout}"
                )
            if device != self.device:
                raise KtoptError(f"layers of one cache of blocks are on one device: {self.device}, not {device}")
            return
        reserved = self._reserved_bytes(rows, layout)
        blocks = self.most_middle
        each = rows * (layout.nbytes + PART_BYTES)
        whole = len(self.indices) * blocks * each + 2 * (layout.nbytes + PART_BYTES) + reserved  # two tiers hold whole parts each
        if device.type != "cpu":
            self._open_on_gpu(layout, rows, device, whole - reserved, reserved)
            return
        device_bytes, host = budgets(self.memory, whole)
        on_device = min(device_bytes, reserved)
        self._limit_tiles((device_bytes + host - reserved) // (2 * each))
        self._store = BlockStore(
            layout,
            len(self.indices),
            rows,
            blocks,
            device_bytes=device_bytes,
            host_bytes=host,
            disk=self._disk(device_bytes + host < whole),
            device_reserved_bytes=on_device,
            host_reserved_bytes=reserved - on_device,
            fetch_blocks=max(self.tile_blocks, min(self.settings.second_select_num, blocks)),
        )
        self.layout = layout

    def _open_on_gpu(self, layout: BlockLayout, rows: int, device: torch.device, whole: int, reserved: int) -> None:
        """All blocks, packed, in main memory and on disk, and copies of what is attended to on the device, beside anchors and
        windows."""
        blocks, memory = self.most_middle, self.memory
        select = min(self.settings.second_select_num, blocks)
        copies = reserved + pool_bytes(layout, len(self.indices) * rows * blocks)
        budget = gpu_budget(memory, device, copies)
        if memory.gpu_only and budget < copies:
            raise KtoptError(
                f"gpu_only wants all blocks on {device}: with anchors and windows they take {copies / GB:.2f} GB, and "
                f"{budget / GB:.2f} GB are for them. Raise gpu_memory_size_GB, or lower max_seq_len"
            )
        host = whole if memory.gpu_only else min(whole, int(memory.cpu_memory_size_GB * GB))
        self._limit_tiles(host // (2 * rows * (layout.nbytes + PART_BYTES)))
        store = BlockStore(
            layout,
            len(self.indices),
            rows,
            blocks,
            device_bytes=0,
            host_bytes=host,
            disk=self._disk(host < whole),
            fetch_blocks=max(self.tile_blocks, select),
        )
        self.gpu = BlockDevice(store, device, budget - reserved, select)
        self._limit_tiles(self.gpu.most_blocks)
        self._store, self.layout, self.device = store, layout, device

    def _limit_tiles(self, blocks: int) -> None:
        self.tile_blocks = max(1, min(self.tile_blocks, blocks))

    @property
    def most_middle(self) -> int:
        """Blocks that can come to be in the store."""
        return max(1, capacity_blocks(self.settings) - self.sinks - self.settings.local_windows_len // self.tokens)

    def _disk(self, needed: bool) -> DiskTier | None:
        """The disk tier, where memory doesn't hold all that may come."""
        memory = self.memory
        if memory.disk_path is None or not (needed or memory.prefix_reuse):
            return None
        return DiskTier(
            folder_at(memory.disk_path),
            model_hash=self.model_hash,
            disk_bytes=disk_share(memory),
            durable=memory.prefix_reuse,
            read_parts=reader(),
        )

    def prefetch(self, number: int) -> None:
        """Have a layer's likely blocks, those chosen last for it, brought from disk into memory while another computes."""
        if self._store is not None and self._store.disk is not None and number < len(self.indices) and not self.dense(number):
            picks = self.picks.get(self.group(number))
            if picks is not None:
                self._store.prefetch(number, picks)

    def _kind(self, *dims: int) -> str:
        kind = self.settings.kv_type
        if kind is None:
            together = BY_NAME["Q8_0"].block_elements
            if all(dim % together == 0 for dim in dims):
                return "Q8_0"
            _say(f"heads of {dims[0]} numbers can't be kept in Q8_0, which takes {together} together: blocks are kept in FP16")
            return "F16"
        return KIND_OF[kind]

    def _reserved_bytes(self, rows: int, layout: BlockLayout) -> int:
        """What anchors, windows and kept queries take, and the chunk and the tile in work."""
        long, item = self.settings, self.window_dtype.itemsize
        numbers = layout.key_dim + (0 if layout.shared else layout.value_dim)
        least = long.local_windows_len + self.tokens
        standing = (least + SLACK_TOKENS + self.sinks * self.tokens) * len(self.indices)
        moment = least + long.chunk_size + self.tile_blocks * self.tokens
        choosing = sum(self.leads(number) for number in range(len(self.indices)))
        each = anchor_bytes(long.anchor_type, long.anchor_num or 1, self.tokens, layout.key_dim)
        queries = self.heads * query_bytes(long, layout.key_dim)
        return int(rows * ((standing + moment) * numbers * item + choosing * (self.most_middle * each + queries)))

    def staging(self, numbers: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the moment: so many numbers, which the next who asks gets too."""
        held = self._staging.get(dtype)
        if held is None or held.numel() < numbers:
            with torch.inference_mode(False):
                held = self._staging[dtype] = torch.empty(numbers, dtype=dtype, device=self.device)
        return held[:numbers]

    def check_room(self, seen: int, tokens: int) -> None:
        """KtoptError where so many tokens after those seen are more than the cache may hold: to be called before any work."""
        if seen + tokens > self.capacity:
            there = f"{seen} are there, and {tokens} more" if seen else f"{tokens}"
            raise KtoptError(
                f"the cache holds {self.capacity} tokens (max_seq_len): {there} are too many. Raise max_seq_len, or "
                "shorten the prompt"
            )

    def forget_cropped(self) -> None:
        """Let the store forget blocks that no layer counts any more."""
        if self._store is not None:
            blocks = max((layer.middle for layer in self.layers.values()), default=0)
            self._store.truncate(blocks)
            if self.gpu is not None:
                self.gpu.pool.truncate(blocks)

    def close(self) -> None:
        """Give memory and files back."""
        if self._store is not None:
            self._store.close()
            self._store = self.gpu = None

    def __deepcopy__(self, memo: Any) -> BlockCache:
        raise KtoptError("a cache of blocks can't be copied: read the prompt again, or take tokens back with crop()")

    def __reduce__(self) -> Any:
        raise KtoptError("a cache of blocks can't be pickled: read the prompt again, with prefix_reuse where that takes long")


def checked(settings: LongContextSettings) -> LongContextSettings:
    """The settings, settled. KtoptError where they can't stand together."""
    settled = settle(settings)
    if found := contradictions(settled):
        raise KtoptError("; ".join(f"{each.message}: {each.help}" for each in found))
    return settled


def budgets(memory: CacheSettings, whole: int) -> tuple[int, int]:
    """Bytes of the device's and of the host's tier where the device is the CPU, for a cache that takes `whole` at most."""
    device = memory.gpu_memory_size_GB
    if device is None:
        device_bytes = whole if memory.gpu_only else 0
    else:
        device_bytes = min(whole, int(device * GB * memory.utilization_percentage))
    return device_bytes, 0 if memory.gpu_only else min(whole - device_bytes, int(memory.cpu_memory_size_GB * GB))


def gpu_budget(memory: CacheSettings, device: torch.device, whole: int) -> int:
    """Bytes of a GPU for a cache that takes `whole` there at most: by default what is free."""
    if memory.gpu_memory_size_GB is not None:
        most = int(memory.gpu_memory_size_GB * GB)
    else:
        most = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else whole
    return min(whole, int(most * memory.utilization_percentage))


@lru_cache(maxsize=64)
def _say(what: str) -> None:
    log.warning("%s", what)
