"""Where tensors must change device: derived from the placement, never written by hand.

Every module has a home: the device of its own tensors, or for a container the device that most of its children are at home on
(experts don't vote: a block's stream doesn't follow them). Data flows in two ways. Along the spine of a model (embedding, layers in
order, final norm, head) a result stays where it was made, and the next module fetches it; masks and position embeddings are made
beside the embedding, and each layer fetches them. Inside a block a child that lives elsewhere fetches its input and hands its
result back to the block's home.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktopt.graph import Module, ModuleGraph
from ktopt.plan import Step, Transfer

_SPINE_ROLES = ("causal_lm", "model")


def derive_transfers(graph: ModuleGraph, steps: Sequence[Step]) -> tuple[Transfer, ...]:
    """The transfers of a placement, in the order of the tree."""
    used = {step.generate_device for step in steps if step.weight_bytes or step.rule is not None}
    if len(used) < 2:
        return ()
    homes = module_homes(graph, steps)
    found: list[Transfer] = []
    spine = _spine(graph)
    on_spine = {m.index for m in spine}
    ambient = next((m for m in spine if m.role == "embedding"), spine[0] if spine else None)
    before = ambient
    for module in spine:
        if before is None or ambient is None or module is ambient:
            continue
        home = homes[module.index]
        if module.role == "rotary":
            continue  # it brings its frequencies to its input, wherever they are kept
        if homes[before.index] != home:
            found.append(Transfer(module.path, "input", homes[before.index], home, before.path))
        elif home != homes[ambient.index] and _takes_ambient(graph, homes, module):
            found.append(Transfer(module.path, "input", homes[ambient.index], home, ambient.path))
        before = module
    open_blocks = [m for m in spine if m.end - m.index > 1]
    for block in open_blocks:
        found.extend(_inside(graph, steps, homes, block, on_spine))
    return tuple(found)


def _takes_ambient(graph: ModuleGraph, homes: Sequence[str], module: Module) -> bool:
    """Layers take masks and position embeddings besides the hidden states, for their attention, which fetches them itself where it
    lives elsewhere."""
    if module.layer is None:
        return False
    attentions = [child for child in graph.children(module) if child.role == "attention"]
    return not attentions or any(homes[child.index] == homes[module.index] for child in attentions)


def _spine(graph: ModuleGraph) -> list[Module]:
    """The modules that hidden states pass in order: children of the model and of its lists, leaves and layers."""
    found: list[Module] = []

    def walk(module: Module) -> None:
        for child in graph.children(module):
            if child.role in _SPINE_ROLES or child.role == "container":
                walk(child)
            else:
                found.append(child)

    if graph.modules:
        walk(graph.modules[0])
    # the embedding comes first, position embeddings next: both are made before the first layer, wherever they are declared
    first = {"embedding": 0, "rotary": 1}
    return sorted(found, key=lambda m: first.get(m.role, 2))


def module_homes(graph: ModuleGraph, steps: Sequence[Step]) -> list[str]:
    """The home device of every module, by index."""
    homes = [step.generate_device for step in steps]
    votes: dict[int, dict[str, int]] = {}
    late: dict[int, dict[str, int]] = {}
    for module in reversed(graph.modules):
        index = module.index
        step = steps[index]
        if step.inside:
            continue
        if not module.tensors:
            ballot = votes.pop(index, None) or late.pop(index, None)
            if ballot:
                homes[index] = _winner(ballot)
            elif step.rule is None or step.operator == "default":
                continue  # nothing below that owns anything: it runs wherever its input is
        if module.parent >= 0:
            box = late if step.role == "experts" else votes
            counts = box.get(module.parent)
            if counts is None:
                box[module.parent] = {homes[index]: 1}
            else:
                counts[homes[index]] = counts.get(homes[index], 0) + 1
    return homes


def _winner(ballot: dict[str, int]) -> str:
    """The device with most votes; among equals the one that voted last, which is the first child, since voting goes backwards."""
    if len(ballot) == 1:
        return next(iter(ballot))
    most = max(ballot.values())
    return [device for device, count in ballot.items() if count == most][-1]


def _inside(graph: ModuleGraph, steps: Sequence[Step], homes: Sequence[str], block: Module, on_spine: set[int]) -> list[Transfer]:
    found: list[Transfer] = []
    index = block.index
    while index < block.end:
        module = graph.modules[index]
        if steps[module.index].inside:
            index = module.end
            continue
        index += 1
        outer, inner = homes[module.parent], homes[module.index]
        answer = _answers_on(steps[module.index], inner)
        if outer == inner == answer or module.index in on_spine or not _runs(module, steps):
            continue
        if outer != inner:
            found.append(Transfer(module.path, "input", outer, inner, graph.modules[module.parent].path))
        if outer != answer:
            found.append(Transfer(module.path, "output", answer, outer, module.path))
    return found


def _answers_on(step: Step, home: str) -> str:
    """Where a module's result is: experts bring theirs to their `out_device` themselves."""
    wanted = step.kwargs.get("out_device") if step.role == "experts" else None
    return wanted or home


def _runs(module: Module, steps: Sequence[Step]) -> bool:
    """Whether a module has a place of its own: it owns tensors, or has children that do, or an operator of its own."""
    return bool(module.tensors) or any(step.weight_bytes for step in steps[module.index : module.end])
