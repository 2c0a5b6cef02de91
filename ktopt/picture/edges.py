"""What passes between devices, as edges between the groups of a folded plan: how often a token crosses each, and with how many
bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ktopt.folded import Group
from ktopt.graph import ITEM_BYTES, ModuleGraph
from ktopt.picture.own_moves import own_moves
from ktopt.picture.transfer_sizes import Moved, hidden_size, transfer_sizes
from ktopt.plan import Plan, Transfer

UNKNOWN = Moved(None, "not known")


@dataclass(frozen=True, slots=True)
class Edge:
    """Transfers from modules of one group to those of another, between the same two devices.

    side    which side of a module they are at: "input" of the target, or "output" of the source
    count   how many transfers
    moving  how many of them move something that the target doesn't have already, or may
    nbytes  a token's, of all of them together; None where that isn't known
    what    the tensors in words: "hidden states, positions"
    by_operator  the operator moves them itself, and the plan has no transfer for it
    """

    source: Group
    target: Group
    from_device: str
    to_device: str
    side: str
    count: int
    moving: int
    nbytes: int | None
    what: str
    by_operator: bool = False


def edges_of(plan: Plan, root: Group, graph: ModuleGraph | None) -> tuple[Edge, ...]:
    """The plan's transfers folded as its tree is, in the order of their first; sizes need the model's tree."""
    moved = transfer_sizes(plan, graph) if graph is not None else [UNKNOWN] * len(plan.transfers)
    own = list(own_moves(plan, hidden_size(plan, graph) if graph is not None else None, ITEM_BYTES.get(plan.dtype, 0)))
    all_moves = [*zip(plan.transfers, moved, strict=True), *own]
    groups = {path: group for group in root.walk() for path in group.paths}
    found: dict[tuple[int, int, str, str, str, bool], list[tuple[Transfer, Moved]]] = {}
    ends: dict[int, Group] = {}
    for number, (transfer, size) in enumerate(all_moves):
        source, target = (_group_of(groups, path) for path in transfer_ends(transfer))
        ends[id(source)], ends[id(target)] = source, target
        by_operator = number >= len(plan.transfers)
        key = (id(source), id(target), transfer.source, transfer.target, transfer.side, by_operator)
        found.setdefault(key, []).append((transfer, size))
    return tuple(
        Edge(
            ends[source], ends[target], from_device, to_device, side, len(all_), *_together([size for _, size in all_]), by_operator
        )
        for (source, target, from_device, to_device, side, by_operator), all_ in found.items()
    )


def transfer_ends(transfer: Transfer) -> tuple[str, str]:
    """The modules that a transfer goes between: what made the tensors, and where they enter (an output goes to the parent)."""
    parent = transfer.path.rpartition(".")[0]
    if transfer.side == "output":
        return transfer.path, parent
    return transfer.after or parent, transfer.path


def _group_of(groups: dict[str, Group], path: str) -> Group:
    """The group of a module, or of the nearest above it that the tree has."""
    while path not in groups:
        path = path.rpartition(".")[0]
    return groups[path]


def _together(sizes: Sequence[Moved]) -> tuple[int, int | None, str]:
    """How many move something, their bytes, and what."""
    known = [size.nbytes for size in sizes if size.nbytes is not None]
    words = dict.fromkeys(word for size in sizes if size.nbytes for word in size.what.split(", "))
    total = sum(known) if len(known) == len(sizes) else None
    return sum(size.nbytes != 0 for size in sizes), total, ", ".join(words) or ("copied already" if total == 0 else "not known")
