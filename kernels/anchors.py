"""What blocks of a long cache are known by, so that a query can choose the few blocks that it attends to.

Each block of each row (a KV head of a sequence; of latents, a sequence) has anchors, made once from its keys. A query scores them
and takes the best blocks. Types:

    BLOCK_MEAN  the mean key
    BLOCK_MAX   the largest number of each channel
    QUEST       the smallest and the largest number of each channel; q * min or q * max, whichever is more, summed over the
                channels, bounds every key's score from above (Quest, arXiv 2406.10774)
    FIXED       `anchor_num` keys, evenly apart
    DYNAMIC     the `anchor_num` keys that mattered most to some queries
    KEY_INT4    every key in 4 bits, turned by a Hadamard matrix that spreads channels which stand far out. A block's score is its
                share of the softmax's mass, that of keys in no block (the sink's and the window's) counted where it is given. Only
                a shortlist is scored so: 3 times as many blocks as are asked for, the best by QUEST, and 2 times as many, the best
                by the keys' signs

A block's score is the largest q.anchor * scale, summed over the row's query heads. Between equal scores the later block is taken.

On the CPU, C++ computes it (kernels/cpu/anchors.py); where that can't, and on other devices, torch (anchors_reference.py).

Legend: R rows, M blocks, T tokens of a block, D numbers of a key, H query heads of a row, K blocks at hand.
"""

from __future__ import annotations

import logging

import torch

from ktopt.cache.blocks.layout import ANCHOR_TYPES
from ktopt.diagnostics import KtoptError
from ktopt.kernels import anchors_reference as reference
from ktopt.kernels.cpu.anchors import KINDS, AnchorKernels, refuses

log = logging.getLogger(__name__)
FLOAT16_LARGEST = 65504.0
_said: set[str] = set()  # reasons that were logged


class Anchors:
    """The anchors of one layer, of up to `max_blocks` blocks of `tokens` tokens, for `rows` rows of keys of `dim` numbers.

    All memory is taken at once, `nbytes` of it. `blocks` says how many blocks are in. KtoptError for sizes that don't fit the type.
    """

    def __init__(
        self,
        anchor_type: str,
        anchor_num: int,
        rows: int,
        max_blocks: int,
        tokens: int,
        dim: int,
        *,
        device: str | torch.device = "cpu",
    ) -> None:
        _check_sizes(anchor_type, anchor_num, rows, max_blocks, tokens, dim)
        self.anchor_type, self.anchor_num = anchor_type, anchor_num
        self.rows, self.max_blocks, self.tokens, self.dim = rows, max_blocks, tokens, dim
        self.blocks = 0
        self.storage = reference.Storage.empty(anchor_type, anchor_num, rows, max_blocks, tokens, dim, device)
        reason = refuses(self.storage) if max_blocks else "there are none"
        if reason and max_blocks and self.storage.anchors.is_cpu and reason not in _said:
            _said.add(reason)
            log.warning("blocks are chosen by torch, slowly: %s", reason)
        self._kernels = None if reason else AnchorKernels(self.storage)

    @property
    def by_shares(self) -> bool:
        """Whether a block scores its share of the softmax, so that `rest` matters."""
        return self.anchor_type == "KEY_INT4"

    @property
    def nbytes(self) -> int:
        """The memory that the anchors of all `max_blocks` blocks take."""
        return self.storage.nbytes

    def add(self, keys_RKTD: torch.Tensor, importance_RKT: torch.Tensor | None = None) -> None:
        """Anchors of K more blocks, after those that are in.

        keys        (R, K, T, D) floating point, rotated as the queries will be
        importance  (R, K, T) floating point: what DYNAMIC chooses its keys by; without it they are FIXED's

        KtoptError, before anything is changed, for other shapes, for more blocks than there is room for, and for numbers that the
        anchors' float16 can't hold.
        """
        rows, count, tokens, dim = keys_RKTD.shape if keys_RKTD.ndim == 4 else (0, 0, 0, 0)
        if (rows, tokens, dim) != (self.rows, self.tokens, self.dim):
            raise KtoptError(
                f"keys {list(keys_RKTD.shape)} are no blocks of {self.tokens} tokens with {self.dim} numbers in {self.rows} rows"
            )
        if self.blocks + count > self.max_blocks:
            raise KtoptError(
                f"there is room for the anchors of {self.max_blocks} blocks, and {self.blocks} + {count} were to be in"
            )
        if importance_RKT is not None and importance_RKT.shape != keys_RKTD.shape[:3]:
            raise KtoptError(f"the importance {list(importance_RKT.shape)} isn't that of keys {list(keys_RKTD.shape)}")
        if count == 0:
            return
        with torch.no_grad():
            self._add(keys_RKTD.detach(), importance_RKT)
        self.blocks += count

    def _add(self, keys_RKTD: torch.Tensor, importance_RKT: torch.Tensor | None) -> None:
        limit = _largest(self.anchor_type, self.dim)
        if self._kernels and self._kernels.adds and keys_RKTD.is_cpu:
            plain = keys_RKTD if str(keys_RKTD.dtype) in KINDS else keys_RKTD.float()
            plain = plain if plain.stride(3) == 1 else plain.contiguous()
            if self._kernels.add(self.blocks, plain, limit, torch.get_num_threads()) >= 0:
                self._refuse(keys_RKTD, limit)
            return
        low, high = keys_RKTD.aminmax()
        if not bool((low >= -limit) & (high <= limit)):
            self._refuse(keys_RKTD, limit)
        reference.add(self.storage, self.blocks, keys_RKTD, importance_RKT)

    def _refuse(self, keys_RKTD: torch.Tensor, limit: float) -> None:
        row, block, token, channel = (~(keys_RKTD.abs() <= limit)).nonzero()[0].tolist()
        raise KtoptError(
            f"{self.anchor_type}'s anchors hold numbers up to {limit:g}, and the key of token {token} in block "
            f"{self.blocks + block}, row {row}, has {float(keys_RKTD[row, block, token, channel]):g}: attend to everything in this "
            "layer (dense_layer_num)"
        )

    def truncate(self, blocks: int) -> None:
        """Forget all but the first `blocks` blocks."""
        self.blocks = min(self.blocks, max(blocks, 0))

    def scores(
        self,
        q_RHD: torch.Tensor,
        scale: float,
        count: int | None = None,
        *,
        shared: int = 0,
        allowed_RM: torch.Tensor | None = None,
        rest_RH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What each block scores, float32 (R, M); -inf for one that isn't allowed.

        With KEY_INT4 and a `count`, only the shortlist for that many blocks is scored, and others have -inf. The rest is as in
        `select`.
        """
        self._check_query(q_RHD, scale, shared, allowed_RM, rest_RH)
        asked = -1 if count is None else count
        with torch.no_grad():
            if self._kernels is None or self.blocks == 0:
                return reference.scores(self.storage, self.blocks, q_RHD, scale, count, shared, allowed_RM, rest_RH)
            out, q, allowed = torch.empty(self.rows, self.blocks), _plain(q_RHD), _bytes(allowed_RM)
            rest = None if rest_RH is None else _plain(rest_RH)
            threads, addresses = torch.get_num_threads(), (_address(allowed), _address(rest))
            self._kernels.scores(self.blocks, q, scale, asked, shared, *addresses, out, threads)
        return out

    def select(
        self,
        q_RHD: torch.Tensor,
        scale: float,
        count: int,
        *,
        shared: int = 0,
        allowed_RM: torch.Tensor | None = None,
        rest_RH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The `count` best blocks of each row, int32 (R, count), ascending.

        q        (R, H, D) floating point: the query heads of each row, rotated
        scale    of q.k, more than 0
        shared   0: each row chooses for itself; G: G rows after one another choose together, by the sum of their scores
        allowed  (R, M) bool: the blocks that may be chosen, of those that are in; what rows choose together all must be allowed
        rest     (R, H) floating point, of KEY_INT4 alone: the logarithm of what each head's softmax sums over keys in no block, so
                 that a head which looks elsewhere has less to say

        All blocks where there are no more than `count`; where fewer are allowed, as many as every row has. KtoptError for shapes
        that don't fit.
        """
        self._check_query(q_RHD, scale, shared, allowed_RM, rest_RH)
        if count < 0:
            raise KtoptError(f"{count} blocks can't be chosen")
        with torch.no_grad():
            if self._kernels is None or self.blocks == 0:
                return reference.select(self.storage, self.blocks, q_RHD, scale, count, shared, allowed_RM, rest_RH)
            room = min(count, self.blocks)
            out, q, allowed = torch.empty(self.rows, room, dtype=torch.int32), _plain(q_RHD), _bytes(allowed_RM)
            rest = None if rest_RH is None else _plain(rest_RH)
            threads, addresses = torch.get_num_threads(), (_address(allowed), _address(rest))
            chosen = self._kernels.choose(self.blocks, q, scale, count, shared, *addresses, out, threads)
        return out if chosen == room else out.view(-1)[: self.rows * chosen].view(self.rows, chosen)

    def _check_query(
        self, q_RHD: torch.Tensor, scale: float, shared: int, allowed_RM: torch.Tensor | None, rest_RH: torch.Tensor | None
    ) -> None:
        if q_RHD.ndim != 3 or q_RHD.shape[0] != self.rows or q_RHD.shape[2] != self.dim or q_RHD.shape[1] < 1:
            raise KtoptError(f"queries {list(q_RHD.shape)} don't fit anchors of {self.rows} rows with {self.dim} numbers")
        if not scale > 0:
            raise KtoptError(f"the scale of scores must be more than 0, not {scale}")
        if shared < 0 or (shared and self.rows % shared):
            raise KtoptError(f"{self.rows} rows can't choose together in groups of {shared}")
        if allowed_RM is not None and allowed_RM.shape != (self.rows, self.blocks):
            raise KtoptError(f"allowed blocks {list(allowed_RM.shape)} aren't those of {self.rows} rows with {self.blocks} blocks")
        if rest_RH is not None and (self.anchor_type != "KEY_INT4" or rest_RH.shape != q_RHD.shape[:2]):
            raise KtoptError(f"sums {list(rest_RH.shape)} aren't those of queries {list(q_RHD.shape)} and anchors KEY_INT4")


def _largest(anchor_type: str, dim: int) -> float:
    """The largest magnitude of a key's number: it must fit float16, and so must turned differences of two."""
    return FLOAT16_LARGEST / 2 / reference.turn_size(dim) ** 0.5 if anchor_type == "KEY_INT4" else FLOAT16_LARGEST


def _plain(x: torch.Tensor) -> torch.Tensor:
    """On the CPU, in float32, one number after the other."""
    return x.to("cpu", torch.float32).contiguous()


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _bytes(allowed_RM: torch.Tensor | None) -> torch.Tensor | None:
    return None if allowed_RM is None else allowed_RM.to("cpu", torch.bool).contiguous()


def _check_sizes(anchor_type: str, anchor_num: int, rows: int, max_blocks: int, tokens: int, dim: int) -> None:
    if anchor_type not in ANCHOR_TYPES:
        raise KtoptError(f"{anchor_type} is no type of anchors: take one of {', '.join(ANCHOR_TYPES)}")
    if min(rows, tokens, dim) < 1 or max_blocks < 0:
        raise KtoptError(f"there are no anchors of {max_blocks} blocks of {tokens} tokens in {rows} rows with {dim} numbers")
    if anchor_type in ("FIXED", "DYNAMIC") and not 1 <= anchor_num <= tokens:
        raise KtoptError(f"{anchor_type} can't keep {anchor_num} keys of a block of {tokens} tokens")
