"""KDeepseekV2Attention: latent attention of DeepSeek V2 and V3 over a paged latent cache, absorbed or expanded by tiles.

It is the original's class with another forward (see mixing.py). Where a call asks for what isn't here (gradients, attention
weights, a cache of another kind), the original's forward runs on the same children and the same cache, and the log says why, once
for each reason.

Legend: B sequences, S new tokens of each, N heads, P qk_nope, R qk_rope, L kv_lora_rank, V v_head_dim, W = L + R.
"""

from __future__ import annotations

import inspect
import logging
from functools import cache, lru_cache
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses import FakeTensor

from ktopt.cache import q8_0
from ktopt.cache.growing import GrowingLayer
from ktopt.cache.latent import LatentLayer, latent_layer
from ktopt.cache.paged.batch import PagedBatch
from ktopt.diagnostics import KtoptError
from ktopt.implementation import BuildContext
from ktopt.kernels import cpu
from ktopt.kernels.cpu import latent
from ktopt.kernels.cuda import latent as cuda_latent
from ktopt.operators.attention import DEFAULT_CHUNK_TOKENS, FEW_QUERIES, LatentAttentionConfig
from ktopt.operators.latent_memory import LatentSizes, heads_a_run, prefers_absorbed
from ktopt.operators.modules import tiled_attention as tiles
from ktopt.operators.modules.latent_linear import KLatentLinear
from ktopt.operators.modules.latent_matrices import EVERY, LatentMatrices
from ktopt.operators.modules.latent_pages import attend_pages
from ktopt.operators.modules.latent_prompt import attend_prompt
from ktopt.operators.modules.linear_cpu import KLinearCPUInfer
from ktopt.operators.modules.masks import first_tokens
from ktopt.operators.modules.mixing import Mixed, mix
from ktopt.operators.modules.tiled_attention import Seen

log = logging.getLogger(__name__)

EXPANDED_TOKENS = 1024
"""Tokens that a cache for decoding (decode_cache: expanded) expands at a time."""


class KDeepseekV2Attention(Mixed, nn.Module):
    """What is mixed into the original's class. `settings` are the rule's kwargs, `kept` what latents are kept in, as LatentLayer
    takes it."""

    OWN = ("_matrices",)
    PAGED = True
    settings: LatentAttentionConfig
    kept: torch.dtype | str | None

    @classmethod
    def build(cls, original: nn.Module, context: BuildContext) -> nn.Module:
        """The original's children under a class of its own; the original itself where its class computes more than DeepSeek's."""
        if not hasattr(original, "kv_b_proj"):
            raise KtoptError(
                f"{context.step.path} is a {type(original).__name__}, not multi-head latent attention: it has no kv_b_proj"
            )
        if not computes_as_deepseek(cast(Any, type(original))):
            log.warning(
                "%s is left as it is: %s computes more than DeepSeek's attention", context.step.path, type(original).__name__
            )
            return original
        if getattr(original.kv_b_proj, "bias", None) is not None:
            raise KtoptError(f"{context.step.path}: kv_b_proj has a bias, which latent attention here doesn't know")
        made = mix(cls, original)
        made.configure(context.config)
        projection = original.kv_b_proj
        if type(projection) is KLinearCPUInfer:
            made._modules["kv_b_proj"] = KLatentLinear(
                projection.in_features, projection.out_features, bias=False, device="meta", dtype=projection.dtype
            ).requires_grad_(False)
        return made  # type: ignore[no-any-return]

    def configure(self, config: Any) -> None:
        """Take a rule's kwargs."""
        self.settings = cast(LatentAttentionConfig, config)
        self.kept = kept_in(self.settings.kv_dtype)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states (B, S, hidden) to the same shape and dtype, and None for weights. Takes what the original takes."""
        try:
            made = self._attention(hidden_states, **kwargs) if not args else "arguments given by position"
        finally:
            self.matrices.forget()
        if isinstance(made, str):
            _say(self.origin.__name__, made)
            return self.origin.forward(self, hidden_states, *args, **kwargs)
        return made, None

    def _attention(
        self,
        x_BSH: torch.Tensor,
        attention_mask: Any = None,
        position_embeddings: Any = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor | str:
        """The result, or why it can't be made here."""
        if reason := self._unfit(x_BSH, position_embeddings, kwargs):
            return reason
        cache = cache if cache is not None else past_key_values
        if isinstance(cache, PagedBatch):
            return attend_pages(self, x_BSH, position_embeddings, cache, FEW_QUERIES)
        batch, queries, _ = x_BSH.shape
        held = self._cache_layer(cache, batch)
        if isinstance(held, str):
            return held
        past = held.get_seq_length()
        mask = _as_4d(attention_mask, batch, queries, past + queries)
        if isinstance(mask, str):
            return mask
        held.check_room(queries)
        latents_BSW = self._latents(x_BSH, position_embeddings)
        held.start(batch, self.kv_lora_rank, self.qk_rope_head_dim, latents_BSW.dtype, latents_BSW.device)
        held.append(latents_BSW)
        chunk = self.settings.chunk_size or DEFAULT_CHUNK_TOKENS
        if queries <= chunk:
            return self._chunk(x_BSH, position_embeddings, held, cache, Seen(past, mask))
        result = torch.empty_like(x_BSH)
        for first in range(0, queries, chunk):
            part = slice(first, first + chunk)
            seen = Seen(past + first, None if mask is None else _up_to(mask[:, :, part], past + min(part.stop, queries)))
            result[:, part] = self._chunk(x_BSH[:, part], _part_of(position_embeddings, part), held, cache, seen)
        return result

    def _chunk(self, x_BSH: torch.Tensor, embeddings: Any, held: LatentLayer, cache: Any, seen: Seen) -> torch.Tensor:
        """The attention of a chunk of tokens, whose latents are in the cache: (B, S, hidden)."""
        query_BSNH = self._queries(x_BSH, embeddings)
        out_BSNV = self._by_kernel(query_BSNH, held, seen)
        if out_BSNV is None:
            out_BSNV = self._by_flashinfer(query_BSNH, held, cache, seen)
        if out_BSNV is None:
            out_BSNV = self._by_tiles(query_BSNH, held, seen)
        result: torch.Tensor = self.o_proj(out_BSNV.flatten(2).to(x_BSH.dtype))
        return result

    def _unfit(self, x: torch.Tensor, position_embeddings: Any, kwargs: dict[str, Any]) -> str:
        """Why this call can't be computed here, or ""."""
        if isinstance(x, FakeTensor):
            return "an input without numbers"
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters())):
            return "a gradient is asked for"
        if self.training and self.attention_dropout:
            return "dropout in training"
        if kwargs.get("output_attentions") or position_embeddings is None:
            return "attention weights are asked for" if kwargs.get("output_attentions") else "no position embeddings"
        weight = self.kv_b_proj._parameters.get("weight")
        if self.kv_b_proj._forward_hooks or self.kv_b_proj._forward_pre_hooks or (weight is not None and weight.device != x.device):
            return "kv_b_proj is on another device, or has a hook"
        return ""

    def _cache_layer(self, cache: Any, batch: int) -> LatentLayer | str:
        """The cache's layer, or one for this call alone."""
        page = self.settings.page_size
        held = LatentLayer(page, self.kept) if cache is None else latent_layer(cache, self.layer_idx, page, self.kept)
        if held is None:
            kind = type(cache.layers[self.layer_idx]).__name__ if self.layer_idx < len(cache.layers) else type(cache).__name__
            return f"a cache of another kind ({kind})"
        if held.is_initialized and held.batch != batch:
            raise KtoptError(f"the cache holds {held.batch} sequences, and {batch} are given: give it as many, or take a new cache")
        return held

    def _queries(self, x_BSH: torch.Tensor, embeddings: Any) -> torch.Tensor:
        """The queries (B, S, N, P + R) of new tokens, rotated."""
        if self.q_lora_rank is None:
            query = self.q_proj(x_BSH)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSH)))
        query_BSNH = query.unflatten(-1, (self.num_heads, -1))
        rope = query_BSNH[..., self.qk_nope_head_dim :]
        rope.copy_(rotated(rope, embeddings, self._interleaved))  # the projection's result is nobody else's
        return query_BSNH

    def _latents(self, x_BSH: torch.Tensor, embeddings: Any) -> torch.Tensor:
        """What the cache keeps of new tokens (B, S, W): the latent, normed, and the key, rotated."""
        latent, key = self.kv_a_proj_with_mqa(x_BSH).split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        turned = rotated(key.unsqueeze(2), embeddings, self._interleaved).squeeze(2)
        return torch.cat((self.kv_a_layernorm(latent), turned), dim=-1)

    @property
    def _interleaved(self) -> bool:
        return bool(getattr(self.config, "rope_interleave", False))

    @property
    def matrices(self) -> LatentMatrices:
        """kv_b_proj as attention reads it."""
        made: LatentMatrices | None = self.__dict__.get("_matrices")
        if made is None or made.projection is not self.kv_b_proj:
            made = LatentMatrices(self.kv_b_proj, self.num_heads, self.qk_nope_head_dim, self.v_head_dim)
            self.__dict__["_matrices"] = made
        return made

    def _by_kernel(self, query_BSNH: torch.Tensor, held: LatentLayer, seen: Seen) -> torch.Tensor | None:
        """The result (B, S, N, V) by the CPU kernel; None where it isn't for it."""
        batch, queries, heads, numbers = query_BSNH.shape
        decoding = queries <= FEW_QUERIES and self.settings.decode_cache == "latent"
        kind = held.kind
        if not decoding or not query_BSNH.is_cpu or kind is None or not cpu.available()[0]:
            return None
        blocks = self.matrices.blocks()
        starts = 0 if seen.mask is None else first_tokens(seen.mask, batch, queries, seen.past, 0)
        if blocks is None or isinstance(starts, str) or self.kv_lora_rank % 16 or self.qk_rope_head_dim % 2:
            return None
        rows_Q3 = _rows(batch, queries, seen.past)
        if isinstance(starts, torch.Tensor):
            rows_Q3 = rows_Q3.clone()
            rows_Q3[:, 1] = torch.minimum(starts.repeat_interleave(queries), rows_Q3[:, 2])
        query_QNH = query_BSNH.reshape(batch * queries, heads, numbers).float().contiguous()
        pool = held.pool.pages_GTW  # type: ignore[union-attr]
        threads = torch.get_num_threads()
        out = latent.absorbed_attention(query_QNH, pool, kind, held.table(), rows_Q3, *blocks, self.scaling, threads)
        return out.view(batch, queries, heads, -1)

    def _by_flashinfer(self, query_BSNH: torch.Tensor, held: LatentLayer, cache: Any, seen: Seen) -> torch.Tensor | None:
        """The result (B, S, N, V) by FlashInfer, absorbed; None where it isn't for it."""
        batch, queries, heads, _ = query_BSNH.shape
        device, widths, tokens = query_BSNH.device, (self.kv_lora_rank, self.qk_rope_head_dim), seen.past + query_BSNH.shape[1]
        reason = cuda_latent.refuses(device, *widths, held.dtype)  # type: ignore[arg-type]
        if not reason and query_BSNH.dtype != held.dtype:
            reason = f"it takes queries and latents of one dtype, and these are {query_BSNH.dtype} and {held.dtype}"
        if reason:
            _say_torch(device.type, reason)
            return None
        if not self.absorbs(queries, tokens) or (queries <= FEW_QUERIES and self.settings.decode_cache == "expanded"):
            return None
        starts = 0 if seen.mask is None else first_tokens(seen.mask, batch, queries, seen.past, 0)
        if isinstance(starts, str):
            return None
        begins = None if isinstance(starts, int) else starts
        planner = _planner(held.__dict__ if cache is None else cache.__dict__, held, device)
        together = heads_a_run(heads, batch * queries, 3 * widths[0] + 2 * widths[1], held.dtype.itemsize)  # type: ignore[union-attr]
        planner.plan(
            (held.layout, queries, tokens, None if begins is None else tuple(begins.tolist())),
            held.table(), queries, tokens, begins, held.page_tokens,
            num_heads=together, head_dim_ckv=widths[0], head_dim_kpe=widths[1], sm_scale=self.scaling,
            q_data_type=query_BSNH.dtype, kv_data_type=held.dtype,
        )  # fmt: skip
        out_BSNV = query_BSNH.new_empty(batch, queries, heads, self.v_head_dim)
        for head in range(0, heads, together):
            part = slice(head, head + together)
            absorbed_BSNW = self._absorbed_query(query_BSNH[:, :, part].transpose(1, 2), part).transpose(1, 2)
            out_QNL = planner.run(absorbed_BSNW.flatten(0, 1), held.pool.pages_GTW, widths[0])  # type: ignore[union-attr]
            out_BNSL = out_QNL.view(batch, queries, together, -1).transpose(1, 2)
            out_BSNV[:, :, part] = self.matrices.values(out_BNSL, part).transpose(1, 2)
        return out_BSNV

    def _by_tiles(self, query_BSNH: torch.Tensor, held: LatentLayer, seen: Seen) -> torch.Tensor:
        """The result (B, S, N, V) by torch."""
        queries = query_BSNH.shape[1]
        end = seen.past + queries if seen.mask is None else seen.mask.shape[3]
        if queries <= FEW_QUERIES and self.settings.decode_cache == "expanded":
            return self._expanded(query_BSNH, self._expanded_cache(held, query_BSNH.dtype), seen, end)
        return self.attend_tiles(query_BSNH, held, seen, end)

    def attend_tiles(self, query_BSNH: torch.Tensor, held: LatentLayer, seen: Seen, end: int) -> torch.Tensor:
        """The result (B, S, N, V) on the first `end` latents, by torch or, expanded, by the kernels for prompts."""
        if self.absorbs(query_BSNH.shape[1], end):
            return self._absorbed(query_BSNH, held, seen, end)
        by_kernel = attend_prompt(query_BSNH, held, self.matrices, seen, self.scaling)
        return self._expanded(query_BSNH, held, seen, end) if by_kernel is None else by_kernel

    def absorbs(self, queries: int, context: int) -> bool:
        """Whether so many queries on so many tokens are computed absorbed: as the rule says, or as takes fewer operations."""
        choice = self.settings.absorb_for_prefill
        if queries <= FEW_QUERIES or choice is True:
            return True
        sizes = LatentSizes(
            self.num_heads, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim, self.kv_lora_rank, self.hidden_size
        )
        return choice == "auto" and prefers_absorbed(queries, context, sizes)

    def _absorbed_query(self, query_BNSH: torch.Tensor, heads: slice = EVERY) -> torch.Tensor:
        """Queries of these heads as they meet the latents themselves: [q_nope W_UK, q_pe], (B, N, S, W)."""
        nope, rope = query_BNSH.split((self.qk_nope_head_dim, self.qk_rope_head_dim), dim=-1)
        return torch.cat((self.matrices.absorb(nope, heads), rope), dim=-1)

    def _absorbed(self, query_BSNH: torch.Tensor, held: LatentLayer, seen: Seen, end: int) -> torch.Tensor:
        """Queries against the latents themselves: all heads share a tile's keys and values."""
        batch, queries, heads, _ = query_BSNH.shape
        step, tokens = tiles.steps(batch, heads, queries, query_BSNH.device.type)

        def tile(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
            latents_B1TW = held.latents(start, stop).unsqueeze(1).to(query_BSNH.dtype)
            return latents_B1TW, latents_B1TW[..., : self.kv_lora_rank]

        out_BSNV = query_BSNH.new_empty(batch, queries, heads, self.v_head_dim)
        for at in range(0, queries, step):
            part = query_BSNH[:, at : at + step].transpose(1, 2)
            last = min(end, seen.past + at + part.shape[2]) if seen.mask is None else end
            out_BSNV[:, at : at + part.shape[2]] = self.matrices.values(
                tiles.attend(self._absorbed_query(part), tiles.in_tiles(last, tokens, tile), self.scaling, seen, at)
            ).transpose(1, 2)
        return out_BSNV

    def _expanded(self, query_BSNH: torch.Tensor, held: Any, seen: Seen, end: int) -> torch.Tensor:
        """Queries against keys and values that are expanded a tile at a time, for all of them."""
        batch, queries, heads, _ = query_BSNH.shape
        step, tokens = tiles.steps(batch, heads, queries, query_BSNH.device.type)
        parts = [query_BSNH[:, at : at + step].transpose(1, 2) for at in range(0, queries, step)]
        sums = [tiles.Softmax() for _ in parts]
        for start in range(0, end, tokens):
            keys, values = self._tile(held, start, min(start + tokens, end), query_BSNH.dtype)
            for at, part, softmax in zip(range(0, queries, step), parts, sums, strict=True):
                if seen.mask is None and start > seen.past + at + part.shape[2] - 1:
                    continue
                softmax.add(seen.hide((part @ keys.mT).float().mul_(self.scaling), at, start), values)
            del keys, values  # before the next tile is made
        out_BSNV = query_BSNH.new_empty(batch, queries, heads, self.v_head_dim)
        for at, part, softmax in zip(range(0, queries, step), parts, sums, strict=True):
            out_BSNV[:, at : at + part.shape[2]] = softmax.result().transpose(1, 2)
        return out_BSNV

    def _tile(self, held: Any, start: int, end: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (B, N, T, P + R) and values (B, N, T, V) of tokens [start, end)."""
        if isinstance(held, GrowingLayer):
            return held.keys[:, :, start:end].to(dtype), held.values[:, :, start:end].to(dtype)
        latent_BTL, rope_BTR = held.latents(start, end).to(dtype).split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        nope, values = self.matrices.expand(latent_BTL)
        return torch.cat((nope, rope_BTR.unsqueeze(1).expand(-1, self.num_heads, -1, -1)), dim=-1), values

    def _expanded_cache(self, held: LatentLayer, dtype: torch.dtype) -> GrowingLayer:
        """Keys and values of all tokens, computed in `dtype`, kept beside the latents in theirs, and brought up to them."""
        if held.expanded is None:
            held.expanded = GrowingLayer()
        done = held.expanded.past
        for start in range(done, held.get_seq_length(), EXPANDED_TOKENS):
            stop = min(start + EXPANDED_TOKENS, held.get_seq_length())
            keys, values = self._tile(held, start, stop, dtype)
            held.expanded.update(keys.to(held.dtype), values.to(held.dtype))
        return held.expanded


def kept_in(kv_dtype: str) -> torch.dtype | str | None:
    """The rule's kv_dtype as a LatentLayer takes it."""
    if kv_dtype == "auto":
        return None
    return q8_0.NAME if kv_dtype == "q8_0" else getattr(torch, kv_dtype)  # type: ignore[no-any-return]


def rotated(x_BSHR: torch.Tensor, embeddings: Any, interleaved: bool) -> torch.Tensor:
    """x rotated as transformers' class of the model does, for its position embeddings: DeepSeek V2's are complex numbers and leave
    pairs side by side, V3's are cos and sin, for halves, or for pairs of which all firsts come to stand before all seconds."""
    if isinstance(embeddings, torch.Tensor):
        pairs = torch.view_as_complex(x_BSHR.float().unflatten(-1, (-1, 2))) * embeddings.unsqueeze(2).to(x_BSHR.device)
        return torch.view_as_real(pairs).flatten(-2).type_as(x_BSHR)
    cos, sin = (each.unsqueeze(2) for each in embeddings)
    half = x_BSHR.shape[-1] // 2
    if interleaved:
        cos, sin = cos[..., :half], sin[..., :half]
        one, two = x_BSHR[..., 0::2], x_BSHR[..., 1::2]
        return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
    return x_BSHR * cos + torch.cat((-x_BSHR[..., half:], x_BSHR[..., :half]), dim=-1) * sin


@cache
def computes_as_deepseek(cls: Any) -> bool:
    """Whether a class's forward is that of transformers' DeepSeek V2 or V3 attention: inherited, or copied word for word."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    def code(owner: Any) -> Any:
        made = inspect.unwrap(owner.forward).__code__
        return made.co_code, made.co_names, made.co_varnames

    return code(cls) in (code(DeepseekV2Attention), code(DeepseekV3Attention))


def _part_of(embeddings: Any, part: slice) -> Any:
    """Position embeddings of some tokens."""
    return embeddings[:, part] if isinstance(embeddings, torch.Tensor) else tuple(each[:, part] for each in embeddings)


def _up_to(mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """Some rows of a mask (B or 1, 1, S, all tokens) without the tokens from `tokens` on, unless one of those is seen."""
    rest = mask[..., tokens:]
    seen = rest if mask.dtype is torch.bool else rest > torch.finfo(mask.dtype).min / 2
    return mask if bool(seen.any()) else mask[..., :tokens]


def _planner(keeper: dict[str, Any], held: LatentLayer, device: torch.device) -> cuda_latent.FlashInferLatent:
    """FlashInfer's plan of a step, which all layers of a cache on that device share: kept with the cache."""
    name = f"ktopt_flashinfer_{device}"
    fixed = () if held.max_tokens is None else (held.batch, held.pool.pages_GTW.shape[:2].numel())  # type: ignore[union-attr]
    if name not in keeper or keeper[name].fixed != fixed:
        keeper[name] = cuda_latent.FlashInferLatent(device, *fixed)
    planner: cuda_latent.FlashInferLatent = keeper[name]
    return planner


@lru_cache(maxsize=64)
def _rows(batch: int, queries: int, past: int) -> torch.Tensor:
    """For the CPU kernel: each query's sequence, first token and end, int64 (B * S, 3)."""
    with torch.inference_mode(False):
        made = torch.zeros(batch, queries, 3, dtype=torch.int64)
        made[:, :, 0] = torch.arange(batch).unsqueeze(1)
        made[:, :, 2] = torch.arange(past + 1, past + queries + 1)
        return made.view(-1, 3)


def _as_4d(mask: Any, batch: int, queries: int, tokens: int) -> torch.Tensor | str | None:
    """An attention mask as (B or 1, 1, S, tokens), None for causality alone, or why it can't be told so."""
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        return f"an attention mask of another kind ({type(mask).__name__})"
    if mask.ndim == 2 and tuple(mask.shape) == (batch, tokens):  # padding alone
        own = torch.arange(tokens - queries, tokens, device=mask.device)
        causal = torch.arange(tokens, device=mask.device) <= own[:, None]
        return causal & mask.bool()[:, None, None, :]
    if mask.ndim == 4 and mask.shape[1] == 1 and mask.shape[2] == queries and mask.shape[3] == tokens:
        return mask
    return f"an attention mask of shape {list(mask.shape)}"


@lru_cache(maxsize=256)
def _say_torch(kind: str, reason: str) -> None:
    if kind == "cuda":
        log.warning("latent attention is computed by torch, not by FlashInfer: %s", reason)


@lru_cache(maxsize=256)
def _say(name: str, reason: str) -> None:
    log.warning("%s runs as transformers has it: %s", name, reason)
