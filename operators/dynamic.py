"""Attention over a context in blocks: the sink, the last tokens and a few blocks that matter to the token at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ktopt.cache.blocks.memory import TILE_TOKENS
from ktopt.config import CacheSettings, LongContextSettings, contradictions, long_settings, settle
from ktopt.graph import Module
from ktopt.operator import OperatorConfig, PlacedConfig, Problem, field_types, operator, option
from ktopt.operators.attention import is_latent
from ktopt.operators.latent_memory import FLOAT_BYTES
from ktopt.operators.model_sizes import ModelSizes
from ktopt.operators.names import upstream_names
from ktopt.placement import Running, Working

ATTENTION = frozenset(
    {
        "ApertusAttention", "ArceeAttention", "CwmAttention", "Dots1Attention", "Ernie4_5Attention", "Ernie4_5_MoeAttention",
        "GemmaAttention", "Gemma3Attention", "Glm4Attention", "Glm4MoeAttention", "GlmAttention", "GraniteAttention",
        "GraniteMoeAttention", "HeliumAttention", "HunYuanDenseV1Attention", "HunYuanMoEV1Attention", "LlamaAttention",
        "MinistralAttention", "MistralAttention", "MixtralAttention", "Olmo2Attention", "Olmo3Attention", "OlmoAttention",
        "OlmoeAttention", "Phi3Attention", "PhiAttention", "Qwen2Attention", "Qwen2MoeAttention",
        "Qwen3Attention", "Qwen3MoeAttention", "SeedOssAttention", "SmolLM3Attention", "StableLmAttention", "Starcoder2Attention",
    }
)  # fmt: skip
"""Simple names of transformers' classes whose attention is causal, over keys and values of their own, through the interface."""


def needs_interface(module: Module, config: OperatorConfig) -> str | None:
    names = {name.rpartition(".")[2] for name in (*module.cls.mro, *module.alias_classes)}
    if names & ATTENTION or is_latent(module):
        return None
    return (
        f"{module.path} is a {module.cls.simple_name}, whose attention isn't known to go through transformers' attention interface "
        "with a causal mask alone"
    )


def _fields() -> list[tuple[str, Any, Any]]:
    """Every key of the sections long_context and kvc2, null where the model's own settings say."""
    made = []
    for section in (LongContextSettings, CacheSettings):
        hints = field_types(section)
        for each in dataclasses.fields(section):
            meta = each.metadata
            given = {key: meta[key] for key in ("aliases", "minimum", "maximum") if meta.get(key) is not None}
            made.append((each.name, hints[each.name] | None, option(None, help=meta["help"], **given)))
    return made


def _cross_check(cls: type[OperatorConfig], given: Mapping[str, Any]) -> list[Problem]:
    """What can't stand together among kwargs that are written."""
    known = {f.name for f in dataclasses.fields(LongContextSettings)}
    written = {name: value for name, value in given.items() if name in known and value is not None}
    found = contradictions(settle(long_settings(written)))
    return [Problem(each.keys[0], "value", f"{each.message}: {each.help}") for each in found if set(each.sure) <= set(written)]


DynamicAttentionConfig: Any = dataclasses.make_dataclass(
    "DynamicAttentionConfig",
    _fields(),
    bases=(PlacedConfig,),
    frozen=True,
    kw_only=True,
    namespace={
        "__doc__": "kwargs of KDynamicAttention: the keys of a config's long_context and kvc2. Null: as the model's settings say, "
        "or else by default.",
        "cross_check": classmethod(_cross_check),
        "__module__": __name__,
    },
)


def _given(config: OperatorConfig, section: type[OperatorConfig]) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name, None) for f in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if value is not None}


def settings_of(
    config: OperatorConfig, long: LongContextSettings | None = None, memory: CacheSettings | None = None
) -> tuple[LongContextSettings, CacheSettings]:
    """What an operator runs by: its own kwargs, else the model's settings, else defaults."""
    given = _given(config, LongContextSettings)
    return (
        long_settings(given) if long is None else dataclasses.replace(long, **given),
        dataclasses.replace(memory or CacheSettings(), **_given(config, CacheSettings)),
    )


ASKED_SCORES = 1 << 22
"""Weights of a prompt's last queries on keys, float32, that are in memory at a time."""


def asked_bytes(running: Running, config: OperatorConfig) -> int:
    """What the first token after a prompt takes where blocks are chosen by the prompt's last queries: their weights on keys, and a
    tile of a layer's keys as they are unpacked and in float32."""
    long, _ = settings_of(config)
    if running.tokens > 1 or not (long.preselect_block or long.anchor_type == "DYNAMIC"):
        return 0
    sizes, tokens = ModelSizes.of(running.model), min(running.context, TILE_TOKENS)
    return FLOAT_BYTES * (ASKED_SCORES + 2 * running.sequences * tokens * sizes.kv_heads * sizes.head_dim)


def block_working(running: Running) -> Working:
    """Of a piece of a prompt: its queries while they are rotated; or in float32, the results so far, those with the next blocks,
    and both merged. The cache, and memory to unpack blocks in, is reckoned for all layers together."""
    sizes = ModelSizes.of(running.model)
    query = running.rows * sizes.heads * sizes.head_dim
    keys = running.rows * 2 * sizes.kv_heads * sizes.head_dim
    passing = max(4 * query * running.item, query * (running.item + 3 * FLOAT_BYTES)) + keys * running.item
    return Working(0, passing + asked_bytes(running, running.config))


IMPLEMENTATION = "ktopt.operators.modules.dynamic_attention:KDynamicAttention"
SUMMARY = (
    "attention over a cache in blocks: the first block, the last tokens, and the blocks that matter most to the token at hand; all "
    "of them where the budget covers all"
)

for _name, _aliases, _upstream, _families in (
    ("KDynamicAttention", (), "had no such operator: KLlamaAttention, with long context set up, did so for Llama alone", ()),
    (
        "KLlamaAttention",
        upstream_names("attention", "KLlamaAttention"),
        "grouped-query attention; with long context set up, over a cache on the CPU that chose the blocks to attend to",
        ("llama",),
    ),
):
    operator(
        _name,
        aliases=_aliases,
        roles=("attention",),
        implementation=IMPLEMENTATION,
        summary=SUMMARY,
        upstream=_upstream,
        forward_changed=bool(_aliases),
        refuses=needs_interface,
        blocks=True,
        working=block_working,
        families=_families,
    )(DynamicAttentionConfig)
