"""How many bytes a plan's transfers move for each token that passes the model, from the shapes of its tree.

A module that fetches its input fetches the hidden states, or for a projection its in_features; experts fetch the router's choice
besides. Layers and attention take position embeddings and position ids too, which are copied once for each device and token,
whoever asks first. Projections of one input share its copy likewise. Masks are left out: they grow with the context, and most
attention functions need none for one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktopt.graph import ITEM_BYTES, Module, ModuleGraph
from ktopt.models.config_checks import EXPERT_COUNTS
from ktopt.plan import Plan, Transfer
from ktopt.transfers import module_homes

ID_BYTES = 8
ROUTER_ITEM_BYTES = 4
"""Routers compute in float32."""
TAKES_POSITIONS = ("layer", "attention")
SAME_INPUT = (
    "q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj", "in_proj_qkvz", "in_proj_ba",
    "in_proj_qkv", "in_proj_z",
)  # fmt: skip
"""Names of projections that take their block's input as it is."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What one transfer moves for a token.

    nbytes  None where the module's inputs or results aren't known; 0 where all of it is on the device already
    what    in words: "hidden states, positions"
    """

    nbytes: int | None
    what: str


def transfer_sizes(plan: Plan, graph: ModuleGraph) -> list[Moved]:
    """What each of the plan's transfers moves, in their order."""
    sizes = _Sizes(plan, graph)
    return [sizes.of(transfer) for transfer in plan.transfers]


def hidden_size(plan: Plan, graph: ModuleGraph) -> int:
    """Numbers of a token's hidden states."""
    embedding = _embedding(graph)
    return embedding.tensors[0].shape[-1] if embedding else int(plan.model.config.get("hidden_size") or 0)


def _embedding(graph: ModuleGraph) -> Module | None:
    return next((m for m in graph.modules if m.role == "embedding" and m.tensors), None)


class _Sizes:
    """The widths of a model, and which devices have a token's shared tensors already."""

    def __init__(self, plan: Plan, graph: ModuleGraph) -> None:
        self.graph, config = graph, plan.model.config
        self.item = ITEM_BYTES[plan.dtype]
        embedding, self.hidden = _embedding(graph), hidden_size(plan, graph)
        rotary = [m for m in graph.modules if m.role == "rotary" and m.layer is None]
        self.frequencies = {
            t.name: t.numel for m in rotary for t in m.tensors if t.name.endswith("inv_freq") and "original" not in t.name
        }
        self.layer_types = config.get("layer_types") or ()
        self.experts = next((int(config[key]) for key in EXPERT_COUNTS if config.get(key)), 0)
        self.chosen = int(config.get("num_experts_per_tok") or config.get("moe_top_k") or 0)
        self.embedding = embedding.path if embedding else None
        homes = module_homes(graph, plan.steps)
        self.home = homes[embedding.index] if embedding else ""
        self.have_positions: set[tuple[str, str]] = set()
        self.have_input: set[tuple[int, str]] = set()

    def of(self, transfer: Transfer) -> Moved:
        module = self.graph.by_path[transfer.path]
        parts = self._output(module) if transfer.side == "output" else self._input(module, transfer)
        if any(count is None for count, _ in parts):
            return Moved(None, "not known")
        total = sum(count or 0 for count, _ in parts)
        if module.expert is not None and self.experts:
            total = round(total * min(1.0, self.chosen / self.experts))  # a token visits the chosen ones alone
        return Moved(total, ", ".join(dict.fromkeys(word for count, word in parts if count)) or "copied already")

    def _input(self, module: Module, transfer: Transfer) -> list[tuple[int | None, str]]:
        device = transfer.target
        at_home = module.role == "layer" and module.layer and transfer.after == self.embedding
        parts = [] if at_home else [self._first(module, device, self._width(module, 1))]
        if module.role == "experts":
            parts.append((self.chosen * (ROUTER_ITEM_BYTES + ID_BYTES), "the router's choice"))
        if module.role in TAKES_POSITIONS and device != self.home:
            parts.append((self._new_positions(module, device), "positions"))
        return parts

    def _new_positions(self, module: Module, device: str) -> int:
        """Bytes of cos, sin and position ids that a device hasn't had yet. A model may have cos and sin by kind of layer."""
        name, total = "inv_freq", 0
        if len(self.frequencies) > 1 and module.layer is not None and module.layer < len(self.layer_types):
            name = f"{self.layer_types[module.layer]}_inv_freq"
        if (device, name) not in self.have_positions:
            total += 4 * self.frequencies.get(name, 0) * self.item  # both have two numbers for each frequency
        if (device, "ids") not in self.have_positions:
            total += ID_BYTES
        self.have_positions |= {(device, name), (device, "ids")}
        return total

    def _first(self, module: Module, device: str, width: int | None) -> tuple[int | None, str]:
        """The input's bytes, none where a sibling has fetched the same."""
        word = "hidden states" if width == self.hidden else "activations"
        if module.role == "linear" and module.name in SAME_INPUT:
            known = (module.parent, device)
            if known in self.have_input:
                return 0, word
            self.have_input.add(known)
        return (None if width is None else width * self.item), word

    def _output(self, module: Module) -> list[tuple[int | None, str]]:
        if module.role == "router":
            logits, choice = self.experts * ROUTER_ITEM_BYTES, self.chosen * (ROUTER_ITEM_BYTES + ID_BYTES)
            return [(logits, "the router's scores"), (choice, "the router's choice")]
        width = self._width(module, 0)
        return [(None if width is None else width * self.item, "hidden states" if width == self.hidden else "activations")]

    def _width(self, module: Module, side: int) -> int | None:
        """Numbers a token at the input (`side` 1) or output (0) of a module; None for one whose kind doesn't tell."""
        weight = next((t.shape for t in module.parameters if t.name == "weight"), ())
        if module.role == "linear":
            return weight[side] if len(weight) == 2 else None
        if module.role == "norm":
            width = weight[0] if len(weight) == 1 else self.hidden
            return self._of_projection(module, width)
        known = ("layer", "attention", "mlp", "moe", "experts", "router", "embedding", "causal_lm", "model")
        return self.hidden if module.role in known else None

    def _of_projection(self, norm: Module, width: int) -> int:
        """A norm of heads is applied to each head of the projection of its name."""
        wanted = norm.name.removesuffix("_norm") + "_proj"
        siblings = self.graph.children(self.graph.modules[norm.parent]) if norm.name.endswith("_norm") else []
        shapes = [t.shape for sibling in siblings if sibling.name == wanted for t in sibling.parameters if len(t.shape) == 2]
        return shapes[0][0] if shapes and shapes[0][0] % width == 0 else width
