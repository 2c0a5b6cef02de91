"""A blocked cache that begins with blocks of an earlier prompt: what its layers keep beside the store goes into the store's files.

With the first blocks' file go the layers' sinks; with a block's file its anchors, of each layer that chooses.

Legend: R rows, M blocks, T tokens of a block.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch

from ktopt.cache.blocks.memory import disk_share
from ktopt.cache.blocks.prefix import PrefixStore, Tokens
from ktopt.diagnostics import KtoptError
from ktopt.kernels.anchors import Anchors
from ktopt.operators.modules.block_cache import BlockCache
from ktopt.operators.modules.block_layer import ATTRIBUTE, BlockLayer, block_layer


class Prefixes:
    """Of one cache of one sequence, whose layers keep `rows` keys and values of `dims` numbers on a device.

    cache       transformers' Cache, empty
    blocks      what its layers are to have in common; its memory has a disk_path
    folder      where blocks are kept between sessions
    model_hash  of all that keys and values hang on
    kind        of the cache's layers
    """

    def __init__(
        self,
        cache: Any,
        blocks: BlockCache,
        folder: str,
        model_hash: str,
        rows: int,
        dims: tuple[int, int],
        device: torch.device,
        kind: type[BlockLayer] = BlockLayer,
    ) -> None:
        cache.__dict__[ATTRIBUTE] = blocks
        blocks.model_hash = model_hash
        layers = [block_layer(cache, index, lambda: blocks, kind) for index in blocks.indices]
        self.blocks, self.layers = blocks, [layer for layer in layers if layer is not None]
        for layer in self.layers:
            layer.start(1, rows, dims, device)
        quota = disk_share(blocks.memory)
        self.store = PrefixStore(
            folder,
            model_hash=model_hash,
            layout=blocks.store.layout,
            layers=len(self.layers),
            rows=rows,
            sink_blocks=blocks.sinks,
            quota_bytes=quota,
        )

    def match(self, token_ids: Tokens) -> int:
        """How many tokens of a prompt are kept, from its first on."""
        return self.store.match(token_ids) * self.blocks.tokens

    def restore(self, token_ids: Tokens) -> int:
        """Have the empty cache begin with what is kept of a prompt, but for its last ones, which a window must have as they
        came; how many tokens that are. KtoptError, and the cache is empty as before, where the folder can't be used."""
        blocks, token_ids = self.blocks, np.asarray(token_ids, dtype=np.int64)
        most = max(0, len(token_ids) - blocks.settings.local_windows_len - 1) // blocks.tokens
        try:
            taken = self.store.attach(blocks.store, token_ids, most)
        except KtoptError:
            blocks.store.truncate(0)
            raise
        sinks = self._take_sinks(self.store.sink(token_ids)) if taken else False
        middle = self._take_anchors(token_ids, taken - blocks.sinks) if sinks else 0
        if taken and (not sinks or middle < taken - blocks.sinks):
            blocks.store.truncate(middle)
        if not sinks:
            return 0
        for layer in self.layers:
            layer.gone = blocks.sinks + middle
        return (blocks.sinks + middle) * blocks.tokens

    def keep(self, token_ids: Tokens) -> int:
        """Keep the blocks of the cache, which holds these tokens, for later sessions; how many tokens of them are kept."""
        if min(layer.gone for layer in self.layers) < self.blocks.sinks:
            return 0
        sink = b"".join(map(_bytes, self._sinks()))
        return self.store.keep(self.blocks.store, token_ids, sink=sink, extra=self._anchors_of) * self.blocks.tokens

    def _take_sinks(self, data: bytes | None) -> bool:
        """Fill the sinks; whether the bytes are theirs."""
        return _fill(self._sinks(), data)

    def _sinks(self) -> list[torch.Tensor]:
        return [held for layer in self.layers if layer.sink is not None for held in layer.sink.memory]

    def _take_anchors(self, token_ids: Tokens, middle: int) -> int:
        """Fill the anchors of the first `middle` blocks, as far as they are kept; of how many blocks they are."""
        for block in range(middle):
            memory = [part for anchors in self._anchors() for part in _parts(anchors, block)]
            if not _fill(memory, self.store.extra(token_ids, block)):
                middle = block
                break
        for anchors in self._anchors():
            anchors.blocks = middle
        return middle

    def _anchors_of(self, block: int) -> bytes:
        """A block's anchors; nothing where a layer hasn't made them yet."""
        if any(anchors.blocks <= block for anchors in self._anchors()):
            return b""
        return b"".join(_bytes(part) for anchors in self._anchors() for part in _parts(anchors, block))

    def _anchors(self) -> list[Anchors]:
        return [layer.anchors for layer in self.layers if layer.anchors is not None]


def _parts(anchors: Anchors, block: int) -> list[torch.Tensor]:
    """The memory of a block's anchors."""
    held = (getattr(anchors.storage, field.name) for field in fields(anchors.storage))
    return [each[:, block] for each in held if isinstance(each, torch.Tensor) and each.shape[1]]


def _bytes(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return data


def _fill(memory: list[torch.Tensor], data: bytes | None) -> bool:
    """Fill tensors with the bytes of as many; False, and nothing is changed, where they are others."""
    if data is None or len(data) != sum(each.nbytes for each in memory):
        return False
    given, at = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()), 0
    for each in memory:
        each.copy_(given[at : at + each.nbytes].view(each.dtype).view(each.shape))
        at += each.nbytes
    return True
