"""Attention modules. Latent attention has an implementation of its own; in this version the others are placed, and computed by
transformers' own attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ktopt.graph import Module
from ktopt.operator import OperatorConfig, PlacedConfig, operator, option
from ktopt.operators.latent_memory import Q8_NUMBERS, LatentSizes, kept_bytes, prefers_absorbed, transient_bytes
from ktopt.operators.names import upstream_names
from ktopt.placement import Running, Working, device_kind
from ktopt.plan import Step

REASON = (
    "transformers' attention computes the same function with its own cache; the absorbed, paged and flash variants are not in this "
    "version"
)
SUMMARY = "places the attention module; transformers computes it"

LATENT_ATTENTION = frozenset(
    {
        "AXK1Attention", "AXK2Attention", "BailingHybridAttention", "DeepseekV2Attention", "DeepseekV3Attention",
        "DeepseekV2FlashAttention2", "DeepseekV3FlashAttention2", "DeepseekV32Attention", "Dots3NoteTextAttention",
        "Glm4MoeLiteAttention", "Glm5NextTextAttention", "GlmMoeDsaAttention", "HYV4Attention", "HYV4VLAttention",
        "KimiLinearAttention", "LongcatFlashMLA", "MiniCPM3Attention", "Mistral4Attention", "MistralLarge4TextAttention",
        "YoutuAttention",
    }
)  # fmt: skip
"""Simple names of the classes that hold multi-head latent attention (those with a kv_b_proj)."""


def is_latent(module: Module) -> bool:
    """Whether a module is multi-head latent attention, by its class or one that a rule may name it by."""
    dotted = (*module.cls.mro, *module.alias_classes)
    return any(name.rpartition(".")[2] in LATENT_ATTENTION for name in dotted)


def needs_latent(module: Module, config: OperatorConfig) -> str | None:
    if is_latent(module):
        return None
    return f"{module.path} is a {module.cls.simple_name}, not multi-head latent attention: it has no kv_b_proj"


@dataclass(frozen=True, kw_only=True)
class ChunkedAttentionConfig(PlacedConfig):
    """kwargs of the attention modules that upstream gave a chunk size."""

    chunk_size: int = option(
        1000,
        help="tokens of a prompt that attention takes at a time",
        aliases=("chunck_size",),
        minimum=1,
        ignored="computed by transformers' attention, which takes a prompt whole",
    )


FEW_QUERIES = 16
"""Up to so many new tokens of a sequence count as decoding: the CPU kernel reads the cache for each few of them."""
DEFAULT_CHUNK_TOKENS = 8192
"""Tokens of a prompt that latent attention takes at a time where nothing says otherwise."""


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(PlacedConfig):
    """kwargs of KDeepseekV2Attention."""

    chunk_size: int | None = option(
        None,
        help=f"tokens of a prompt that attention takes at a time, which bounds its memory; {DEFAULT_CHUNK_TOKENS} where it is null",
        aliases=("chunck_size",),
        minimum=1,
    )
    absorb_for_prefill: bool | Literal["auto"] = option(
        False,
        help="true: multiply queries and results by kv_b_proj instead of the context, also in prefill (least memory); false: "
        "expand the context by tiles; auto: whatever takes fewer operations. Decoding is absorbed in any case",
    )
    page_size: int = option(64, help="tokens of a page of the latent cache", minimum=1)
    decode_cache: Literal["latent", "expanded"] = option(
        "latent",
        help="what decoding reads: the latents, or keys and values of all heads that are kept beside them "
        "(57 times the memory in DeepSeek-V3)",
    )
    kv_dtype: Literal["auto", "float16", "bfloat16", "float32", "q8_0"] = option(
        "auto",
        help="what latents are kept in: auto, the dtype that they are computed in; q8_0, 8 bits and a scale for each 32, "
        "about half of bfloat16, on the CPU",
    )


@dataclass(frozen=True, kw_only=True)
class ServedLatentAttentionConfig(ChunkedAttentionConfig):
    """kwargs of flashinfer_attn, which upstream always absorbed."""

    absorb_for_prefill: bool = option(
        False, help="carried by upstream's files", ignored="upstream's class of this name never read it either"
    )


def latent_working(running: Running) -> Working:
    """A latent cache in whole pages, expanded keys and values where they are kept; of a chunk in work its latents, what attention
    takes, and the result."""
    sizes, config = LatentSizes.of(running.model), running.config
    if sizes is None or not isinstance(config, LatentAttentionConfig):
        return Working()
    context, item, batch = running.context, running.item, running.sequences
    kept, read = kept_bytes(sizes.token_numbers, config.kv_dtype, item)
    token = kept + sizes.expanded_numbers * read * (config.decode_cache == "expanded")
    cache = batch * (-(-context // config.page_size) * config.page_size) * token
    queries = min(running.tokens, config.chunk_size or DEFAULT_CHUNK_TOKENS)
    choice = config.absorb_for_prefill
    absorbed = prefers_absorbed(queries, context, sizes) if choice == "auto" else bool(choice)
    absorbed = absorbed or (queries <= FEW_QUERIES and config.decode_cache == "latent")
    quantized = config.kv_dtype == "q8_0"
    passing = running.rows * (sizes.token_numbers + sizes.hidden) * item
    if queries > FEW_QUERIES and any(step.stored for step in running.below if step.path.endswith(".kv_b_proj")):
        passing += sizes.heads * (sizes.nope + sizes.value) * sizes.latent * read  # the matrices as numbers
    taken = transient_bytes(sizes, queries, context, absorbed, item, running.kind, quantized=quantized, read=read, batch=batch)
    return Working(cache, passing + taken)


def no_such_latents(module: Module, step: Step, below: Sequence[Step], model_config: Mapping[str, Any]) -> str | None:
    """Why latents can't be kept as the rule says, on the step's device and with the model's sizes."""
    if step.kwargs.get("kv_dtype") != "q8_0":
        return None
    if device_kind(step.generate_device) != "cpu":
        return f"latents in q8_0 are read by the CPU's kernels alone, and it is on {step.generate_device}: take bfloat16 or float16"
    sizes = LatentSizes.of(model_config)
    if sizes is not None and sizes.token_numbers % Q8_NUMBERS:
        return f"q8_0 keeps blocks of {Q8_NUMBERS} numbers, and a token has {sizes.latent} + {sizes.rope}: take bfloat16 or float16"
    return None


operator(
    "KDeepseekV2Attention",
    aliases=upstream_names("attention", "KDeepseekV2Attention"),
    roles=("attention",),
    implementation="ktopt.operators.modules.attention_mla:KDeepseekV2Attention",
    summary="latent attention over a paged latent cache: absorbed in decoding, absorbed or expanded by tiles in prefill",
    upstream="latent attention with kv_b_proj absorbed in decoding, over a paged latent cache where FlashInfer or Triton ran",
    forward_changed=True,
    refuses=needs_latent,
    refuses_below=no_such_latents,
    working=latent_working,
    takes_two="kv_b_proj",
    families=("deepseek_v2", "deepseek_v3"),
)(LatentAttentionConfig)

for _name, _upstream in {
    "flashinfer_attn": "absorbed latent attention over the batching server's paged cache, by FlashInfer",
    "deepseek_torch_attn": "the same in torch, for tests",
}.items():
    operator(
        _name,
        aliases=upstream_names("balance_serve_attention", _name),
        roles=("attention",),
        summary=SUMMARY,
        upstream=_upstream,
        forward_changed=True,
        reason=REASON,
        refuses=needs_latent,
    )(ServedLatentAttentionConfig)

PAGED = "grouped-query attention over the batching server's paged cache, by FlashInfer"

for _name, _family, _upstream in (
    ("KQwen2MoeAttention", "qwen2_moe", PAGED),
    ("KQwen3MoeAttention", "qwen3_moe", PAGED + "; query and key normed a head"),
    ("KGlm4MoeAttention", "glm4_moe", PAGED),
    ("KQwen3NextAttention", "qwen3_next", PAGED + "; gated output"),
    ("KSmallthinkerAttention", "smallthinker", PAGED),
    ("KQwen3NextGatedDeltaNet", "qwen3_next", "the gated delta rule with states of many requests kept by the batching server"),
):
    operator(
        _name,
        aliases=upstream_names("balance_serve_attention", _name, *(("attention",) if _name == "KQwen3MoeAttention" else ())),
        roles=("attention",),
        summary=SUMMARY,
        upstream=_upstream,
        forward_changed=True,
        reason=REASON,
        families=(_family,),
    )(ChunkedAttentionConfig)
