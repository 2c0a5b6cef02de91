"""KEmbedding: token embeddings whose table is held in the form that its op reads."""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.kernels import cpu
from ktopt.operator import Op, PlacedConfig, operator, option
from ktopt.placement import DEVICE_KINDS

EMBEDDING_OPS = (
    Op("KEmbeddingTorch", DEVICE_KINDS, "the table dequantised once to the plan's dtype, looked up by torch"),
    Op(
        "KEmbeddingCPU",
        ("cpu",),
        "the table as its file stores it, GGUF blocks included; only rows asked for are dequantised. As KEmbeddingTorch where the "
        "CPU kernels were not built",
        counterpart="KEmbeddingTorch",
        keeps=cpu.KINDS,
    ),
)


@operator(
    "KEmbedding",
    roles=("embedding",),
    implementation="ktopt.operators.modules.embedding:KEmbedding",
    ops={op.name: op for op in EMBEDDING_OPS},
    summary="token embeddings looked up by the op that the rule names; a scale or norm of the model's class is kept",
    upstream="KTransformers had no such operator: its rule files left embeddings to `default`, which dequantised them",
)
@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(PlacedConfig):
    """kwargs of KEmbedding."""

    generate_op: str = option("KEmbeddingCPU", help="op of prefill and of decoding", op=True)
