"""A layer of a blocked cache: the first tokens and the last ones as they came, those between in blocks in the store.

It stands in transformers' Cache for its DynamicLayer. In the order of tokens: the sink, the middle blocks, the window. A block
leaves the window when more than `local_windows_len` and one block stand in it; then it is packed, once, and its anchors are made.

Legend: B sequences, G heads of keys and values, R = B * G rows, M middle blocks, T tokens of a block, N tokens, D numbers of a key,
V of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ktopt.cache.growing import GrowingLayer
from ktopt.diagnostics import KtoptError
from ktopt.kernels.anchors import Anchors
from ktopt.kernels.blocks import pack, unpack
from ktopt.operators.modules.block_asked import Asked
from ktopt.operators.modules.block_cache import BlockCache
from ktopt.operators.modules.block_choice import Choice
from ktopt.operators.modules.block_window import Window, Zone

ATTRIBUTE = "ktopt_blocks"
"""Where a transformers Cache holds its BlockCache."""


class BlockLayer(DynamicLayer):
    """Layer `number` of what `shared` holds. `append` adds tokens, `leave` lets blocks go; `update` answers all, unpacked. Of
    LATENT layers no values are kept: they are the first V numbers of the keys."""

    LATENT = False

    is_initialized: bool

    def __init__(self, shared: BlockCache, number: int) -> None:
        self.shared, self.number = shared, number
        self.dense, self.leads, self.group = shared.dense(number), shared.leads(number), shared.group(number)
        self.window: Window | None = None
        self.sink: Zone | None = None
        self.anchors: Anchors | None = None
        self.gone = 0
        """Blocks that have left the window."""
        self.scale = 1.0
        self.starts_B: torch.Tensor | None = None
        """Each sequence's first token that is no padding; None where there is none."""
        self.asked = Asked()
        self.choice = Choice()
        super().__init__()
        shared.layers[number] = self

    # transformers reads these; they are made of the zones
    keys = property(lambda self: self._whole(0), lambda self, tensor: self._refuse(tensor))
    values = property(lambda self: self._whole(1), lambda self, tensor: self._refuse(tensor))

    def _refuse(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            raise KtoptError("the tokens of a cache of blocks can't be set: use update and crop")

    @property
    def middle(self) -> int:
        """Blocks in the store."""
        return max(0, self.gone - self.shared.sinks)

    @property
    def sink_tokens(self) -> int:
        """Tokens that stand in the sink."""
        return min(self.gone, self.shared.sinks) * self.shared.tokens

    @property
    def rows(self) -> int:
        assert self.window is not None
        return self.window.shape[0] * self.window.shape[1]

    @property
    def stored(self) -> list[torch.Tensor]:
        """The memory of the layer's own that it holds: without the store's, which is all layers'."""
        return [*(self.window.own if self.window is not None else ()), *(self.sink.memory if self.sink is not None else ())]

    def start(self, batch: int, heads: int, dims: tuple[int, int], device: torch.device) -> None:
        """Make an empty layer for so many sequences and heads of D and V numbers, unless it is made. KtoptError for another number
        of them, and where the budgets don't hold what a step needs."""
        if self.window is not None:
            if self.window.shape != (batch, heads):
                raise KtoptError(f"the cache holds {self.window.shape} sequences and heads, not {(batch, heads)}")
            return
        shared, long = self.shared, self.shared.settings
        key_dim, value_dim = dims
        shared.open(batch * heads, key_dim, value_dim, device=device, shared=self.LATENT)
        kept = [key_dim] if self.LATENT else [key_dim, value_dim]
        least = long.local_windows_len + shared.tokens
        self.window = Window(batch, heads, kept, shared.window_dtype, device, least, shared.staging)
        self.device, self.dtype = device, shared.window_dtype
        with torch.inference_mode(False):
            shape = (batch, heads, shared.sinks * shared.tokens)
            self.sink = Zone([torch.empty(*shape, dim, dtype=self.dtype, device=device) for dim in kept])
            if self.leads:
                self.anchors = Anchors(
                    long.anchor_type,
                    long.anchor_num or 1,
                    self.rows,
                    shared.store.max_blocks,
                    shared.tokens,
                    key_dim,
                    device=device,
                )
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        batch, heads = key_states.shape[:2]
        self.start(batch, heads, (key_states.shape[-1], value_states.shape[-1]), key_states.device)

    def append(self, *states: torch.Tensor) -> None:
        """Add tokens to the window. KtoptError where they are more than the cache may hold."""
        assert self.window is not None
        self.shared.check_room(self.get_seq_length(), states[0].shape[2])
        self.window.append(*states)

    def leave(self) -> None:
        """Let blocks go that are no longer among the last tokens."""
        window, tokens, sink = self.window, self.shared.tokens, self.sink
        assert window is not None
        assert sink is not None
        count = (window.tokens - self.shared.settings.local_windows_len - 1) // tokens
        if count > 0:
            to_sink = max(0, min(count, self.shared.sinks - self.gone))
            for held, states in zip(sink.memory, window.there(), strict=True):
                at = self.gone * tokens
                held[:, :, at : at + to_sink * tokens] = states[:, :, : to_sink * tokens]
            self.gone += to_sink
            window.drop(to_sink * tokens)
            self._store(count - to_sink)
        window.shrink()

    def _store(self, count: int) -> None:
        """Pack the window's first blocks."""
        window, shared, tokens = self.window, self.shared, self.shared.tokens
        assert window is not None
        assert shared.layout is not None
        parts = [each[:, :, : count * tokens].flatten(0, 1) for each in window.there()]
        keys_RXD = parts[0]
        if self.anchors is not None and count:
            self.anchors.add(keys_RXD.unflatten(1, (count, tokens)), self._importance(keys_RXD, count))
        for at in range(0, count * tokens, tokens):
            block = [each[:, at : at + tokens] for each in parts]
            packed = pack(block[0], block[1] if len(block) > 1 else None, shared.layout)
            shared.store.put(self.number, self.middle, packed.cpu())
            self.gone += 1
        window.drop(count * tokens)

    def _importance(self, keys_RXD: torch.Tensor, count: int) -> torch.Tensor | None:
        """What DYNAMIC chooses the next blocks' keys by (R, count, T): how much the last queries attended to them."""
        if self.shared.settings.anchor_type != "DYNAMIC" or not self.asked.queries:
            return None
        importance_RX = self.asked.importance(keys_RXD, self.gone * self.shared.tokens, self.scale, self.starts_R)
        return importance_RX.unflatten(1, (count, -1))

    @property
    def remembers_queries(self) -> bool:
        """Whether a prompt's last queries are looked at later."""
        settings = self.shared.settings
        return self.anchors is not None and (settings.preselect_block or settings.anchor_type == "DYNAMIC")

    def hidden(self, picks_RK: torch.Tensor) -> torch.Tensor | None:
        """How many of the first tokens of these middle blocks are padding, int64 (R, K); None where none is."""
        starts_R, tokens = self.starts_R, self.shared.tokens
        if starts_R is None:
            return None
        return (starts_R.cpu()[:, None] - (self.shared.sinks + picks_RK.long()) * tokens).clamp(0, tokens)

    @property
    def starts_R(self) -> torch.Tensor | None:
        """`starts_B` for each row."""
        assert self.window is not None
        return None if self.starts_B is None else self.starts_B.repeat_interleave(self.window.shape[1])

    def blocks(self, first: int, end: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Middle blocks [first, end) as keys (R, N, D) and values (R, N, V)."""
        return self.unpacked(torch.arange(first, end, dtype=torch.int32).expand(self.rows, -1).contiguous(), dtype)

    def unpacked(self, picks_RK: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Middle blocks, one after another, as keys (R, N, D) and values (R, N, V)."""
        shared, dtype = self.shared, dtype or self.shared.window_dtype
        assert shared.layout is not None
        if shared.gpu is not None:
            keys, values = shared.gpu.unpacked(self.number, picks_RK)
            return keys.to(dtype), values.to(dtype)
        return unpack(shared.store.fetch(self.number, picks_RK), shared.layout, dtype)

    def pair(self, parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of what is kept of some tokens."""
        if len(parts) > 1:
            return parts[0], parts[1]
        assert self.shared.layout is not None
        return parts[0], parts[0][..., : self.shared.layout.value_dim].contiguous()

    def prefetch(self, first: int, end: int) -> None:
        """Have blocks [first, end), as far as they are there, brought into memory while others are read."""
        store = self.shared.store
        if store.disk is not None and first < self.middle:
            store.prefetch(self.number, torch.arange(first, min(end, self.middle), dtype=torch.int32).expand(self.rows, -1))

    def tiles(self, first: int = 0) -> list[tuple[int, int]]:
        """The middle blocks from `first` on, in tiles that are unpacked at a time: begins and ends."""
        step = self.shared.tile_blocks
        return [(at, min(at + step, self.middle)) for at in range(first, self.middle, step)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values (B, G, n, D); answers all that there are, in the dtype of those given."""
        self.lazy_initialization(key_states, value_states)
        self.append(key_states, value_states)
        self.leave()
        return self.keys.to(key_states.dtype), self.values.to(value_states.dtype)

    def _whole(self, which: int) -> torch.Tensor | None:
        if self.window is None:
            return None
        assert self.sink is not None
        sink = self.pair(self.sink.memory)[which][:, :, : self.sink_tokens]
        blocks = [self.blocks(*tile)[which].unflatten(0, self.window.shape) for tile in self.tiles()]
        return torch.cat((sink, *blocks, self.pair(self.window.there())[which]), dim=2)

    def get_seq_length(self) -> int:
        return self.gone * self.shared.tokens + (self.window.tokens if self.window is not None else 0)

    def get_max_length(self) -> int:
        return self.shared.capacity

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: -n of them, as transformers counts it. Blocks that are among the last tokens then come back into
        the window, unpacked."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number, of tokens to remove, not {tokens_to_remove}")
        if self.window is None or tokens_to_remove == 0:
            return
        window, tokens = self.window, self.shared.tokens
        wanted = max(0, self.get_seq_length() + tokens_to_remove)
        window.tokens = max(0, wanted - self.gone * tokens)
        stays = min(self.gone, max(0, wanted - self.shared.settings.local_windows_len) // tokens)
        if stays < self.gone:
            self._bring_back(stays, wanted)
        self.asked.truncate(wanted)
        self.choice = self.choice.after_crop(wanted)
        self.shared.forget_cropped()

    def _bring_back(self, stays: int, wanted: int) -> None:
        """Have only `stays` blocks before the window, of `wanted` tokens in all."""
        assert self.window is not None
        assert self.sink is not None
        tokens, sinks, tile = self.shared.tokens, self.shared.sinks, self.shared.tile_blocks
        until = min(wanted, self.gone * tokens)
        back = [held[:, :, stays * tokens : self.sink_tokens] for held in self.sink.memory]
        first, end = max(0, stays - sinks), max(0, -(-until // tokens) - sinks)
        for at in range(first, end, tile):
            made = self.blocks(at, min(at + tile, end))[: len(back)]
            back = [torch.cat((old, new.unflatten(0, self.window.shape)), dim=2) for old, new in zip(back, made, strict=True)]
        self.window.put_before([each[:, :, : until - stays * tokens] for each in back])
        self.gone = stays
        if self.anchors is not None:
            self.anchors.truncate(self.middle)

    def reset(self) -> None:
        self.window = self.sink = self.anchors = None
        self.gone = 0
        self.asked, self.choice = Asked(), Choice()
        self.is_initialized = False
        self.shared.forget_cropped()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise KtoptError("a cache of blocks belongs to its sequences as they are: beam search needs another cache (num_beams: 1)")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise KtoptError("sequences of a cache of blocks can't be chosen or put in another order")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise KtoptError("sequences of a cache of blocks can't be repeated: give the prompt as often as you want it")


def block_cache(cache: Any) -> BlockCache | None:
    """What a transformers Cache keeps of blocks, with its statistics; None before its first token, and of other caches."""
    return cache.__dict__.get(ATTRIBUTE) if cache is not None else None


def block_layer(cache: Cache, index: int, make: Callable[[], BlockCache], kind: type[BlockLayer] = BlockLayer) -> BlockLayer | None:
    """A cache's layer `index` as one that keeps blocks: transformers' own dynamic layer is replaced, what it holds is taken over.
    `make` is asked once for what the layers have in common. None for layers of other kinds, and for a cache that moves its layers
    off their device."""
    if cache.offloading:
        return None
    if cache.layer_class_to_replicate is DynamicLayer:
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    if isinstance(layer, BlockLayer):
        return layer
    if type(layer) not in (DynamicLayer, GrowingLayer):
        return None
    shared: BlockCache = cache.__dict__.setdefault(ATTRIBUTE, None) or make()
    cache.__dict__[ATTRIBUTE] = shared
    made = kind(shared, shared.indices.index(index))
    if layer.is_initialized and layer.keys.numel():
        made.lazy_initialization(layer.keys, layer.values)
        for keys, values in zip(
            *(each.split(shared.settings.chunk_size, dim=2) for each in (layer.keys, layer.values)), strict=True
        ):
            made.append(keys, values)
            made.leave()
    cache.layers[index] = made
    return made
