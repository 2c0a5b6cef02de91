"""What is checked before a module is touched: the plan against the model, its devices, its operators, and every tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ktopt import registry
from ktopt.applying.same_model import check_contradictions, check_unused, no_numbers
from ktopt.diagnostics import KtoptError
from ktopt.graph import ITEM_BYTES, ModuleGraph, Tensor, main_dtype
from ktopt.implementation import BuildContext
from ktopt.operator import build_config
from ktopt.placement import device_kind
from ktopt.plan import Plan, Step
from ktopt.plan_check import verify, verify_config
from ktopt.weights import WeightError
from ktopt.weights.module import ModuleTensors

SHOWN = 10
"""How many of many alike findings a message lists."""


@dataclass(frozen=True)
class Replacement:
    """A module that an operator is to take over: what to build it from, and its implementation class."""

    context: BuildContext
    implementation: Any

    @property
    def path(self) -> str:
        return self.context.step.path


@dataclass(frozen=True, slots=True)
class Need:
    """A tensor that the model needs.

    name     its full name
    dtype    what it is held in, unless an operator holds it otherwise
    read_as  the name that the source has it by: its own, or that of a tensor tied to it
    tie      a name shared by all that are one tensor, or "" where it isn't tied
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    step: Step
    read_as: str
    tie: str = ""


@dataclass(frozen=True)
class Prepared:
    """A plan that has passed every check on this model and these weights."""

    plan: Plan
    graph: ModuleGraph
    root: nn.Module
    replacements: tuple[Replacement, ...]
    needs: dict[str, Need]


def prepare(plan: Plan, root: nn.Module, tensors: Any, carry_out: Plan | None = None) -> Prepared:
    """Resolve and check everything that the plan needs on this model; KtoptError lists what is wrong. Changes nothing.

    carry_out   the plan as it is to be carried out, where that isn't the one to check: with other names for devices
    """
    from ktopt.trees import graph_from_module

    graph = graph_from_module(root)
    config = getattr(root, "config", None)
    verify(plan, graph, config=config.to_dict() if config is not None and hasattr(config, "to_dict") else None)
    if config is not None and hasattr(config, "to_dict"):
        verify_config(plan, config.to_dict(), f"this {type(root).__name__}")
    plan = carry_out or plan
    replacements = tuple(_replacements(plan, graph, root))
    check_contradictions(tensors, config)
    needs = _needs(plan, graph, root, tensors)
    check_unused(tensors, [n.read_as for n in needs.values()], getattr(root, "_keys_to_ignore_on_load_unexpected", None) or ())
    return Prepared(plan, graph, root, replacements, needs)


def check_errors(plan: Plan, force: bool) -> None:
    """Refuse a plan that was compiled with errors, unless forced."""
    if plan.errors and not force:
        raise KtoptError("the plan holds errors:\n" + _listed(plan.errors) + "\nMend the rules, or apply it with force (--force)")


def check_devices(plan: Plan, otherwise: str = "") -> None:
    """Refuse devices that this machine lacks, naming what is placed there. `otherwise` is a way out beside planning for others."""
    wanted = dict.fromkeys((*plan.devices, *(t.target for t in plan.transfers)))
    lacking = [device for device in wanted if not has_device(device)]
    if not lacking:
        return
    lines = []
    for device in lacking:
        paths = [s.path for s in plan.steps if device in s.held_bytes]
        kind = device_kind(device)
        lines.append(f"{device}: {len(paths)} modules, the first is {paths[0] if paths else '-'}; {_device_state(kind)}")
    remap = " ".join(f"--remap {kind}=cpu" for kind in dict.fromkeys(map(device_kind, lacking)))
    raise KtoptError(f"this machine lacks devices that the plan uses:\n{_listed(lines)}\nPlan with {remap} to run here{otherwise}")


def has_device(device: str) -> bool:
    kind, _, number = device.partition(":")
    return kind == "cpu" or int(number or 0) < _device_count(kind)


def _device_count(kind: str) -> int:
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    backend = getattr(torch, kind, None)
    return int(backend.device_count()) if backend is not None and backend.is_available() else 0


def _device_state(kind: str) -> str:
    count = _device_count(kind)
    return f"torch {torch.__version__} sees {count if count else 'no'} {kind} device{'s' if count != 1 else ''} here"


def _replacements(plan: Plan, graph: ModuleGraph, root: nn.Module) -> Iterator[Replacement]:
    for step in plan.steps:
        if step.operator == "default" or step.inside:
            continue
        spec = registry.find(step.operator)
        config = build_config(spec, step.kwargs)[0] if spec else None
        assert spec is not None
        assert config is not None
        module = graph.by_path[step.path]
        reason = spec.refuses(module, config) if spec.fits(module) else f"it is {module.role}"
        if reason:  # a plan that was compiled with errors, and forced
            raise KtoptError(f"{plan.blame(step)}: {step.path}: {step.operator} can't take it: {reason}")
        if not spec.implementation:
            continue
        device, dtype = torch.device(step.generate_device), getattr(torch, step.dtype)
        context = BuildContext(step, config, module, device, dtype, getattr(root, "config", None))
        yield Replacement(context, registry.implementation(spec))


def _needs(plan: Plan, graph: ModuleGraph, root: nn.Module, tensors: Any) -> dict[str, Need]:
    """Every parameter and persistent buffer, found in the source under its own name or a tied one."""
    groups = tied_groups(root)
    fp32 = _fp32_names(root, plan.dtype)
    modules = dict(root.named_modules(remove_duplicate=False))
    in_hand = isinstance(tensors, ModuleTensors)
    needs: dict[str, Need] = {}
    problems: list[str] = []
    for module in graph.modules:
        step = plan.by_path[module.path]
        transient = modules[module.path]._non_persistent_buffers_set
        for tensor in module.tensors:
            if tensor.buffer and tensor.name in transient:
                continue
            name = f"{module.path}.{tensor.name}" if module.path else tensor.name
            try:
                read_as, tie = _find(name, groups.get(name, ()), tensors)
                stored = tensors.stored(read_as)
                shape = tuple(stored.shape)
                if shape != tuple(tensor.shape):
                    raise WeightError(f"{name} has shape {list(shape)} in the file, {list(tensor.shape)} in the model")
                if "float" in tensor.dtype and (reason := no_numbers(tensors, read_as)):
                    raise WeightError(reason)
            except WeightError as error:
                problems.append(f"{error} (wanted by {plan.blame(step)})")
                continue
            if in_hand and step.operator == "default" and step.dtype == main_dtype(module.parameters):
                dtype = tensor.dtype  # nothing asks for another
            else:
                dtype = _dtype(tensor, step, fp32.search(name) if fp32 else None)
            needs[name] = Need(name, shape, dtype, tensor.numel * ITEM_BYTES[dtype], step, read_as, tie)
    if problems:
        raise WeightError(f"{tensors.path}: these weights don't fit the plan's model:\n{_listed(problems)}")
    return needs


def _dtype(tensor: Tensor, step: Step, keeps_fp32: Any) -> str:
    """What a tensor is held in: floating-point parameters in the step's dtype, buffers in their own."""
    if "float" not in tensor.dtype:
        return tensor.dtype
    return "float32" if keeps_fp32 else tensor.dtype if tensor.buffer else step.dtype


def _fp32_names(root: Any, dtype: str) -> re.Pattern[str] | None:
    """The tensors that the model's class keeps in float32 whatever its dtype, as transformers loads them: routers, their biases."""
    names = root._get_dtype_plan(getattr(torch, dtype)) if hasattr(root, "_get_dtype_plan") else {}
    return re.compile("|".join(name.replace("*", ".*") for name in names)) if names else None


def _find(name: str, group: tuple[str, ...], tensors: Any) -> tuple[str, str]:
    """Where a tensor's values come from: (name in the source, name of its tie or "")."""
    held = [other for other in group if other in tensors]
    if name not in tensors:
        if not held:
            raise WeightError(f"{name} is missing")
        return held[0], group[0]
    tied = group and all(tensors.stored(other).stored == tensors.stored(name).stored for other in held)
    return name, group[0] if tied else ""


def tied_groups(root: nn.Module) -> dict[str, tuple[str, ...]]:
    """Names of parameters that are one tensor, or that transformers ties: name -> all names of its group, in a fixed order."""
    by_tensor: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    groups = {name: tuple(names) for names in by_tensor.values() if len(names) > 1 for name in names}
    for target, source in (getattr(root, "all_tied_weights_keys", None) or {}).items():
        union = tuple(dict.fromkeys((*groups.get(source, (source,)), *groups.get(target, (target,)))))
        groups.update(dict.fromkeys(union, union))
    return groups


def _listed(lines: Iterable[str], shown: int = SHOWN) -> str:
    lines = list(lines)
    more = [f"  ... and {len(lines) - shown} more"] if len(lines) > shown else []
    return "\n".join([f"  {line}" for line in lines[:shown]] + more)
