"""What anchors.py computes, in torch: the oracle of the C++ kernels, and what runs where they can't.

The sign index and the keys in 4 bits are kept as the kernels read them, a block's tokens padded with repetitions of the last one to
groups of 32, and a key's numbers with zeros to groups of 16. Both are of what a key differs by from the block's mean, `turned`: a
channel that stands far out is spread over all so, and products with turned queries are those with the keys.

Legend: R rows, M blocks, K blocks at hand, T tokens of a block, P padded tokens, D numbers of a key, H query heads, A anchors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktopt.cache.huge_pages import ask_for_huge_pages

TOKEN_GROUP, NUMBER_GROUP = 32, 16
QUEST_TIMES, SIGN_TIMES, LEAST_ASKED = 3, 2, 16
"""The shortlist of KEY_INT4, in times of the blocks that are asked for: the best by QUEST and the best by signs. It is never
shorter than for 16 blocks, so that a key which signs rank a little lower is still found."""


@dataclass(frozen=True, slots=True)
class Storage:
    """All anchors of a layer. The last three are KEY_INT4's.

    anchors    (R, M, A, D) float16; QUEST's and KEY_INT4's are the smallest and the largest numbers
    mean       (R, M, D) float16
    codes      (R, M, P / 16, D / 8, 16, 4) uint8: byte [i, t, j] has number 8 i + j of token t below, number 8 i + 4 + j above
    steps      (R, M, 2, P) float16: a turned number is code * steps[0] + steps[1]
    signs      (R, M, P / 32, D / 8, 32) uint8: byte [i, t] has a bit for each of the numbers 8 i to 8 i + 7 of token t, 1 for
               those that aren't negative, the first in the lowest bit
    magnitude  (R, M, P) float16: the mean magnitude of a token's turned numbers
    """

    anchor_type: str
    tokens: int
    dim: int
    anchors: torch.Tensor
    mean: torch.Tensor
    codes: torch.Tensor
    steps: torch.Tensor
    signs: torch.Tensor
    magnitude: torch.Tensor

    @classmethod
    def empty(
        cls, anchor_type: str, anchor_num: int, rows: int, max_blocks: int, tokens: int, dim: int, device: str | torch.device
    ) -> Storage:
        """Memory for that many blocks, nothing in it yet."""
        vectors = {"QUEST": 2, "KEY_INT4": 2, "FIXED": anchor_num, "DYNAMIC": anchor_num}.get(anchor_type, 1)
        blocks = max_blocks if anchor_type == "KEY_INT4" else 0
        padded, numbers = padded_to(tokens, TOKEN_GROUP), padded_to(dim, NUMBER_GROUP)

        def half(*shape: int) -> torch.Tensor:
            return ask_for_huge_pages(torch.zeros(shape, dtype=torch.float16, device=device))

        def byte(*shape: int) -> torch.Tensor:
            return ask_for_huge_pages(torch.zeros(shape, dtype=torch.uint8, device=device))

        return cls(
            anchor_type,
            tokens,
            dim,
            half(rows, max_blocks, vectors, dim),
            half(rows, blocks, dim),
            byte(rows, blocks, padded // 16, numbers // 8, 16, 4),
            half(rows, blocks, 2, padded),
            byte(rows, blocks, padded // 32, numbers // 8, 32),
            half(rows, blocks, padded),
        )

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.anchors, self.mean, self.codes, self.steps, self.signs, self.magnitude))


def padded_to(size: int, group: int) -> int:
    """The next multiple of `group`."""
    return -(-size // group) * group


def _hadamard(size: int, device: torch.device) -> torch.Tensor:
    """Sylvester's matrix of a power of two, orthonormal and symmetric: made for each use, which may be under a FakeTensorMode."""
    made = torch.ones(1, 1, device=device)
    while len(made) < size:
        made = torch.cat((torch.cat((made, made), 1), torch.cat((made, -made), 1)))
    return made / size**0.5


def turn_size(dim: int) -> int:
    """How many numbers are turned together: the largest power of two that divides all of them."""
    return dim & -dim


def turned(x: torch.Tensor) -> torch.Tensor:
    """Vectors (..., D) times an orthonormal matrix of Hadamard blocks, which is its own inverse."""
    size = turn_size(x.shape[-1])
    return (x.unflatten(-1, (-1, size)) @ _hadamard(size, x.device)).flatten(-2)


def float16_down(x: torch.Tensor) -> torch.Tensor:
    """The largest float16 that isn't above x."""
    half = x.half()
    bits = half.view(torch.int16)
    below = torch.where(half > 0, bits - 1, torch.where(half < 0, bits + 1, torch.full_like(bits, -0x7FFF)))
    return torch.where(half.float() > x, below.view(torch.float16), half)


def float16_up(x: torch.Tensor) -> torch.Tensor:
    """The smallest float16 that isn't below x."""
    return -float16_down(-x)


def add(storage: Storage, first: int, keys_RKTD: torch.Tensor, importance_RKT: torch.Tensor | None) -> None:
    """The anchors of blocks `first` to `first` + K."""
    keys = keys_RKTD.float()
    storage.anchors[:, first : first + keys.shape[1]] = _vectors(storage, keys, importance_RKT)
    if storage.anchor_type == "KEY_INT4":
        _add_tokens(storage, first, keys)


def _vectors(storage: Storage, keys: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """(R, K, A, D) float16."""
    match storage.anchor_type:
        case "BLOCK_MEAN":
            return keys.mean(2, keepdim=True).half()
        case "BLOCK_MAX":
            return float16_up(keys.amax(2, keepdim=True))
        case "QUEST" | "KEY_INT4":
            return torch.stack((float16_down(keys.amin(2)), float16_up(keys.amax(2))), 2)
    kept = storage.anchors.shape[2]
    if storage.anchor_type == "FIXED" or importance is None:
        at = torch.arange(kept, device=keys.device) * storage.tokens // kept
        return keys[:, :, at].half()
    order = importance.float().flip(2).sort(dim=2, descending=True, stable=True).indices[..., :kept]
    at = (storage.tokens - 1 - order).sort(dim=2).values
    return keys.gather(2, at[..., None].expand(-1, -1, -1, storage.dim)).half()


def _add_tokens(storage: Storage, first: int, keys: torch.Tensor) -> None:
    """The sign index and the keys in 4 bits."""
    rows, count, tokens, dim = keys.shape
    to = slice(first, first + count)
    mean = keys.mean(2).half()
    storage.mean[:, to] = mean
    off = turned(keys - mean.float()[:, :, None])
    low, high = off.amin(3).half(), off.amax(3)
    step = ((high - low.float()) / 15).half()
    wide = step.float().clamp_min(torch.finfo(torch.float16).tiny)[..., None]
    codes = ((off - low.float()[..., None]) / wide).round_().clamp_(0, 15).to(torch.uint8)
    padded, numbers = storage.magnitude.shape[2], padded_to(dim, NUMBER_GROUP)

    def tokens_padded(x: torch.Tensor) -> torch.Tensor:
        return x if padded == tokens else torch.cat((x, x[:, :, -1:].expand(-1, -1, padded - tokens, *x.shape[3:])), 2)

    def all_padded(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tokens_padded(x), (0, numbers - dim))

    nibbles = all_padded(codes).view(rows, count, padded // 16, 16, numbers // 8, 2, 4)
    storage.codes[:, to] = (nibbles[..., 0, :] | nibbles[..., 1, :] << 4).transpose(3, 4)
    storage.steps[:, to, 0] = tokens_padded(step)
    storage.steps[:, to, 1] = tokens_padded(low)
    places = 2 ** torch.arange(8, device=keys.device, dtype=torch.uint8)
    bits = all_padded((off >= 0).to(torch.uint8)).view(rows, count, padded // 32, 32, numbers // 8, 8)
    storage.signs[:, to] = (bits * places).sum(-1, dtype=torch.uint8).transpose(3, 4)
    storage.magnitude[:, to] = tokens_padded(off.abs().mean(3)).half()


def int4_keys(storage: Storage, blocks: int) -> torch.Tensor:
    """The keys of the first `blocks` blocks as they were kept in 4 bits, float32 (R, M, T, D)."""
    codes = storage.codes[:, :blocks]
    nibbles = torch.stack((codes & 15, codes >> 4), -2).transpose(3, 4)  # (R, M, P / 16, 16, D / 8, 2, 4)
    numbers = nibbles.reshape(*codes.shape[:2], storage.magnitude.shape[2], -1)[:, :, : storage.tokens, : storage.dim].float()
    steps = storage.steps[:, :blocks, :, : storage.tokens, None].float()
    return storage.mean[:, :blocks, None].float() + turned(numbers * steps[:, :, 0] + steps[:, :, 1])


def sign_keys(storage: Storage, blocks: int) -> torch.Tensor:
    """The keys of the first `blocks` blocks as the sign index has them, float32 (R, M, T, D)."""
    places = torch.arange(8, device=storage.signs.device)
    bits = (storage.signs[:, :blocks].transpose(3, 4)[..., None] >> places) & 1  # (R, M, P / 32, 32, D / 8, 8)
    padded = storage.magnitude.shape[2]
    signs = bits.reshape(*bits.shape[:2], padded, -1)[:, :, : storage.tokens, : storage.dim].float() * 2 - 1
    return storage.mean[:, :blocks, None].float() + turned(signs * storage.magnitude[:, :blocks, : storage.tokens, None].float())


def scores(
    storage: Storage,
    blocks: int,
    q_RHD: torch.Tensor,
    scale: float,
    count: int | None,
    shared: int,
    allowed_RM: torch.Tensor | None,
    rest_RH: torch.Tensor | None = None,
) -> torch.Tensor:
    """As Anchors.scores."""
    q = q_RHD.float() * scale
    allowed = torch.ones(q.shape[0], blocks, dtype=torch.bool, device=q.device) if allowed_RM is None else allowed_RM
    if shared:
        allowed = allowed.view(-1, shared, blocks).all(1).repeat_interleave(shared, 0)
    if storage.anchor_type == "KEY_INT4":
        if count is not None:
            allowed = _shortlist(storage, blocks, q, count, shared, allowed, rest_RH)
        tokens = torch.einsum("rhd,rmtd->rhmt", q, int4_keys(storage, blocks))
        found = _shares(tokens.logsumexp(3), allowed, rest_RH)
    else:
        found = _vector_scores(storage, blocks, q)
    if shared:
        found = found.view(-1, shared, blocks).sum(1).repeat_interleave(shared, 0)
    return found.masked_fill(~allowed, -torch.inf)


def select(
    storage: Storage,
    blocks: int,
    q_RHD: torch.Tensor,
    scale: float,
    count: int,
    shared: int,
    allowed_RM: torch.Tensor | None,
    rest_RH: torch.Tensor | None = None,
) -> torch.Tensor:
    """As Anchors.select."""
    rows = q_RHD.shape[0]
    if count >= blocks and allowed_RM is None:
        return torch.arange(blocks, dtype=torch.int32, device=q_RHD.device).expand(rows, blocks).contiguous()
    found = scores(storage, blocks, q_RHD, scale, count, shared, allowed_RM, rest_RH)
    if allowed_RM is not None:
        together = allowed_RM.view(-1, shared or 1, blocks).all(1)
        count = min(count, int(together.sum(1).min()))
    return best(found, count).sort(1).values.int()


def best(found_RM: torch.Tensor, count: int) -> torch.Tensor:
    """The blocks with the highest scores, (R, count), the later one where two are equal."""
    blocks = found_RM.shape[1]
    return blocks - 1 - found_RM.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :count]


def _vector_scores(storage: Storage, blocks: int, q: torch.Tensor) -> torch.Tensor:
    """By anchors that are vectors (R, M)."""
    anchors = storage.anchors[:, :blocks].float()
    if storage.anchor_type in ("QUEST", "KEY_INT4"):
        low, high = anchors.unbind(2)
        up, down = q.clamp_min(0).sum(1, keepdim=True), q.clamp_max(0).sum(1, keepdim=True)
        return (up @ high.transpose(1, 2) + down @ low.transpose(1, 2))[:, 0]
    return torch.einsum("rhd,rmad->rhma", q, anchors).amax(3).sum(1)


def _shares(scores_RHM: torch.Tensor, allowed_RM: torch.Tensor, rest_RH: torch.Tensor | None) -> torch.Tensor:
    """Each block's share of the softmax over all allowed blocks and the rest, summed over the heads (R, M)."""
    rest = torch.full_like(scores_RHM[..., 0], -torch.inf) if rest_RH is None else rest_RH.float()
    rest = rest.masked_fill(~rest.isfinite(), -torch.inf)[..., None]
    all_RHX = torch.cat((scores_RHM.masked_fill(~allowed_RM[:, None], -torch.inf), rest), 2)
    return all_RHX.softmax(2).nan_to_num(0)[..., :-1].sum(1)


def _shortlist(
    storage: Storage,
    blocks: int,
    q: torch.Tensor,
    count: int,
    shared: int,
    allowed_RM: torch.Tensor,
    rest_RH: torch.Tensor | None,
) -> torch.Tensor:
    """The blocks that are scored by keys in 4 bits: bool (R, M)."""
    tokens = torch.einsum("rhd,rmtd->rhmt", q, sign_keys(storage, blocks))
    signs = _shares(tokens.amax(3), allowed_RM, rest_RH)
    chosen = torch.zeros_like(allowed_RM)
    for found, times in ((_vector_scores(storage, blocks, q), QUEST_TIMES), (signs, SIGN_TIMES)):
        if shared:
            found = found.view(-1, shared, blocks).sum(1).repeat_interleave(shared, 0)
        chosen.scatter_(1, best(found.masked_fill(~allowed_RM, -torch.inf), times * max(count, LEAST_ASKED)), True)
    return chosen & allowed_RM
