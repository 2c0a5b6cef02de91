"""The long-context config file (config.yaml) of KTransformers: what its sections hold, with types, defaults and ranges.

    model:         {name_or_path: meta-llama/Llama-2-70b, device: cuda:0}
    long_context:  {max_seq_len: 139000, block_size: 128, ...}
    kvc2:          {gpu_only: false, cpu_memory_size_GB: 64, ...}

Keys are as KTransformers' users write them. config_file.py reads a file and says what is wrong with it; the JSON Schema is made
from these classes. In this version a config is read and checked, and nothing runs by it yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ktopt.operator import OperatorConfig, option
from ktopt.schema import DRAFT, options_schema

AnchorType = Literal["DYNAMIC", "FIXED", "BLOCK_MEAN", "BLOCK_MAX", "QUEST", "KEY_INT4"]
KvType = Literal["FP16", "BF16", "FP32", "Q8_0", "Q4_0"]
QUANTISED = ("Q8_0", "Q4_0")
GROUP = 32
"""Values that share a scale in a quantised cache; a block is whole groups of tokens."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings(OperatorConfig):
    """`model`: which model, and where."""

    name_or_path: str = option(help="the model: a shipped name, a model folder, a config.json or a GGUF file")
    device: str | None = option(None, help="device of what no rule places", device=True)


@dataclass(frozen=True, kw_only=True)
class LongContextSettings(OperatorConfig):
    """`long_context`: the cache's blocks, and which of them are attended to. Lengths are in tokens."""

    max_seq_len: int = option(32000, help="tokens that the cache can hold; rounded up to whole blocks", minimum=1)
    block_size: int = option(128, help="tokens of a block", minimum=1)
    local_windows_len: int = option(4096, help="last tokens that are always attended to; rounded up to whole blocks", minimum=1)
    second_select_num: int = option(
        32, help="blocks attended to beside the first and the local ones", aliases=("second_block_count",), minimum=1
    )
    anchor_type: AnchorType = option(
        "DYNAMIC", help="what stands for a block when blocks are chosen", aliases=("representative_type",)
    )
    anchor_num: int | None = option(
        None, help="keys that stand for a block; by default 2 for QUEST, else 1", aliases=("representative_num",), minimum=1
    )
    kv_type: KvType | None = option(
        None, help="what keys and values are held in; by default FP16 in the device's memory and Q8_0 elsewhere"
    )
    dense_layer_num: int = option(2, help="first layers, which attend to everything", minimum=0)
    preselect_block: bool = option(True, help="choose once by the prompt's last tokens, and then only within that choice")
    preselect_block_count: int = option(32, help="blocks of that first choice", minimum=1)
    head_select_mode: Literal["SHARED", "SEPARATE"] = option(
        "SEPARATE", help="one choice for all heads, or one for each key and value head"
    )
    layer_step: int = option(1, help="layers that share one choice", minimum=1)
    token_step: int | None = option(1, help="tokens that share one choice; null is 1", minimum=1)
    chunk_size: int = option(4096, help="tokens of a prompt that are computed at a time", minimum=1)
    prefill: Literal["exact", "sparse"] = option("exact", help="whether a prompt attends to everything or to chosen blocks")


@dataclass(frozen=True, kw_only=True)
class CacheSettings(OperatorConfig):
    """`kvc2`: where blocks of the cache may lie. Sizes are in decimal gigabytes."""

    gpu_only: bool = option(False, help="keep every block in the device's memory")
    gpu_memory_size_GB: float | None = option(
        None, help="bytes that the cache may take there; by default what the model leaves", minimum=0
    )
    utilization_percentage: float = option(1.0, help="share of the device's memory that the cache may take", minimum=0, maximum=1)
    cpu_memory_size_GB: float = option(64, help="bytes that the cache may take in main memory", minimum=0)
    disk_path: str | None = option(None, help="folder for blocks that fit neither; without it none go to disk")


@dataclass(frozen=True)
class Config:
    """A whole config.yaml. Values are as they are used: lengths in whole blocks, `anchor_num` and `token_step` settled."""

    model: ModelSettings
    long_context: LongContextSettings = field(default_factory=LongContextSettings)
    kvc2: CacheSettings = field(default_factory=CacheSettings)


SECTIONS: dict[str, type[OperatorConfig]] = {
    "model": ModelSettings,
    "long_context": LongContextSettings,
    "kvc2": CacheSettings,
}


def anchors_of(anchor_type: str) -> int | None:
    """How many anchors a type must have, None where any number will do: QUEST keeps a minimum and a maximum, FIXED and DYNAMIC keep
    as many keys as are asked for, and the others one."""
    return {"QUEST": 2, "FIXED": None, "DYNAMIC": None}.get(anchor_type, 1)


def config_schema() -> dict[str, Any]:
    """The JSON Schema of a config.yaml: types, choices and ranges. What concerns several keys at once is told by `ktopt check`."""
    sections = {name: options_schema(cls, (cls.__doc__ or "").partition(": ")[2]) for name, cls in SECTIONS.items()}
    return {
        "$schema": DRAFT,
        "title": "ktopt long-context config",
        "type": "object",
        "properties": sections,
        "required": ["model"],
        "additionalProperties": False,
    }
