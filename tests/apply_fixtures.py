"""Tiny random models, plans made by hand, and weight sources, for the tests of apply."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MixtralConfig, Qwen3MoeConfig

import ktopt
from ktopt.plan import ModelRef, Plan, RuleRef, Step, Transfer
from ktopt.trees import graph_from_module
from ktopt.weights import MissingTensor, StoredTensor

COMMON = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": lambda: LlamaConfig(**COMMON),
    "llama-tied": lambda: LlamaConfig(**COMMON, tie_word_embeddings=True),
    "mixtral": lambda: MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, **MOE, num_experts=4, head_dim=8),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4}, **MOE, n_routed_experts=4, n_group=2, topk_group=1, n_shared_experts=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
}  # fmt: skip


def tiny_model(kind: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32):
    """A random model in eval mode whose greedy text doesn't repeat one token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.eval()


def hand_plan(model, *, devices=None, operators=None, transfers=(), dtype="float32", rule_line=7) -> Plan:
    """A plan of `model` made without the compiler: `devices` maps path prefixes to devices (the longest wins), `operators` maps
    paths to (operator, kwargs), which rule 0 decided."""
    graph = graph_from_module(model)
    steps = []
    for module in graph.modules:
        device = placed(module.path, devices or {})
        operator, kwargs = (operators or {}).get(module.path, ("default", {}))
        size = sum(t.nbytes for t in module.tensors)
        rule = 0 if module.path in (operators or {}) else None
        steps.append(Step(module.path, module.cls.name, module.role, operator, kwargs, device, device, dtype, size, rule=rule))
    rules = (RuleRef("linear", "rules.yaml", rule_line, 3, "KTransformersLinear"),)
    config = model.config.to_dict()
    ref = ModelRef(str(config.get("_name_or_path") or "tiny"), config["model_type"], (type(model).__name__,), graph.digest, config)
    return Plan(ref, "rules.yaml", "0" * 64, rules, tuple(steps), tuple(transfers), "cpu", dtype, ktopt_version=ktopt.__version__)


def placed(path: str, devices: dict[str, str]) -> str:
    inside = [prefix for prefix in devices if not prefix or path == prefix or path.startswith(prefix + ".")]
    return devices[max(inside, key=len)] if inside else "cpu"


class StateSource:
    """A weight source over a dict of tensors, with faults on demand: `fail_at` is the name whose reading raises."""

    def __init__(self, state, fail_at: str = "", error: Exception | None = None):
        self.state = {name: tensor.clone() for name, tensor in state.items()}
        self.path = Path("weights.fake")
        self.fail_at, self.error = fail_at, error or OSError("the disk went away")
        self.reads: list[str] = []

    @property
    def files(self):
        return (self.path,)

    def __contains__(self, name):
        return name in self.state

    def names(self):
        return iter(self.state)

    def stored(self, name):
        if name not in self.state:
            raise MissingTensor(f"{self.path} has no {name}")
        tensor = self.state[name]
        return StoredTensor(name, (name,), tuple(tensor.shape), ("F32",), tensor.nbytes, self.path)

    def read(self, name, dtype, device="cpu"):
        self.reads.append(name)
        if name == self.fail_at:
            raise self.error
        return self.state[name].to(device=device, dtype=dtype, copy=True)

    def close(self):
        pass


def source_of(model, **faults) -> StateSource:
    """The weights of a model as a file would hold them: without the tied copies."""
    state = model.state_dict()
    for target in model.all_tied_weights_keys:
        state.pop(target, None)
    return StateSource(state, **faults)


def cut(transfers: tuple[Transfer, ...], index: int) -> tuple[Transfer, ...]:
    """The transfers without one."""
    return transfers[:index] + transfers[index + 1 :]
