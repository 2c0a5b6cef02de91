"""Attention over a context in blocks: the sink, the last tokens and a few blocks that matter to the token at hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ktopt.cache.blocks.layout import BlockLayout, anchor_bytes
from ktopt.config import CacheSettings, LongContextSettings, capacity_blocks, contradictions, settle, sink_blocks
from ktopt.graph import Module
from ktopt.operator import OperatorConfig, PlacedConfig, Problem, field_types, operator, option
from ktopt.operators.names import upstream_names
from ktopt.placement import Working

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
HALF_BYTES, FLOAT_BYTES = 2, 4
WINDOW_SLACK_TOKENS = 256
PART_INDEX_BYTES = 25


def needs_interface(module: Module, config: OperatorConfig) -> str | None:
    names = {name.rpartition(".")[2] for name in (*module.cls.mro, *module.alias_classes)}
    if names & ATTENTION:
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
    found = contradictions(settle(LongContextSettings(**written)))
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


def long_context_of(config: OperatorConfig) -> LongContextSettings:
    """What an operator's kwargs say alone, settled."""
    return settle(LongContextSettings(**_given(config, LongContextSettings)))


def _given(config: OperatorConfig, section: type[OperatorConfig]) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name, None) for f in dataclasses.fields(section)}
    return {name: value for name, value in values.items() if value is not None}


def settings_of(
    config: OperatorConfig, long: LongContextSettings | None = None, memory: CacheSettings | None = None
) -> tuple[LongContextSettings, CacheSettings]:
    """What an operator runs by: its own kwargs, else the model's settings, else defaults."""
    return (
        dataclasses.replace(long or LongContextSettings(), **_given(config, LongContextSettings)),
        dataclasses.replace(memory or CacheSettings(), **_given(config, CacheSettings)),
    )


def dynamic_working(
    model_config: Mapping[str, Any], config: OperatorConfig, item: int, context: int, piece: int, kind: str
) -> Working:
    """The bytes of a layer's sink, window, blocks and anchors for a context, whatever tier they lie in, and of a chunk in work."""
    text = model_config.get("text_config") or model_config
    heads = int(text.get("num_attention_heads") or 1)
    rows = int(text.get("num_key_value_heads") or heads)
    dim = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    long = long_context_of(config)
    held_as = {"FP32": "F32", "BF16": "BF16", "FP16": "F16", None: "Q8_0" if dim % 32 == 0 else "F16"}
    layout = BlockLayout(long.block_size, dim, dim, held_as.get(long.kv_type, str(long.kv_type)))
    number = FLOAT_BYTES if long.kv_type == "FP32" else HALF_BYTES
    sinks = sink_blocks(long.block_size)
    window = long.local_windows_len + long.block_size
    blocks = max(0, -(-min(context, long.max_seq_len) // long.block_size) - sinks - window // long.block_size)
    ends = (sinks * long.block_size + window + WINDOW_SLACK_TOKENS) * 2 * dim * number
    anchors = capacity_blocks(long) * anchor_bytes(long.anchor_type, long.anchor_num or 1, long.block_size, dim)
    cache = rows * (ends + blocks * layout.nbytes + anchors)
    tile = rows * min(8192, context) * 2 * dim * number
    asked = piece * heads * dim * FLOAT_BYTES * 3
    return Working(cache, tile + asked + rows * (window + piece) * 2 * dim * number)


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
        working=dynamic_working,
        families=_families,
    )(DynamicAttentionConfig)
