"""Small random models of the families that KDecoderLayer takes, and their fused counterparts, for its tests."""

import copy

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto import CONFIG_MAPPING

import ktopt
from ktopt.source import SourceFile

RULES = """
version: 1
dtype: float32
place: {cpu: "@**"}
rules:
  - {match: "@model.layers.*", replace: KDecoderLayer, kwargs: {kv_dtype: float32}}
"""
SHAPE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "attn_implementation": "sdpa",
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "moe_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2,
    "n_routed_experts": 8, "num_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "llama with biases": {"attention_bias": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 56},
    "qwen3_moe": {
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | {"q_lora_rank": 24},
    "deepseek_v3 without low rank": LATENT | {"q_lora_rank": None, "rope_interleave": False},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}
TEXT = torch.randint(0, 96, (1, 23), generator=torch.Generator().manual_seed(3))


def random_model(family: str, **changes):
    config = CONFIG_MAPPING[family.split()[0]](**{**SHAPE, **FAMILIES[family], **changes})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, std=0.2)
        if name.endswith("norm.weight") and "gemma" not in family:
            parameter.data += 1
    return model.requires_grad_(False)


def fused(model, rules: str = RULES):
    return ktopt.apply(SourceFile("rules.yaml", rules), copy.deepcopy(model))


def difference(a, b) -> float:
    return float((a - b).abs().max())


def assert_no_fallback(caplog):
    assert not [r.message for r in caplog.records if "not as one kernel" in r.message]
