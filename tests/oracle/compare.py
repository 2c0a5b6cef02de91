"""Compares a plan with what the oracle expects, module by module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktopt.graph import ModuleGraph
from ktopt.plan import Plan, Step
from ktopt.registry import find
from oracle.carry_over import CarryOver, Expected
from oracle.upstream_semantics import canonical

RESPELT = {"chunck_size": "chunk_size", "per_layer_prefill_intput_threshold": "per_layer_prefill_input_threshold"}
"""Upstream's misspellings of its own kwargs, and the names by which a plan has them."""


def differences(plan: Plan, graph: ModuleGraph, oracle: CarryOver) -> tuple[list[str], int]:
    """Every disagreement in words, and how many modules were compared: those that own parameters or are replaced."""
    found: list[str] = []
    compared = 0
    for module in graph:
        step = plan.by_path[module.path]
        expected = oracle.expect(module)
        if not module.path:
            continue  # upstream never applied a rule to the root
        if expected is None:
            if module.parameters or step.operator != "default":
                found.append(f"{module.path}: upstream had no such module, and ktopt gives it {step.operator}")
            continue
        if not module.parameters and step.operator == "default" and expected.operator == "default":
            continue
        compared += 1
        found += [f"{module.path}: {what}" for what in disagreements(step, expected)]
    return found, compared


def disagreements(step: Step, expected: Expected) -> list[str]:
    if expected.inside:
        right = step.operator == "default" and step.inside == expected.inside
        return [] if right else [f"{step.operator} inside {step.inside!r}, where upstream left it to {expected.inside}"]
    found = [f"inside {step.inside}, where upstream had a decision of its own"] if step.inside else []
    operator = ktopt_name(expected.operator)
    if step.operator != operator:
        found.append(f"{step.operator}, expected {operator}")
    for key, value in expected.kwargs.items():
        name = RESPELT.get(key, key)
        if step.kwargs.get(name) != canonical_value(key, value):
            found.append(f"{name} is {step.kwargs.get(name)!r}, expected {canonical_value(key, value)!r}")
    places = [
        ("generate", step.generate_device, expected.generate_device),
        ("prefill", step.prefill_device, expected.prefill_device),
        ("copies", step.replicas, expected.replicas),
    ]
    return found + [f"{what} on {here}, expected {there}" for what, here, there in places if here != there]


def ktopt_name(written: str) -> str:
    """The operator that a name in a rule file stands for here. KTransformers' general operators keep their names; those written for
    NPUs and XPUs may stand for a general one."""
    if written == "default":
        return written
    spec = find(written)
    name = written.rpartition(".")[2]
    assert spec is not None, f"{written} is no operator here"
    special = ".ascend." in written or "IPEXLLM" in name
    assert special or spec.name == name, f"{written} stands for {spec.name}"
    return spec.name


def canonical_value(key: str, value: Any) -> Any:
    if key.endswith("device") and isinstance(value, str):
        return canonical(value)
    if key == "transfer_map" and isinstance(value, Mapping):
        return {layer: canonical(device) for layer, device in value.items()}
    return value
