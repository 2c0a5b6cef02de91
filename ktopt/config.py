"""The long-context config file (config.yaml) of KTransformers: what its sections hold, with types, defaults and ranges.

    model:         {name_or_path: meta-llama/Llama-2-70b, device: cuda:0}
    long_context:  {max_seq_len: 139000, block_size: 128, ...}
    kvc2:          {gpu_only: false, cpu_memory_size_GB: 64, ...}

Keys are as KTransformers' users write them. Native rule files may have the last two sections too. config_file.py reads a file and
says what is wrong with it; schema.py makes JSON Schemas of these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ktopt.diagnostics import KtoptError
from ktopt.operator import OperatorConfig, describe_type, field_types, is_a, nearest, option, option_names

AnchorType = Literal["DYNAMIC", "FIXED", "BLOCK_MEAN", "BLOCK_MAX", "QUEST", "KEY_INT4"]
KvType = Literal["FP16", "BF16", "FP32", "Q8_0", "Q4_0"]
QUANTISED = ("Q8_0", "Q4_0")
GROUP = 32
"""Values that share a scale in a quantised cache; a block is whole groups of tokens."""


@dataclass(frozen=True, kw_only=True)
class Section(OperatorConfig):
    """A section, whose values are its items too, by every spelling of a key."""

    def __getitem__(self, key: str) -> Any:
        cls: Any = type(self)
        return getattr(self, option_names(cls)[key])


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Section):
    """`model`: which model, and where."""

    name_or_path: str = option(help="the model: a shipped name, a model folder, a config.json or a GGUF file", aliases=("path",))
    device: str | None = option(None, help="device of what no rule places", device=True)


@dataclass(frozen=True, kw_only=True)
class LongContextSettings(Section):
    """`long_context`: the cache's blocks, and which of them are attended to. Lengths are in tokens."""

    max_seq_len: int = option(32000, help="tokens that the cache can hold; rounded up to whole blocks", minimum=1)
    block_size: int = option(128, help="tokens of a block", minimum=1)
    local_windows_len: int = option(
        4096,
        help="last tokens that are always attended to; rounded up to whole blocks; by default less where the cache is small",
        minimum=1,
    )
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
    preselect_block_count: int = option(32, help="blocks of that first choice; by default less where the cache is small", minimum=1)
    head_select_mode: Literal["SHARED", "SEPARATE"] = option(
        "SEPARATE", help="one choice for all heads, or one for each key and value head"
    )
    layer_step: int = option(1, help="layers that share one choice", minimum=1)
    token_step: int | None = option(1, help="tokens that share one choice; null is 1", minimum=1)
    chunk_size: int = option(4096, help="tokens of a prompt that are computed at a time", minimum=1)
    max_new_tokens: int = option(1024, help="tokens of an answer, for which a session has room beside max_seq_len", minimum=0)
    prefill: Literal["exact", "sparse"] = option("exact", help="whether a prompt attends to everything or to chosen blocks")


@dataclass(frozen=True, kw_only=True)
class CacheSettings(Section):
    """`kvc2`: where blocks of the cache may lie. Sizes are in decimal gigabytes."""

    gpu_only: bool = option(False, help="keep every block in the device's memory")
    gpu_memory_size_GB: float | None = option(
        None, help="bytes that the cache may take there; by default what the model leaves", minimum=0
    )
    utilization_percentage: float = option(1.0, help="share of the device's memory that the cache may take", minimum=0, maximum=1)
    cpu_memory_size_GB: float = option(64, help="bytes that the cache may take in main memory", minimum=0)
    disk_path: str | None = option(None, help="folder for blocks that fit neither; without it none go to disk")
    disk_size_GB: float | None = option(
        None,
        help="bytes that the cache may take there, half of them for kept prefixes where there are; by default what is free",
        minimum=0,
    )
    prefix_reuse: bool = option(
        False, help="keep the blocks of prompts under disk_path, for later sessions whose prompts begin with the same tokens"
    )


@dataclass(frozen=True)
class Config:
    """A whole config.yaml. Values are as they are used: lengths in whole blocks, `anchor_num` and `token_step` settled.

    given   what the file itself says, by section and by the fields' names
    found   nobody named the file: it lay where configs are looked for, and a rule file's own sections go before it
    """

    model: ModelSettings
    long_context: LongContextSettings = field(default_factory=LongContextSettings)
    kvc2: CacheSettings = field(default_factory=CacheSettings)
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, compare=False)
    found: bool = field(default=False, compare=False)


SECTIONS: dict[str, type[OperatorConfig]] = {
    "model": ModelSettings,
    "long_context": LongContextSettings,
    "kvc2": CacheSettings,
}


UPSTREAMS: dict[str, tuple[str, ...]] = {
    "": ("log", "server", "db", "user", "web", "ext", "local_chat", "async_server", "attn"),
    "model": ("type", "name", "gguf_path", "cache_lens", "max_new_tokens"),
}
"""What the config.yaml that KTransformers installs has beside this, for its server: sections, and keys of a section."""

Sections = Mapping[str, Mapping[str, Any]]
"""Settings as they are written, by section and by the fields' names."""


def merged(config: Config | None, rules: Sections) -> dict[str, dict[str, Any]]:
    """What a config and a rule file's sections say together: a config that was asked for goes before the rules, one that was found
    after them."""
    asked: Sections = config.given if config is not None else {}
    first, last = (rules, asked) if config is not None and config.found else (asked, rules)
    return {name: {**last.get(name, {}), **first.get(name, {})} for name in ("long_context", "kvc2")}


def settled(sections: Sections) -> tuple[LongContextSettings, CacheSettings]:
    """The settings that sections come to, where no file's check has seen them together. KtoptError for what can't be."""
    for name in ("long_context", "kvc2"):
        if problem := settings_problem(name, sections.get(name, {})):
            raise KtoptError(f"{name}: {problem}")
    long = settle(long_settings(sections.get("long_context", {})))
    if found := contradictions(long):
        raise KtoptError("long_context: " + "\n".join(f"{each.message}: {each.help}" for each in found))
    kvc2 = CacheSettings(**sections.get("kvc2", {}))
    if wrong := memory_problem(kvc2):
        raise KtoptError(f"kvc2: {wrong[0]}: {wrong[1]}")
    return long, kvc2


def settings_problem(section: str, given: Mapping[str, Any]) -> str:
    """What is wrong with settings that no file's check has seen, "" where nothing is."""
    cls: Any = SECTIONS[section]
    hints = field_types(cls)
    for name, value in given.items():
        if name not in hints:
            near = nearest(name, hints)
            return f"there is no `{name}`" + (f"; did you mean `{near}`?" if near else f"; there are {', '.join(hints)}")
        if not is_a(value, hints[name]):
            return f"`{name}` must be {describe_type(hints[name])}, not {value!r}"
        if wrong := outside(value, cls.__dataclass_fields__[name].metadata):
            return f"`{name}` must be {wrong}, not {value}"
    return ""


def outside(value: Any, meta: Mapping[str, Any]) -> str:
    """What a number must be that isn't in its option's range, "" where it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    least, most = meta.get("minimum"), meta.get("maximum")
    if isinstance(value, float) and abs(value) > LARGEST:
        return f"a number up to {LARGEST:g}"
    if (least is not None and value < least) or (most is not None and value > most) or value != value:
        return f"from {least} to {most}" if most is not None else f"at least {least}"
    return ""


LARGEST = 1e15
"""What a setting that isn't whole may be at most: bytes are reckoned from it."""
LENGTHS = ("max_seq_len", "local_windows_len")
"""Fields of long_context that are rounded up to whole blocks."""


def anchors_of(anchor_type: str) -> int | None:
    """How many anchors a type must have, None where any number will do: QUEST keeps a minimum and a maximum, FIXED and DYNAMIC keep
    as many keys as are asked for, and the others one."""
    return {"QUEST": 2, "FIXED": None, "DYNAMIC": None}.get(anchor_type, 1)


def sink_blocks(block_size: int) -> int:
    """How many blocks at the beginning are always attended to: one, or as many as make 64 tokens where blocks are small."""
    return 1 if block_size > 32 else 64 // block_size


def long_settings(given: Mapping[str, Any]) -> LongContextSettings:
    """The settings of which these are written. Where the defaults of the window and the preselection, which nobody wrote, are more
    than the cache holds, they are as much as it holds, half of it each."""
    long = LongContextSettings(**given)
    block = long.block_size
    room = -(-long.max_seq_len // block) - sink_blocks(block)
    window, chosen = -(-long.local_windows_len // block), long.preselect_block_count if long.preselect_block else 0
    changes: dict[str, Any] = {}
    if "local_windows_len" not in given and window + chosen > room:
        window = max(1, min(window, room - chosen if "preselect_block_count" in given or not chosen else (room + 1) // 2))
        changes["local_windows_len"] = window * block
    if "preselect_block_count" not in given and window + chosen > room:
        changes["preselect_block_count"] = max(1, room - window)
        changes["preselect_block"] = long.preselect_block and (room > window or "preselect_block" in given)
    return replace(long, **changes)


def settle(long: LongContextSettings) -> LongContextSettings:
    """The settings with lengths in whole blocks, and with the defaults that hang on other keys. A cache holds the first blocks and
    one more at least, and a chunk is no longer than the cache."""
    block = long.block_size
    lengths = {name: -(-getattr(long, name) // block) * block for name in LENGTHS}
    lengths["max_seq_len"] = max(lengths["max_seq_len"], (sink_blocks(block) + 1) * block)
    anchors = long.anchor_num or anchors_of(long.anchor_type) or 1
    lengths["chunk_size"] = min(long.chunk_size, lengths["max_seq_len"])
    return replace(long, **lengths, anchor_num=anchors, token_step=long.token_step or 1)


class Contradiction(NamedTuple):
    """Settings of long_context that can't stand together.

    keys   where to look for it: the field that is the likeliest to be changed, then others
    sure   fields that must have been written, all of them, for it to be certain while others are still to be settled
    """

    message: str
    help: str
    keys: tuple[str, ...]
    sure: tuple[str, ...]


def contradictions(long: LongContextSettings) -> list[Contradiction]:
    """What can't stand together in settled settings."""
    found, block, wanted = [], long.block_size, anchors_of(long.anchor_type)
    anchors = long.anchor_num or 1
    if wanted is not None and anchors != wanted:
        message = f"`anchor_type: {long.anchor_type}` needs `anchor_num: {wanted}`, not {anchors}"
        found.append(Contradiction(message, f"write {wanted}, or delete the key", ("anchor_num",), ("anchor_type", "anchor_num")))
    elif wanted is None and anchors > block:
        message = f"a block of {block} tokens has no {anchors} keys to stand for it"
        help = "make `anchor_num` smaller, or blocks larger"
        found.append(Contradiction(message, help, ("anchor_num",), ("anchor_num", "block_size")))
    if long.kv_type in QUANTISED and block % GROUP:
        message = f"`kv_type: {long.kv_type}` needs a `block_size` that is a multiple of {GROUP}, not {block}"
        help = f"write {-(-block // GROUP) * GROUP}, or a `kv_type` that isn't quantised"
        found.append(Contradiction(message, help, ("block_size", "kv_type"), ("kv_type", "block_size")))
    return [*found, *_beyond_the_cache(long)]


def _beyond_the_cache(long: LongContextSettings) -> list[Contradiction]:
    """More blocks that are always kept than the cache holds."""
    sink, window, capacity = sink_blocks(long.block_size), long.local_windows_len // long.block_size, capacity_blocks(long)
    preselected = long.preselect_block_count if long.preselect_block else 0
    if sink + window + preselected <= capacity:
        return []
    parts = f"the first {f'{sink} blocks' if sink > 1 else 'block'}, {window} of the local window"
    parts += f" and {preselected} that are preselected" if preselected else ""
    message = (
        f"{parts} are {sink + window + preselected} blocks, and the cache holds {capacity} "
        f"(`max_seq_len` of {long.max_seq_len} tokens)"
    )
    first = "preselect_block_count" if preselected else "local_windows_len"
    help = "make `max_seq_len` larger, or the window and the choice smaller"
    return [Contradiction(message, help, (first, "local_windows_len", "max_seq_len"), ("max_seq_len", "local_windows_len"))]


def memory_problem(kvc2: CacheSettings) -> tuple[str, str, str] | None:
    """What can't be in kvc2, what to do, and the key to look at; None where nothing is wrong."""
    if kvc2.disk_path is not None and not kvc2.disk_path.strip():
        return "`disk_path` is empty", "write a folder, or delete the key", "disk_path"
    if kvc2.prefix_reuse and kvc2.disk_path is None:
        help = "write `disk_path:`, a folder for them"
        return "`prefix_reuse` keeps blocks on disk, and there is no `disk_path`", help, "prefix_reuse"
    return None


def capacity_blocks(long: LongContextSettings) -> int:
    """Blocks that the cache holds, for settled settings."""
    return long.max_seq_len // long.block_size
