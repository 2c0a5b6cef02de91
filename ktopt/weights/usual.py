"""How the usual GGUF files store a model, for plans that are made before there is one: `--storage Q4_K_M`.

Types are shared out as llama.cpp's quantize shares them out (`llama_tensor_get_type`): half of the layers have their value and down
projections in more bits, the head has, and what is small or sensitive (routers, norms, biases) stays in 32. A row that isn't whole
blocks of 256 falls back to a type with blocks of 32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ktopt.diagnostics import UsageError
from ktopt.graph import Module, ModuleGraph, Tensor
from ktopt.operator import nearest
from ktopt.weights.ggml_types import BY_NAME
from ktopt.weights.source import StoredTensor

MIXES = {"Q4_K_M": ("Q4_K", "Q6_K"), "Q5_K_M": ("Q5_K", "Q6_K"), "Q6_K": ("Q6_K", "Q6_K"), "Q8_0": ("Q8_0", "Q8_0")}
"""Each kind of file: the type of most matrices, and of those that get more bits."""
FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
UNTOUCHED = frozenset({"shared_expert_gate", "conv1d"})
"""Modules beside norms and routers whose weights stay in 32 bits."""
EXPERTS_OF_MIXTRAL = 8
"""With so few experts attention is a small part, and gets more bits."""
SPLIT = frozenset({"kv_b_proj"})
"""Projections that a file has in two parts, one of them the other way round."""

_made: WeakKeyDictionary[ModuleGraph, dict[str, Mapping[str, StoredTensor]]] = WeakKeyDictionary()


def check_storage(kind: str) -> str:
    """The kind as it is spelled in MIXES; UsageError for one that isn't known."""
    if kind.upper() in MIXES:
        return kind.upper()
    near = nearest(kind.upper(), MIXES)
    meant = f"; did you mean {near}?" if near else ""
    raise UsageError(f"no kind of weight file is called {kind!r}{meant}; known are {', '.join(MIXES)}")


def usual_storage(graph: ModuleGraph, kind: str) -> Mapping[str, StoredTensor]:
    """How a file of this kind (one of MIXES) stores each parameter of the tree."""
    known = _made.setdefault(graph, {})
    if kind not in known:
        known[kind] = {tensor.name: tensor for module in graph for tensor in _stored(module, graph, kind)}
    return known[kind]


def _stored(module: Module, graph: ModuleGraph, kind: str) -> Iterator[StoredTensor]:
    prefix = f"{module.path}." if module.path else ""
    for tensor in module.parameters:
        name = prefix + tensor.name
        chosen = _fitting(_type(module, tensor, graph, kind), tensor.shape[-1] if tensor.shape else 1)
        parts = 2 if tensor.name == "gate_up_proj" else 1
        row = tensor.shape[-1] if tensor.shape else 1
        size = tensor.numel // max(1, row) * BY_NAME[chosen].row_bytes(row)
        yield StoredTensor(name, (name,) * parts, tensor.shape, (chosen,) * parts, size, Path(), module.name not in SPLIT)


def _type(module: Module, tensor: Tensor, graph: ModuleGraph, kind: str) -> str:
    """What llama.cpp would choose for the parameter, were its rows whole blocks."""
    most, more = MIXES[kind]
    if len(tensor.shape) < 2 or module.role in ("router", "norm") or module.name in UNTOUCHED:
        return "F32"
    name = tensor.name if module.role == "experts" else module.name
    tied_to_head = module.role == "embedding" and f"{module.path}.{tensor.name}" in graph.tied.values()
    if module.name == "lm_head" or tied_to_head:
        return more
    few_experts = _experts(graph.config) == EXPERTS_OF_MIXTRAL
    if few_experts and name in ("k_proj", "v_proj"):
        return "Q8_0"
    if few_experts and name == "o_proj" and kind == "Q4_K_M":
        return "Q5_K"
    return more if name in ("v_proj", "down_proj") and _gets_more(module.layer, graph.layer_count) else most


def _gets_more(layer: int | None, layers: int) -> bool:
    """Whether a layer is among the half whose value and down projections get more bits."""
    return layer is not None and (layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2)


def _experts(config: Mapping[str, Any]) -> int:
    return next((config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), 0)


def _fitting(kind: str, columns: int) -> str:
    """The type, or one with smaller blocks where a row isn't whole blocks of it."""
    if kind == "F32" or columns % BY_NAME[kind].block_elements == 0:
        return kind
    other = FALLBACK.get(kind, "F16")
    return other if columns % BY_NAME[other].block_elements == 0 else "F16"
