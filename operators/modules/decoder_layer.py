"""KDecoderLayer on the CPU: a decoder layer of transformers that runs as one call of the kernels.

It is the original's class with another forward (see mixing.py). Where a call asks for what the kernels don't do (gradients, a mask
of another shape, a cache of another kind), or a child has been given a hook or has been replaced, the original's forward runs on
the same children and the same cache, and the log says why, once for each reason.

Latent attention runs in the kernels for few tokens, decoding; for a prompt its module computes it, and the kernels the MLP.

Legend: B sequences, S new tokens of each, H hidden size.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.modules import module as torch_module

from ktopt.cache.growing import GrowingLayer, GrowingSlidingLayer, growing_layer
from ktopt.cache.latent import LatentLayer, latent_layer
from ktopt.cache.paged.attention import NAME as PAGES
from ktopt.cache.paged.batch import PagedBatch
from ktopt.diagnostics import KtoptError
from ktopt.implementation import BuildContext
from ktopt.kernels import cpu
from ktopt.operators.layer import LayerConfig
from ktopt.operators.modules.attention_function import NAME as BLOCKS
from ktopt.operators.modules.decoder_blocks import KINDS, run_blocked
from ktopt.operators.modules.decoder_pages import run_paged
from ktopt.operators.modules.dynamic_attention import Blocked, KDynamicAttention
from ktopt.operators.modules.experts_split import KSplitExperts
from ktopt.operators.modules.fusing import Fused, describe
from ktopt.operators.modules.masks import first_tokens
from ktopt.operators.modules.mixing import Mixed, mix
from ktopt.operators.modules.rotation import rotation

log = logging.getLogger(__name__)

LATENT_KINDS = {"F32": 0, "F16": 1, "BF16": 30, "Q8_0": 8}
"""The same of the storage types that a latent cache may have."""
FEW_LATENT = 16
"""Up to so many new tokens of a sequence the kernels attend to latents, absorbed; more go through the attention's module."""

HARMLESS = frozenset(
    {
        "position_ids", "use_cache", "cache_position", "return_dict", "output_attentions", "output_hidden_states",
        "output_router_logits", "num_items_in_batch", "logits_to_keep",
    }
)  # fmt: skip
"""Arguments of a layer that change nothing in it, or that hooks on its children answer."""
IMPLEMENTATIONS = frozenset({"sdpa", "eager", "flash_attention_2", "flash_attention_3", BLOCKS, PAGES, None})
"""Of attention, in transformers: those that compute what the kernels do. Others may be anybody's function."""


class KDecoderLayer(Mixed, nn.Module):
    """What is mixed into the original's class. `kv_dtype` is what keys and values are kept in, `kept` what latents are: a dtype, or
    "Q8_0"."""

    OWN = ("_kernel",)
    PAGED = True
    kv_dtype: torch.dtype
    kept: torch.dtype | str

    @classmethod
    def build(cls, original: nn.Module, context: BuildContext) -> nn.Module:
        """The original's children under a class of its own. KtoptError where the kernels can't run them, with the reason."""
        there, why_not = cpu.available()
        if not there:
            _say("layers are left as they are", why_not)
            return original
        if any(isinstance(child, KSplitExperts) for child in original.modules()):
            return original  # as the plan says
        made = mix(cls, original)
        described = describe(made)
        if isinstance(described, str):
            raise KtoptError(f"can't run this {type(original).__name__} as one: {described}")
        asked = cast(LayerConfig, context.config).kv_dtype
        made.kv_dtype = getattr(torch, asked if asked != "auto" else "bfloat16" if described.latent else "float16")
        made.kept = _kept(made.self_attn, asked, made.kv_dtype)
        return made  # type: ignore[no-any-return]

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As nn.Module's, but past its machinery where nothing is hooked: a layer of a small model takes less time than that."""
        hooked = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or "forward" in self.__dict__
        if not (args or hooked or _hooked_everywhere()):
            made = self._fused(hidden_states, **kwargs)
            if not isinstance(made, str):
                return made
        return super().__call__(hidden_states, *args, **kwargs)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """hidden_states (B, S, H) to the same shape and dtype. Takes what the original's forward takes."""
        made = self._fused(hidden_states, **kwargs) if not args else "arguments given by position"
        if isinstance(made, str):
            _say(f"a layer runs as {self.origin.__name__} has it, not as one kernel", made, id(self.self_attn.config))
            result: torch.Tensor = self.origin.forward(self, hidden_states, *args, **kwargs)
            return result
        return made

    def _fused(
        self,
        x_BSH: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_embeddings: Any = None,
        cache: Any = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> torch.Tensor | str:
        """The result, or why the kernels can't make it."""
        fused: Any = self.__dict__.get("_kernel")
        if fused is None or not fused.stands():
            fused = self.__dict__["_kernel"] = describe(self)
            if isinstance(fused, str):
                del self.__dict__["_kernel"]
                return fused
        if reason := _unfit(x_BSH, fused.hidden) or self._unfit(fused, position_embeddings, others):
            return reason
        cache = cache if cache is not None else past_key_values
        try:
            if isinstance(cache, PagedBatch):
                return self._paged(fused, x_BSH, attention_mask, position_embeddings, cache, others)
            if fused.latent:
                return self._latent(fused, x_BSH, attention_mask, position_embeddings, cache, others)
            if cache is not None and not fused.window and isinstance(self._modules["self_attn"], KDynamicAttention):
                return self._blocked(fused, x_BSH, attention_mask, position_embeddings, cache)
            return self._grouped(fused, x_BSH, attention_mask, position_embeddings, cache)
        except OverflowError as error:
            raise KtoptError(
                f"layer {fused.index}: {error} (more than 65504, or 8.3 million in q8_0): `kv_dtype: bfloat16` or float32 holds it"
            ) from None

    def _unfit(self, fused: Fused, embeddings: Any, others: dict[str, Any]) -> str:
        """Why this call isn't for the kernels, or ""."""
        if fused.run is None:
            return "its weights aren't there"
        if embeddings is None:
            return "no position embeddings"
        if not others.keys() <= HARMLESS and (strange := [n for n in others if n not in HARMLESS and others[n] is not None]):
            return f"the argument {strange[0]}"
        if fused.config._attn_implementation not in IMPLEMENTATIONS:
            return f"the attention implementation {fused.config._attn_implementation}"
        if self.training and fused.dropout:
            return "dropout in training"
        if torch.is_grad_enabled() and fused.watched.asks_gradient():
            return "a gradient is asked for"
        return ""

    def _grouped(self, fused: Fused, x_BSH: torch.Tensor, mask: Any, embeddings: Any, cache: Any) -> torch.Tensor | str:
        batch, tokens, _ = x_BSH.shape
        held = self._cache_layer(cache, fused, batch)
        if isinstance(held, str):
            return held
        seen = 0 if mask is None else first_tokens(mask, batch, tokens, held.past, fused.window, embeddings)
        if isinstance(seen, str):
            return seen
        turn = rotation(embeddings)
        if not turn.fits(batch, tokens, fused.head_dim):
            return "position embeddings of other tokens"
        out = _copied(x_BSH)
        held.room(tokens)
        keys, values = held.stored
        cast(Any, fused.run)(
            out.data_ptr(), batch, tokens, turn.cos, turn.sin, turn.one, KINDS[keys.dtype], keys.data_ptr(), values.data_ptr(),
            keys.shape[2], held.past, 0 if isinstance(seen, int) else seen.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        held.advance(tokens)
        return out if x_BSH.dtype is torch.float32 else out.to(x_BSH.dtype)

    def _blocked(self, fused: Fused, x_BSH: torch.Tensor, mask: Any, embeddings: Any, cache: Any) -> torch.Tensor | str:
        held = self._modules["self_attn"].block_layer(cache)  # type: ignore[union-attr,operator]
        if held is None:
            return _other_cache(cache, fused.index)
        out = _copied(x_BSH)
        if reason := run_blocked(fused, held, out, mask, embeddings):
            return reason
        return out if x_BSH.dtype is torch.float32 else out.to(x_BSH.dtype)

    def _paged(
        self, fused: Fused, x_BSH: torch.Tensor, mask: Any, embeddings: Any, batch: PagedBatch, others: dict[str, Any]
    ) -> torch.Tensor | str:
        long = fused.latent and not batch.probing and max(batch.tokens) > FEW_LATENT
        if long and getattr(self._modules["self_attn"], "PAGED", False):
            return self._prompt(fused, x_BSH, mask, embeddings, batch, others)
        out = _copied(x_BSH)
        if reason := run_paged(fused, batch, self.kept if fused.latent else self.kv_dtype, out, embeddings):
            return reason
        return out if x_BSH.dtype is torch.float32 else out.to(x_BSH.dtype)

    def _cache_layer(self, cache: Any, fused: Fused, batch: int) -> GrowingLayer | str:
        """The cache's layer, or one for this call alone."""
        held = GrowingLayer(self.kv_dtype) if cache is None else growing_layer(cache, fused.index, self.kv_dtype)
        if held is None:
            return _other_cache(cache, fused.index)
        if not held.is_initialized:
            none = torch.empty(batch, fused.kv_heads, 0, fused.head_dim, dtype=self.kv_dtype)
            held.lazy_initialization(none, none)
        keys = held.stored[0]
        fits = all(each.shape[:2] == (batch, fused.kv_heads) and each.shape[3] == fused.head_dim for each in held.stored)
        if keys.dtype not in KINDS or not keys.is_cpu or not fits:
            return f"a cache of {keys.dtype} on {keys.device} of the shape {list(keys.shape)}"
        if isinstance(held, GrowingSlidingLayer) and held.sliding_window != fused.window:
            return f"a cache with a window of {held.sliding_window}"
        return held

    def _latent(
        self, fused: Fused, x_BSH: torch.Tensor, mask: Any, embeddings: Any, cache: Any, others: dict[str, Any]
    ) -> torch.Tensor | str:
        batch, tokens, _ = x_BSH.shape
        if cache is not None and isinstance(self._modules["self_attn"], Blocked):
            return self._prompt(fused, x_BSH, mask, embeddings, cache, others)
        if not isinstance(mask, torch.Tensor | None):
            return f"an attention mask of another kind ({type(mask).__name__})"
        page_tokens = fused.page_tokens
        held = LatentLayer(page_tokens, self.kept) if cache is None else latent_layer(cache, fused.index, page_tokens, self.kept)
        if held is None:
            return _other_cache(cache, fused.index)
        if held.is_initialized and (held.batch != batch or held.kind not in LATENT_KINDS or held.device.type != "cpu"):
            return f"a cache of {held.kind or held.dtype} for {held.batch} sequences on {held.device}"
        latent, rope = cast(tuple[int, int], fused.latent)
        held.start(batch, latent, rope, self.kv_dtype, x_BSH.device)
        if held.widths != (latent, rope):
            return f"a cache of latents of {held.widths}"
        past = held.get_seq_length()
        seen = 0 if mask is None else first_tokens(mask, batch, tokens, past, 0, embeddings) if tokens <= FEW_LATENT else 0
        if isinstance(seen, str):
            return seen
        if tokens > FEW_LATENT:
            return self._prompt(fused, x_BSH, mask, embeddings, cache, others)
        turn = rotation(embeddings)
        if not turn.fits(batch, tokens, rope):
            return "position embeddings of other tokens"
        out = _copied(x_BSH)
        held.reserve(tokens)
        assert held.pool is not None
        pages, table, kind = held.pool.pages_GTW, held.table(), LATENT_KINDS[cast(str, held.kind)]
        cast(Any, fused.run_latent)(
            out.data_ptr(), batch, tokens, turn.cos, turn.sin, turn.one, kind, pages.data_ptr(), pages.shape[0],
            pages.shape[1], table.data_ptr(), table.shape[1], past, 0 if isinstance(seen, int) else seen.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        held.advance(tokens)
        return out if x_BSH.dtype is torch.float32 else out.to(x_BSH.dtype)

    def _prompt(
        self, fused: Fused, x_BSH: torch.Tensor, mask: Any, embeddings: Any, cache: Any, others: dict[str, Any]
    ) -> torch.Tensor:
        """Attention by its module, and the MLP by the kernels."""
        attended = self.self_attn(
            hidden_states=self.input_layernorm(x_BSH),
            attention_mask=mask,
            position_embeddings=embeddings,
            cache=cache,
            **others,
        )[0]
        out = _copied(x_BSH + attended)
        cast(Any, fused.run_mlp)(out.data_ptr(), out.shape[0] * out.shape[1], torch.get_num_threads())
        return out if x_BSH.dtype is torch.float32 else out.to(x_BSH.dtype)


def _kept(attention: Any, asked: str, chosen: torch.dtype) -> torch.dtype | str:
    """What a layer's latents are kept in: as its own kwarg says, else its attention's, else `chosen`. KtoptError where both say and
    differ."""
    below = getattr(attention, "kept", None)
    if below is not None and asked != "auto" and below != chosen:
        raise KtoptError(
            f"KDecoderLayer keeps latents in {chosen} (kv_dtype), and its attention's rule in {below}: leave one of both out"
        )
    return chosen if below is None else below


def _copied(x: torch.Tensor) -> torch.Tensor:
    """A contiguous float32 copy."""
    if x.dtype is torch.float32 and x.is_contiguous():
        return x.clone()
    return torch.empty(x.shape, dtype=torch.float32).copy_(x)


def _hooked_everywhere() -> bool:
    """Whether hooks are set on all modules of the process."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def _other_cache(cache: Any, index: int) -> str:
    kind = type(cache.layers[index]).__name__ if index < len(cache.layers) else type(cache).__name__
    return f"a cache of another kind ({kind})"


def _unfit(x: torch.Tensor, hidden: int) -> str:
    """Why the kernels can't take this input, or ""."""
    if x.dim() != 3 or x.shape[2] != hidden:
        return f"an input of the shape {list(x.shape)}"
    if torch.jit.is_tracing():
        return "a trace is being made"
    if not x.is_cpu or isinstance(x, FakeTensor):
        return "an input that isn't in this machine's memory"
    if x.requires_grad and torch.is_grad_enabled():
        return "a gradient is asked for"
    if x.numel() == 0 or not x.is_floating_point():
        return "an input without numbers"
    return ""


@lru_cache(maxsize=1024)
def _say(what: str, reason: str, model: int = 0) -> None:
    """Log a reason, once for each model."""
    log.warning("%s: %s", what, reason)
