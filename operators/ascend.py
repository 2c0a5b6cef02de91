"""Names that KTransformers' files for Ascend NPUs use: each does what the general operator does, on any torch device."""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.graph import Module
from ktopt.operator import Op, OperatorConfig, operator, option
from ktopt.operators.attention import LatentAttentionConfig, needs_latent
from ktopt.operators.experts import EXPERTS_OPS, IMPLEMENTATION, ExpertsConfig, cannot_take, packed_footprint
from ktopt.operators.hot_experts import split_footprint
from ktopt.operators.linear import LINEAR_OPS, LinearConfig, low_bit_footprint
from ktopt.operators.mlp import MlpConfig
from ktopt.operators.moe import MoeConfig
from ktopt.operators.names import upstream_names
from ktopt.operators.norm import NormConfig
from ktopt.operators.router import RouterConfig

W8A8 = "the Ascend kernels on 8-bit weights and activations (W8A8)"
LOST = f"{W8A8}: weights are held in the plan's dtype and computed by torch"
REASON = f"the computation is the model's own; only {W8A8} are missing"
DUMP = "upstream's class never read it either"

W8A8_OP = Op(
    "KLinearTorchW8A8A2",
    ("npu",),
    "8-bit weights and activations on an Ascend NPU",
    counterpart="KLinearTorch",
    needs="Ascend kernels are not in this version",
)
CPU_W8A8_OP = Op(
    "KExpertsCPUW8A8", ("cpu",), "KExpertsCPU fed from an NPU", counterpart="KExpertsCPU", needs="there is no NPU to be fed from"
)


@dataclass(frozen=True, kw_only=True)
class W8A8LinearConfig(LinearConfig):
    """kwargs of KTransformersLinearW8A8A2."""

    generate_op: str = option("KLinearTorchW8A8A2", help="op of prefill and of decoding", op=True)
    prefill_op: str = option(
        "KLinearTorchW8A8A2",
        help="op of prefill in KTransformers; recorded only: generate_op does prefill too in this version",
        op=True,
    )


@dataclass(frozen=True, kw_only=True)
class W8A8ExpertsConfig(ExpertsConfig):
    """kwargs of KTransformersExpertsW8A8."""

    generate_op: str = option("KExpertsCPUW8A8", help="op of prefill and of decoding", op=True)


@dataclass(frozen=True, kw_only=True)
class CpuExpertsConfig(OperatorConfig):
    """kwargs of KExpertsCPUW8A8 named as an operator."""

    n_routed_experts: int | None = option(None, help="number of experts", ignored="the model's config says it")
    device: str | None = option(None, help="device of the weights", device=True)
    out_device: str | None = option(
        None, help="device of the result", device=True, ignored="the plan itself moves a result to where it is needed"
    )


@dataclass(frozen=True, kw_only=True)
class DumpedMoeConfig(MoeConfig):
    """kwargs of KQwen3MoeSparseMoeBlockW8A8."""

    dump_enable: bool = option(False, help="carried by upstream's file", ignored=DUMP)
    dump_dir: str = option("", help="carried by upstream's file", ignored=DUMP)


@dataclass(frozen=True, kw_only=True)
class DumpedNormConfig(NormConfig):
    """kwargs of KQwen3MoeRMSNormW8A8."""

    dump_enable: bool = option(False, help="carried by upstream's file", ignored=DUMP)
    dump_dir: str = option("", help="carried by upstream's file", ignored=DUMP)


@dataclass(frozen=True, kw_only=True)
class DumpedAttentionConfig(LatentAttentionConfig):
    """kwargs of KQwen3MoeAttentionW8A8A2Serve."""

    dump_enable: bool = option(False, help="carried by upstream's file", ignored=DUMP)
    dump_dir: str = option("", help="carried by upstream's file", ignored=DUMP)


def never_fits(module: Module, config: OperatorConfig) -> str:
    return "KExpertsCPUW8A8 is an op of KTransformersExpertsW8A8 (generate_op), not an operator that replaces a module"


operator(
    "KTransformersLinearW8A8A2",
    aliases=upstream_names("ascend.ascend_linear", "KTransformersLinearW8A8A2"),
    roles=("linear", "router"),
    implementation="ktopt.operators.modules.linear:KTransformersLinear",
    ops={op.name: op for op in (W8A8_OP, *LINEAR_OPS)},
    summary="KTransformersLinear on any torch device",
    upstream="a linear layer with 8-bit weights and activations on an Ascend NPU",
    forward_changed=True,
    lost=LOST,
    footprint=low_bit_footprint,
)(W8A8LinearConfig)

operator(
    "KTransformersExpertsW8A8",
    aliases=upstream_names("ascend.ascend_experts", "KTransformersExpertsW8A8"),
    roles=("experts",),
    implementation=IMPLEMENTATION,
    ops={op.name: op for op in (CPU_W8A8_OP, *EXPERTS_OPS)},
    summary="KTransformersExperts on any torch device",
    upstream="the experts on the CPU, fed from an Ascend NPU",
    forward_changed=True,
    refuses=cannot_take,
    footprint=split_footprint(packed_footprint),
    lost="the overlap of the NPU with the CPU's experts",
)(W8A8ExpertsConfig)

operator(
    "KExpertsCPUW8A8",
    aliases=upstream_names("ascend.ascend_experts", "KExpertsCPUW8A8"),
    roles=("experts",),
    summary="an op of KTransformersExpertsW8A8, which upstream's files also name in a rule that matches nothing",
    upstream="the CPU op of KTransformersExpertsW8A8, not an operator of its own",
    forward_changed=True,
    reason="no module can be replaced by it",
    refuses=never_fits,
    lost=LOST,
)(CpuExpertsConfig)

PLACED = (
    ("ascend_experts", "KDeepseekV3MoEW8A8", "moe", MoeConfig, "KDeepseekV3MoE with its shared experts on the NPU", None),
    ("ascend_experts", "KQwen3MoeSparseMoeBlockW8A8", "moe", DumpedMoeConfig, "KQwen3MoeSparseMoeBlock on the NPU", None),
    ("ascend_gate", "KDeepseekV3GateA2", "router", RouterConfig, "grouped top-k by an Ascend kernel", None),
    ("ascend_layernorm", "KDeepseekV3RMSNormW8A8", "norm", NormConfig, "an Ascend norm kernel, and a bias of the W8A8 files", None),
    ("ascend_layernorm", "KQwen3MoeRMSNormW8A8", "norm", DumpedNormConfig, "an Ascend norm kernel in float16", None),
    ("ascend_mlp", "KDeepseekV3MLPW8A8A2V1", "mlp", MlpConfig, "gate, up and down as 8-bit products on the NPU", None),
    ("ascend_mlp", "KDeepseekV3MLPW8A8A2V2", "mlp", MlpConfig, "gate and up as one 8-bit product, then down, on the NPU", None),
    ("ascend_mlp", "KQwen3MoeMLPW8A8A2", "mlp", MlpConfig, "gate, up and down as 8-bit products on the NPU", None),
    (
        "ascend_attention",
        "KDeepseekV2AttentionW8A8A2",
        "attention",
        LatentAttentionConfig,
        "latent attention by Ascend kernels",
        needs_latent,
    ),
    (
        "ascend_attention",
        "KDeepseekV2AttentionW8A8A2Serve",
        "attention",
        LatentAttentionConfig,
        "latent attention by Ascend kernels over the batching server's paged cache",
        needs_latent,
    ),
    (
        "ascend_attention",
        "KQwen3MoeAttentionW8A8A2Serve",
        "attention",
        DumpedAttentionConfig,
        "grouped-query attention by Ascend kernels over the batching server's paged cache",
        None,
    ),
)

for _module, _name, _role, _config, _upstream, _refuses in PLACED:
    operator(
        _name,
        aliases=upstream_names(f"ascend.{_module}", _name),
        roles=(_role,),
        summary="places the module on any torch device; transformers computes it",
        upstream=_upstream,
        forward_changed=True,
        reason=REASON,
        lost=LOST,
        **({"refuses": _refuses} if _refuses else {}),
    )(_config)
