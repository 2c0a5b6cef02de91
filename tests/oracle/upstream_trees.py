"""Module trees shaped as KTransformers' own copies of the models were: what its rule files were written against.

Facts from kvcache-ai/ktransformers, archive/ktransformers/models/modeling_*.py (and, for Llama and Qwen3-MoE, the same files before
they were archived): every expert is a module, each attention has its own rotary embedding, DeepSeek's router is a `MoEGate`,
Mixtral's block is `block_sparse_moe`, other routers are plain Linears. Qwen3-MoE's and Llama's copies have one more rotary
embedding at the model's level; Qwen3-MoE's attentions use Qwen2-MoE's class.

Shapes are (out_features, in_features) for a Linear, as torch stores them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktopt.graph import Module, ModuleClass, ModuleGraph, Tensor

CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "facts" / "model_configs.json"
MODELS = "ktransformers.models."
MODULE = "torch.nn.modules.module.Module"
PRETRAINED = "transformers.modeling_utils.PreTrainedModel"

Config = Mapping[str, Any]


@dataclass(frozen=True)
class UpstreamModule:
    """One module: its path ("" for the root), its MRO as dotted names (itself first), its own parameters and their shapes."""

    path: str
    mro: tuple[str, ...]
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def is_list(self) -> bool:
        return self.mro[0].endswith(".ModuleList")


@dataclass(frozen=True)
class Node:
    """A module with its children in the order in which upstream's constructor makes them."""

    mro: tuple[str, ...]
    parameters: tuple[tuple[str, tuple[int, ...]], ...] = ()
    children: tuple[tuple[str, Node], ...] = ()


def node(cls: str, *bases: str, params: Mapping[str, tuple[int, ...]] | None = None, **children: Node) -> Node:
    return Node((cls, *bases, MODULE), tuple((params or {}).items()), tuple(children.items()))


def linear(out_features: int, in_features: int, bias: bool = False) -> Node:
    params: dict[str, tuple[int, ...]] = {"weight": (out_features, in_features)}
    if bias:
        params["bias"] = (out_features,)
    return node("torch.nn.modules.linear.Linear", params=params)


def embedding(config: Config) -> Node:
    return node("torch.nn.modules.sparse.Embedding", params={"weight": (config["vocab_size"], config["hidden_size"])})


def norm(cls: str, size: int) -> Node:
    return node(cls, params={"weight": (size,)})


def module_list(items: list[Node]) -> Node:
    return Node(("torch.nn.modules.container.ModuleList", MODULE), (), tuple((str(i), item) for i, item in enumerate(items)))


def silu() -> Node:
    return node("torch.nn.modules.activation.SiLU")


def mlp(cls: str, config: Config, size: int) -> Node:
    hidden = config["hidden_size"]
    return node(cls, gate_proj=linear(size, hidden), up_proj=linear(size, hidden), down_proj=linear(hidden, size), act_fn=silu())


def causal_lm(file: str, prefix: str, config: Config, layer: Callable[[int], Node], rotary: Node | None = None) -> Node:
    """The model around its layers. `rotary` is a rotary embedding at the model's level, where the copy had one."""
    pretrained = (f"{file}.{prefix}PreTrainedModel", PRETRAINED)
    parts = {
        "embed_tokens": embedding(config),
        "layers": module_list([layer(i) for i in range(config["num_hidden_layers"])]),
        "norm": norm(f"{file}.{prefix}RMSNorm", config["hidden_size"]),
    }
    if rotary:
        parts["rotary_emb"] = rotary
    model = node(f"{file}.{prefix}Model", *pretrained, **parts)
    head = linear(config["vocab_size"], config["hidden_size"])
    return node(f"{file}.{prefix}ForCausalLM", *pretrained, model=model, lm_head=head)


def deepseek(file: str, prefix: str, config: Config) -> Node:
    """DeepSeek-V2 and V2-Lite (modeling_deepseek), DeepSeek-V3 and Moonlight (modeling_deepseek_v3)."""
    hidden = config["hidden_size"]
    base_rotary = f"{file}.{prefix}RotaryEmbedding"
    rotary = node(f"{file}.{prefix}YarnRotaryEmbedding", base_rotary) if config.get("rope_scaling") else node(base_rotary)

    def layer(index: int) -> Node:
        moe = index >= config["first_k_dense_replace"] and index % config["moe_layer_freq"] == 0
        return node(
            f"{file}.{prefix}DecoderLayer",
            self_attn=deepseek_attention(file, prefix, config, rotary),
            mlp=deepseek_moe(file, prefix, config) if moe else mlp(f"{file}.{prefix}MLP", config, config["intermediate_size"]),
            input_layernorm=norm(f"{file}.{prefix}RMSNorm", hidden),
            post_attention_layernorm=norm(f"{file}.{prefix}RMSNorm", hidden),
        )

    return causal_lm(file, prefix, config, layer)


def deepseek_attention(file: str, prefix: str, config: Config, rotary: Node) -> Node:
    hidden, heads, rank, kv_rank = (config[k] for k in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    q_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if rank is None:
        query = {"q_proj": linear(heads * q_dim, hidden)}
    else:
        query = {
            "q_a_proj": linear(rank, hidden),
            "q_a_layernorm": norm(f"{file}.{prefix}RMSNorm", rank),
            "q_b_proj": linear(heads * q_dim, rank),
        }
    return node(
        f"{file}.{prefix}Attention",
        **query,
        kv_a_proj_with_mqa=linear(kv_rank + config["qk_rope_head_dim"], hidden),
        kv_a_layernorm=norm(f"{file}.{prefix}RMSNorm", kv_rank),
        kv_b_proj=linear(heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), kv_rank),
        o_proj=linear(hidden, heads * config["v_head_dim"]),
        rotary_emb=rotary,
    )


def deepseek_moe(file: str, prefix: str, config: Config) -> Node:
    expert = mlp(f"{file}.{prefix}MLP", config, config["moe_intermediate_size"])
    gate = {"weight": (config["n_routed_experts"], config["hidden_size"])}
    if config["topk_method"] == "noaux_tc":
        gate["e_score_correction_bias"] = (config["n_routed_experts"],)
    shared = config["moe_intermediate_size"] * config["n_shared_experts"]
    return node(
        f"{file}.{prefix}MoE",
        experts=module_list([expert] * config["n_routed_experts"]),
        gate=node(f"{file}.MoEGate", params=gate),
        shared_experts=mlp(f"{file}.{prefix}MLP", config, shared),
    )


def grouped_query_attention(cls: str, config: Config, rotary: Node, biased: str = "", **norms: Node) -> Node:
    """`biased` holds the letters of the projections that have a bias."""
    hidden, heads, kv_heads = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    head_dim = config.get("head_dim") or hidden // heads
    return node(
        cls,
        q_proj=linear(heads * head_dim, hidden, "q" in biased),
        k_proj=linear(kv_heads * head_dim, hidden, "k" in biased),
        v_proj=linear(kv_heads * head_dim, hidden, "v" in biased),
        o_proj=linear(hidden, heads * head_dim),
        **norms,
        rotary_emb=rotary,
    )


def qwen2_moe(config: Config) -> Node:
    file, prefix = MODELS + "modeling_qwen2_moe", "Qwen2Moe"
    rotary = node(f"{file}.{prefix}RotaryEmbedding")
    expert = mlp(f"{file}.{prefix}MLP", config, config["moe_intermediate_size"])
    hidden = config["hidden_size"]

    def layer(index: int) -> Node:
        del index  # every layer of the models that upstream ran is sparse
        block = node(
            f"{file}.{prefix}SparseMoeBlock",
            gate=linear(config["num_experts"], hidden),
            experts=module_list([expert] * config["num_experts"]),
            shared_expert=mlp(f"{file}.{prefix}MLP", config, config["shared_expert_intermediate_size"]),
            shared_expert_gate=linear(1, hidden),
        )
        return node(
            f"{file}.{prefix}DecoderLayer",
            self_attn=grouped_query_attention(f"{file}.{prefix}Attention", config, rotary, "qkv"),
            mlp=block,
            input_layernorm=norm(f"{file}.{prefix}RMSNorm", hidden),
            post_attention_layernorm=norm(f"{file}.{prefix}RMSNorm", hidden),
        )

    return causal_lm(file, prefix, config, layer)


def qwen3_moe(config: Config) -> Node:
    file, prefix = MODELS + "modeling_qwen3_moe", "Qwen3Moe"
    rotary = node(MODELS + "modeling_qwen2_moe.Qwen2MoeRotaryEmbedding")
    expert = mlp(f"{file}.{prefix}MLP", config, config["moe_intermediate_size"])
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    head_norms = {name: norm(f"{file}.{prefix}RMSNorm", head_dim) for name in ("q_norm", "k_norm")}

    def layer(index: int) -> Node:
        del index  # as for Qwen2-MoE
        return node(
            f"{file}.{prefix}DecoderLayer",
            self_attn=grouped_query_attention(f"{file}.{prefix}Attention", config, rotary, **head_norms),
            mlp=node(
                f"{file}.{prefix}SparseMoeBlock",
                gate=linear(config["num_experts"], hidden),
                experts=module_list([expert] * config["num_experts"]),
            ),
            input_layernorm=norm(f"{file}.{prefix}RMSNorm", hidden),
            post_attention_layernorm=norm(f"{file}.{prefix}RMSNorm", hidden),
        )

    return causal_lm(file, prefix, config, layer, rotary=node(f"{file}.{prefix}RotaryEmbedding"))


def mixtral(config: Config) -> Node:
    file, prefix = MODELS + "modeling_mixtral", "Mixtral"
    hidden, size = config["hidden_size"], config["intermediate_size"]
    expert = node(
        f"{file}.{prefix}BlockSparseTop2MLP",
        w1=linear(size, hidden),
        w2=linear(hidden, size),
        w3=linear(size, hidden),
        act_fn=silu(),
    )
    rotary = node(f"{file}.{prefix}RotaryEmbedding")

    def layer(index: int) -> Node:
        del index  # all layers are alike
        return node(
            f"{file}.{prefix}DecoderLayer",
            self_attn=grouped_query_attention(f"{file}.{prefix}Attention", config, rotary),
            block_sparse_moe=node(
                f"{file}.{prefix}SparseMoeBlock",
                gate=linear(config["num_local_experts"], hidden),
                experts=module_list([expert] * config["num_local_experts"]),
            ),
            input_layernorm=norm(f"{file}.{prefix}RMSNorm", hidden),
            post_attention_layernorm=norm(f"{file}.{prefix}RMSNorm", hidden),
        )

    return causal_lm(file, prefix, config, layer)


def llama(config: Config) -> Node:
    file, prefix = MODELS + "modeling_llama", "Llama"
    rotary = node(f"{file}.{prefix}RotaryEmbedding")
    hidden = config["hidden_size"]

    def layer(index: int) -> Node:
        del index  # all layers are alike
        return node(
            f"{file}.{prefix}DecoderLayer",
            self_attn=grouped_query_attention(f"{file}.{prefix}Attention", config, rotary),
            mlp=mlp(f"{file}.{prefix}MLP", config, config["intermediate_size"]),
            input_layernorm=norm(f"{file}.{prefix}RMSNorm", hidden),
            post_attention_layernorm=norm(f"{file}.{prefix}RMSNorm", hidden),
        )

    return causal_lm(file, prefix, config, layer, rotary=rotary)


BUILDERS: dict[str, Callable[[Config], Node]] = {
    "deepseek_v2": lambda config: deepseek(MODELS + "modeling_deepseek", "DeepseekV2", config),
    "deepseek_v3": lambda config: deepseek(MODELS + "modeling_deepseek_v3", "DeepseekV3", config),
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "llama": llama,
}
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")


def load_config(model: str) -> dict[str, Any]:
    """The published config.json of a model by ktopt's short name, from the facts beside the repository."""
    config: dict[str, Any] = json.loads(CONFIGS.read_text(encoding="utf-8"))[model]["config"]
    return config


def upstream_tree(config: Config, experts: int | None = None) -> list[UpstreamModule]:
    """The tree of a config in pre-order. `experts` cuts the number of experts a layer, where a test needs no 256 of them."""
    if experts is not None:
        config = {k: min(v, experts) if k in EXPERT_COUNTS else v for k, v in config.items()}
    return list(_walk("", BUILDERS[config["model_type"]](config)))


def _walk(path: str, at: Node) -> Iterator[UpstreamModule]:
    yield UpstreamModule(path, at.mro, at.parameters)
    for name, child in at.children:
        yield from _walk(f"{path}.{name}" if path else name, child)


LAYER = re.compile(r"\.layers\.(\d+)")
EXPERT = re.compile(r"\.experts\.(\d+)")


def as_graph(tree: list[UpstreamModule], config: Config, name: str = "", dtype: str = "bfloat16") -> ModuleGraph:
    """The same tree in the form that ktopt's stages take. As in trees that ktopt builds, modules of a class share a ModuleClass."""
    modules: list[Module] = []
    classes: dict[tuple[str, ...], ModuleClass] = {}
    tensors: dict[tuple[tuple[str, tuple[int, ...]], ...], tuple[Tensor, ...]] = {}
    ends: dict[int, int] = {}
    open_modules: list[int] = []  # indices of the module before this one and of its ancestors
    for index, module in enumerate(tree):
        while open_modules and not is_inside(module.path, modules[open_modules[-1]].path):
            ends[open_modules.pop()] = index
        layer, expert = LAYER.search(module.path), EXPERT.search(module.path)
        modules.append(
            Module(
                path=module.path,
                cls=classes.setdefault(module.mro, ModuleClass(module.mro[0], module.mro)),
                tensors=tensors.setdefault(module.parameters, tuple(Tensor(n, s, dtype) for n, s in module.parameters)),
                index=index,
                parent=open_modules[-1] if open_modules else -1,
                end=0,
                layer=int(layer[1]) if layer else None,
                expert=int(expert[1]) if expert else None,
            )
        )
        open_modules.append(index)
    for index in open_modules:
        ends[index] = len(tree)
    finished = tuple(replace(m, end=ends[m.index]) for m in modules)
    architectures = tuple(config.get("architectures", ()))
    return ModuleGraph(finished, name, config.get("model_type", ""), architectures, dict(config))


def is_inside(path: str, ancestor: str) -> bool:
    """Whether a path lies below another ("" is the root's)."""
    return not ancestor or path.startswith(ancestor + ".")
