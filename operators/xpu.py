"""Names that KTransformers' files for Intel XPUs use: each does what the general operator does, on any torch device."""

from __future__ import annotations

from ktopt.operator import operator
from ktopt.operators.attention import ChunkedAttentionConfig
from ktopt.operators.names import upstream_names
from ktopt.operators.norm import NormConfig
from ktopt.operators.router import RouterConfig

for _module, _name, _role, _config, _upstream, _lost in (
    (
        "gate",
        "KMoEGateIPEXLLM",
        "router",
        RouterConfig,
        "sigmoid scores in torch, then grouped top-k by an IPEX-LLM kernel",
        "IPEX-LLM's grouped top-k kernel: the router's own forward runs",
    ),
    (
        "layernorm",
        "KDeepseekRMSNormIPEXLLM",
        "norm",
        NormConfig,
        "a norm kernel of IPEX-LLM, in float16 or float32",
        "IPEX-LLM's norm kernel: the norm's own forward runs",
    ),
    (
        "attention",
        "KQwen3MoeAttentionIPEXLLM",
        "attention",
        ChunkedAttentionConfig,
        "attention, norms and rotary embedding by IPEX-LLM kernels",
        "IPEX-LLM's attention kernels: transformers computes it",
    ),
):
    operator(
        _name,
        aliases=upstream_names(_module, _name),
        roles=(_role,),
        summary="places the module on any torch device; transformers computes it",
        upstream=_upstream,
        forward_changed=True,
        reason="the computation is the model's own; only IPEX-LLM's kernels are missing",
        lost=_lost,
    )(_config)
