"""What a model family's file declares: what KTransformers' own copy of the model had in place of each of today's classes.

KTransformers carried copies of the models under ktransformers.models; rule files name classes and paths of those copies.
transformers v5 has other classes (routers, fused experts), other paths (Mixtral's block) and one rotary embedding where each layer
had its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LINEAR = "torch.nn.modules.linear.Linear"
MODULE_LIST = "torch.nn.modules.container.ModuleList"


@dataclass(frozen=True, slots=True, kw_only=True)
class Was:
    """What KTransformers had in place of one of today's classes.

    classes     its classes there, most special first; one without a dot is in the family's package
    by_rope     a further class by the config's kind of RoPE scaling ("yarn")
    name        its own name in its parent there, where it differs
    per_layer   its path in each decoder layer, where every layer had one of its own
    """

    classes: tuple[str, ...] = ()
    by_rope: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    per_layer: str = ""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model_type.

    model_type   as a config.json has it
    package      the module of KTransformers' copy, "" where it had none
    was          today's simple class names, to what stood in their place there
    builds_as    transformers' model_type that runs it, where it isn't the same
    only         config keys that transformers' code doesn't read, with the values that it computes: another value is refused
    refusal      why there is no tree at all, for people to read
    """

    model_type: str
    package: str = ""
    was: Mapping[str, Was] = field(default_factory=dict)
    builds_as: str = ""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    refusal: str = ""

    def old_classes(self, simple_name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
        """The dotted names that KTransformers' rule files use for one of today's classes."""
        was = self.was.get(simple_name)
        if was is None:
            return ()
        scaled = was.by_rope.get(rope_kind(config))
        names = (scaled, *was.classes) if scaled else was.classes
        return tuple(name if "." in name else f"{self.package}.{name}" for name in names)

    def refuses(self, config: Mapping[str, Any]) -> str | None:
        """Why transformers would compute something other than this config says, or None."""
        if self.refusal:
            return self.refusal
        for key, values in self.only.items():
            if key in config and config[key] not in values:
                known = " or ".join(repr(v) for v in values if v is not None)
                return f"{key} is {config[key]!r}, but transformers' {self.builds_as or self.model_type} computes {known} only"
        return None


def same(*names: str) -> dict[str, Was]:
    """Classes that have the same simple name in KTransformers' copy."""
    return {name: Was(classes=(name,)) for name in names}


def common(prefix: str, *, attention: tuple[str, ...] = ()) -> dict[str, Was]:
    """The classes that every copy had under today's name, the attention with its variants there, and the experts, a ModuleList."""
    kept = same(f"{prefix}RMSNorm", f"{prefix}MLP", f"{prefix}DecoderLayer")
    kept[f"{prefix}Attention"] = Was(classes=(*(f"{prefix}{variant}" for variant in attention), f"{prefix}Attention"))
    for whole in (f"{prefix}Model", f"{prefix}ForCausalLM"):
        kept[whole] = Was(classes=(whole, f"{prefix}PreTrainedModel"))
    kept[f"{prefix}Experts"] = Was(classes=(MODULE_LIST,))
    return kept


def rope_kind(config: Mapping[str, Any]) -> str:
    """The kind of RoPE scaling that a config asks for: "yarn", "linear", ..., or "default". Reads both old and new spellings."""
    for key in ("rope_parameters", "rope_scaling"):
        scaling = config.get(key)
        if isinstance(scaling, Mapping):
            kind = scaling.get("rope_type", scaling.get("type"))
            if isinstance(kind, str):
                return kind
    return "default"
