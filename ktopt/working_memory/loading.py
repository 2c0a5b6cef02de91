"""The most that devices hold while a plan's weights are loaded: module after module, as `apply` goes."""

from __future__ import annotations

from collections.abc import Mapping

from ktopt.graph import ITEM_BYTES, Module, ModuleGraph
from ktopt.kept import is_matrix
from ktopt.operator import build_config
from ktopt.plan import Plan, Step
from ktopt.registry import find
from ktopt.weights.source import StoredTensor
from ktopt.working_memory.passing import Peak


def loading_peaks(plan: Plan, graph: ModuleGraph | None, stored: Mapping[str, StoredTensor] | None) -> dict[str, Peak]:
    """By device: what is there already, and what a module's weights take while they are made. In main memory the file's pages are
    counted too from which a tensor is read, where `stored` tells how many; without a tree, weights alone are."""
    placed: dict[str, int] = {}
    most: dict[str, Peak] = {}

    def note(device: str, nbytes: int, step: Step) -> None:
        if nbytes > most.get(device, Peak()).nbytes:
            most[device] = Peak(nbytes, step.path, step.operator)

    for number, step in enumerate(plan.steps):
        if not step.weight_bytes:
            continue
        module = graph.modules[number] if graph is not None else None
        making = _made_bytes(step, module) if module is not None else 0
        reading = _read_bytes(step, module, stored or {}, packs=making > 0) if module is not None else 0
        for device, held in step.held_bytes.items():
            made = max(held, making) + (reading if device == "cpu" else 0)
            note(device, placed.get(device, 0) + made, step)
            placed[device] = placed.get(device, 0) + held
        note("cpu", placed.get("cpu", 0) + reading, step)
    return most


def _made_bytes(step: Step, module: Module) -> int:
    """What an operator's weights take on their device while they are made."""
    spec = find(step.operator)
    if spec is None or spec.loading is None or not module.tensors:
        return 0
    config, _ = build_config(spec, step.kwargs)
    return spec.loading(module, config or spec.config(), step.dtype)


def _read_bytes(step: Step, module: Module, stored: Mapping[str, StoredTensor], *, packs: bool) -> int:
    """Pages of the file that are mapped while a tensor becomes numbers, and a copy of it where the file has it transposed or in
    other numbers, or where it is a stack of matrices that its operator packs."""
    most = 0
    for tensor in module.tensors:
        found = stored.get(f"{step.path}.{tensor.name}")
        if found is None or (step.stored and is_matrix(tensor)):
            continue
        copied = 0 if found.in_place and not (packs and len(tensor.shape) == 3) else tensor.numel * ITEM_BYTES[step.dtype]
        most = max(most, found.nbytes + copied)
    return most
