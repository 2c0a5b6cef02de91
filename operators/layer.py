"""KDecoderLayer: a whole decoder layer as one operator over what its children are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ktopt.graph import Module
from ktopt.operator import OperatorConfig, PlacedConfig, operator, option
from ktopt.operators.kernel_memory import running_op
from ktopt.placement import Running, Working, device_kind
from ktopt.plan import Step
from ktopt.registry import find

_MODELING = "transformers.models.{0}.modeling_{0}.{1}DecoderLayer"
LAYERS = frozenset(
    _MODELING.format(package, name)
    for package, name in (
        ("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"), ("qwen2_moe", "Qwen2Moe"),
        ("qwen3_moe", "Qwen3Moe"), ("mixtral", "Mixtral"), ("gemma3", "Gemma3"), ("deepseek_v2", "DeepseekV2"),
        ("deepseek_v3", "DeepseekV3"),
    )
)  # fmt: skip
"""The layers whose forward the kernels compute."""
ACTIVATIONS = ("silu", "swish", "gelu_pytorch_tanh", "relu")
"""transformers' names of those that the kernels have."""
RUN_BELOW = frozenset(
    {
        "KTransformersLinear", "KTransformersExperts", "KTransformersExpertsV2", "KDeepseekV2Attention", "KDynamicAttention",
        "KLlamaAttention",
    }
)  # fmt: skip
"""Operators with an implementation whose weights the kernels can run on."""
OPS_BELOW = frozenset({"KLinearCPUInfer", "KLinearTorch", "KExpertsCPU", "KExpertsTorch"})
"""Their inner ops that it can run."""


@dataclass(frozen=True, kw_only=True)
class LayerConfig(PlacedConfig):
    """kwargs of KDecoderLayer."""

    kv_dtype: Literal["auto", "float16", "bfloat16", "float32"] = option(
        "auto",
        help="what keys and values are kept in, float16 by default, or latents, bfloat16 by default; a number beyond float16's "
        "65504 is an error",
    )
    chunk_size: int = option(
        512,
        help="tokens of a prompt that pass the model at a time where ktopt runs it: what they need for a while stays small",
        aliases=("chunck_size",),
        minimum=1,
    )


def unknown_layer(module: Module, config: OperatorConfig) -> str | None:
    if module.cls.name in LAYERS:
        return None
    known = ", ".join(sorted(name.rpartition(".")[2] for name in LAYERS))
    return f"{module.path} is a {module.cls.simple_name}; KDecoderLayer computes {known}"


def unusual(config: Mapping[str, Any]) -> str | None:
    """What a model's config asks of its layers that the kernels don't compute."""
    config = config.get("text_config") or config
    activation = config.get("hidden_act", config.get("hidden_activation", "silu"))
    if activation not in ACTIVATIONS:
        return f"the kernels have no activation {activation}; they have {', '.join(ACTIVATIONS)}"
    if config.get("attn_logit_softcapping") is not None:
        return "its attention caps its logits"
    if config.get("use_bidirectional_attention"):
        return "its attention sees later tokens"
    if latent := config.get("kv_lora_rank"):
        return f"the kernels take a latent of a multiple of 16 numbers, not {latent}" if latent % 16 else None
    rope = config.get("rope_parameters") or {}
    if any(
        (each or {}).get("partial_rotary_factor", 1.0) not in (None, 1.0)
        for each in (rope, *rope.values())
        if isinstance(each, dict)
    ):
        return "its attention rotates a part of each head"
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    dim = config.get("head_dim") or (hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else 16)
    return f"the kernels take heads of a multiple of 16 numbers, not {dim}" if dim % 16 or dim > 1024 else None


def unfit_below(module: Module, step: Step, below: Sequence[Step], config: Mapping[str, Any]) -> str | None:
    """Why a layer can't be one operator over what the plan makes of the modules below it."""
    if split_below(below):
        return None  # it is left as it is
    if reason := unusual(config):
        return reason
    if device_kind(step.generate_device) != "cpu":
        return f"it runs on the CPU, and the layer is on {step.generate_device}"
    for child in below:
        if child.generate_device != step.generate_device:
            return f"{child.path} is on {child.generate_device}, and the layer on {step.generate_device}"
        spec = find(child.operator)
        if spec is None or (spec.implementation and spec.name not in RUN_BELOW):
            return f"{child.path} becomes {child.operator}, which it can't run itself"
        op = running_op(child)
        if op and op not in OPS_BELOW:
            return f"{child.path} is computed by {op}, which it can't run itself"
    return None


def split_below(below: Sequence[Step]) -> str:
    """Which modules below a layer keep the kernels from running it as one, though it can be left as it is."""
    split = next((child.path for child in below if child.kwargs.get("hot_experts")), "")
    return f"{split} has experts on two devices, and runs by itself" if split else ""


def layer_working(running: Running) -> Working:
    from ktopt.operators import layer_memory  # for plans that are asked what they take

    return layer_memory.layer_working(running)


operator(
    "KDecoderLayer",
    roles=("layer",),
    implementation="ktopt.operators.modules.decoder_layer:KDecoderLayer",
    summary="a decoder layer in one call of the CPU kernels, which run its children's weights: norms, products, rotation, cache, "
    "attention and MLP; where a call asks for more, transformers' forward runs on the same children",
    upstream="had no such class: each layer's parts ran one after the other, from Python",
    refuses=unknown_layer,
    refuses_below=unfit_below,
    leaves=split_below,
    working=layer_working,
)(LayerConfig)
