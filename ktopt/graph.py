"""A model's module tree as frozen data: what rules select from. No torch here; `trees.py` builds it.

Modules stand in pre-order (parents before children, in the model's own order), so a subtree is a range of indices and a set of
modules is an int used as a bitset.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ktopt.diagnostics import KtoptError
from ktopt.placement import DTYPES

if TYPE_CHECKING:
    import networkx

ITEM_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
    "complex128": 16, "complex64": 8, "uint64": 8, "uint32": 4, "uint16": 2,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter or buffer that a module owns itself. `dtype` is torch's name without "torch."."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    buffer: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ModuleClass:
    """A module's class: its dotted name and the dotted names of its whole MRO (itself first, `object` left out).

    role   what part modules of this class play: see role_of
    """

    name: str
    mro: tuple[str, ...]
    role: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", role_of(self))

    @property
    def simple_name(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Module:
    """One module of the tree.

    path            canonical dotted path, "" for the root
    cls             its class
    tensors         the parameters and buffers it owns itself, not its children's
    index, parent   its place in the graph's pre-order, and its parent's (-1 for the root)
    end             one past its last descendant: the subtree is range(index, end)
    layer, expert   which decoder layer and expert it is in, if any
    alias_paths     other paths that a rule may name it by (KTransformers' own models had them)
    alias_classes   other classes that a rule may name it by, dotted
    """

    path: str
    cls: ModuleClass
    tensors: tuple[Tensor, ...]
    index: int
    parent: int
    end: int
    layer: int | None = None
    expert: int | None = None
    alias_paths: tuple[str, ...] = ()
    alias_classes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The last segment of the path."""
        return self.path.rpartition(".")[2]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return tuple(t for t in self.tensors if not t.buffer)

    @property
    def role(self) -> str:
        """Its class's role; a list of modules named "experts" is experts, as in models before fused experts."""
        role = self.cls.role
        return "experts" if role == "container" and self.name == "experts" else role


@dataclass(frozen=True, eq=False)
class ModuleGraph:
    """A model's modules in pre-order, with what else rules may ask of the model.

    name        what the user calls the model: a shipped name, or a path
    model_type  transformers' model_type ("" for a bare nn.Module)
    config      the model's config.json as a mapping (empty for a bare nn.Module)
    tied        parameters that are another's tensor: name -> name of the first that has it ("lm_head.weight" -> the embedding's)
    in_hand     whether it is the tree of a module in hand, whose tensors' dtypes are what they are held in
    """

    modules: tuple[Module, ...]
    name: str = ""
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    in_hand: bool = False

    def __len__(self) -> int:
        return len(self.modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self.modules)

    @cached_property
    def by_path(self) -> dict[str, Module]:
        return {m.path: m for m in self.modules}

    @cached_property
    def by_alias(self) -> dict[str, Module]:
        return {alias: m for m in self.modules for alias in m.alias_paths}

    def find(self, path: str) -> Module | None:
        """The module of that path, or the one that has it as an alias."""
        return self.by_path.get(path) or self.by_alias.get(path)

    @cached_property
    def child_indices(self) -> Sequence[tuple[int, ...]]:
        children: list[list[int]] = [[] for _ in self.modules]
        for module in self.modules:
            if module.parent >= 0:
                children[module.parent].append(module.index)
        return [tuple(c) for c in children]

    def children(self, module: Module) -> list[Module]:
        return [self.modules[i] for i in self.child_indices[module.index]]

    def subtree(self, module: Module) -> Sequence[Module]:
        """The module and all below it."""
        return self.modules[module.index : module.end]

    def own_parameters(self, module: Module) -> tuple[Tensor, ...]:
        """A module's parameters without those that are another module's tensor."""
        if not self.tied:
            return module.parameters
        return tuple(t for t in module.parameters if (f"{module.path}.{t.name}" if module.path else t.name) not in self.tied)

    def ancestors(self, module: Module) -> Iterator[Module]:
        """Its parent, its parent's parent, ... up to the root."""
        while module.parent >= 0:
            module = self.modules[module.parent]
            yield module

    @property
    def all(self) -> int:
        """The bitset of every module."""
        return (1 << len(self.modules)) - 1

    @cached_property
    def layer_count(self) -> int:
        return max((m.layer for m in self.modules if m.layer is not None), default=-1) + 1

    @cached_property
    def dtype(self) -> str:
        """The floating dtype that most of the parameters' numbers are in, "" without any."""
        return main_dtype(tensor for module in self.modules for tensor in module.parameters)

    @cached_property
    def digest(self) -> str:
        """sha256 over paths, classes and tensor shapes: two trees with one digest take the same plan."""
        signatures: dict[tuple[int, int], str] = {}
        lines = []
        for m in self.modules:
            key = (id(m.cls), id(m.tensors))
            signature = signatures.get(key)
            if signature is None:
                tensors = ",".join(f"{t.name}{list(t.shape)}" for t in m.tensors if not t.buffer)
                signature = signatures[key] = f"\t{m.cls.name}\t{tensors}\n"
            lines.append(m.path + signature)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def to_networkx(self) -> networkx.DiGraph[str]:
        """The tree as a networkx DiGraph: nodes are paths, edges go from parent to child."""
        import networkx

        tree: networkx.DiGraph[str] = networkx.DiGraph(name=self.name)
        for m in self.modules:
            tree.add_node(m.path, cls=m.cls.name, role=m.role, layer=m.layer, expert=m.expert)
            if m.parent >= 0:
                tree.add_edge(self.modules[m.parent].path, m.path)
        return tree


def main_dtype(tensors: Iterable[Tensor]) -> str:
    """The floating dtype that most numbers of these tensors are in, "" without any."""
    counts: dict[str, int] = {}
    for tensor in tensors:
        if "float" in tensor.dtype:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel
    return max(counts, key=counts.__getitem__, default="")


def model_dtype(graph: ModuleGraph) -> str:
    """The dtype of a model's weights: of a model in hand, what most of them are; else what its config says. KtoptError for a model
    in hand with weights of a dtype that ktopt doesn't hold any in."""
    if graph.in_hand and graph.dtype:
        for module in graph.modules:
            other = next((t for t in module.parameters if "float" in t.dtype and t.dtype not in DTYPES), None)
            if other is not None:
                raise KtoptError(
                    f"{module.path}.{other.name} is {other.dtype}, and ktopt holds weights in {', '.join(DTYPES)}: convert the "
                    "model, or say in which to hold them with dtype"
                )
        return graph.dtype
    found = str(graph.config.get("dtype") or graph.config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return found if found in DTYPES else "bfloat16"


ROLE_SUFFIXES = (
    ("experts", ("Experts",)),
    ("router", ("TopkRouter", "TopKRouter", "Router", "MoEGate")),
    ("moe", ("MoE", "Moe", "SparseMoeBlock", "MoeBlock")),
    ("rotary", ("RotaryEmbedding",)),
    ("norm", ("RMSNorm", "LayerNorm", "RMSNormGated")),
    ("attention", ("Attention", "GatedDeltaNet")),
    ("mlp", ("MLP", "Mlp", "DenseMlpBlock")),
    ("layer", ("DecoderLayer",)),
    ("causal_lm", ("ForCausalLM", "ForConditionalGeneration")),
    ("model", ("Model",)),
)


def role_of(cls: ModuleClass) -> str:
    """What part a module plays, from its class: linear, embedding, experts, router, moe, rotary, norm, attention, mlp, layer,
    model, causal_lm, container, activation or other."""
    for dotted in cls.mro:
        if dotted == "torch.nn.modules.linear.Linear":
            return "linear"
        if dotted == "torch.nn.modules.sparse.Embedding":
            return "embedding"
        if dotted in ("torch.nn.modules.container.ModuleList", "torch.nn.modules.container.Sequential"):
            return "container"
    simple = cls.simple_name
    for role, suffixes in ROLE_SUFFIXES:
        if simple.endswith(suffixes):
            return role
    return "activation" if "activation" in cls.name.lower() else "other"
