"""What `mode: long_context` adds to rules: attention that they leave as it is attends to blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktopt.diagnostics import KtoptError
from ktopt.graph import Module, ModuleGraph
from ktopt.operator import OperatorSpec
from ktopt.placement import canonical_device
from ktopt.plan import Plan, RuleRef, Step
from ktopt.registry import find

OPERATOR = "KDynamicAttention"
RULE = "long_context"
"""What the plan calls the rule that it is by."""


def attend_by_blocks(plan: Plan, graph: ModuleGraph) -> Plan:
    """The plan with KDynamicAttention on all attention that no rule gives to an operator with an implementation of its own.

    KtoptError where an operator of the rules can't stand over that, and where no attention is left to keep its cache in blocks.
    """
    spec = find(OPERATOR)
    assert spec is not None
    rule = len(plan.rules)
    steps = tuple(_taken(spec, step, rule) if _is_free(spec, module, step) else step for module, step in _pairs(plan, graph))
    if steps != plan.steps:
        made = RuleRef(RULE, plan.rule_file, 1, 1, spec.name)
        plan = replace(plan, steps=steps, rules=(*plan.rules, made))
        _check_above(plan, graph)
    elif why := _why_none(plan, graph, spec):
        raise KtoptError(f"{why}: run without mode long_context")
    check_blocks(plan)
    return plan


def _why_none(plan: Plan, graph: ModuleGraph, spec: OperatorSpec) -> str:
    """Why no attention that rules leave as it is can keep its cache in blocks, "" where some does or rules replace all of it."""
    attention = [(module, step) for module, step in _pairs(plan, graph) if step.role == "attention"]
    if any(_keeps(step) for _, step in attention):
        return ""
    left = (module for module, step in attention if (own := find(step.operator)) is not None and not own.implementation)
    return next((why for module in left if spec.fits(module) and (why := spec.refuses(module, spec.config()))), "")


def check_blocks(plan: Plan) -> None:
    """KtoptError where no attention of a plan keeps its cache in blocks."""
    attention = [step for step in plan.steps if step.role == "attention"]
    if any(_keeps(step) for step in attention):
        return
    if not attention:
        raise KtoptError(f"{plan.model.source}: there is no attention in this model, so that it has no use for mode long_context")
    first = attention[0]
    raise KtoptError(
        f"{first.path} becomes {first.operator} ({plan.blame(first)}), and no attention of this plan keeps its cache in blocks: "
        f"replace attention by {OPERATOR}, or run without mode long_context"
    )


def _pairs(plan: Plan, graph: ModuleGraph) -> list[tuple[Module, Step]]:
    return list(zip(graph.modules, plan.steps, strict=True))


def _keeps(step: Step) -> bool:
    spec = find(step.operator)
    return spec is not None and spec.blocks


def _is_free(spec: OperatorSpec, module: Module, step: Step) -> bool:
    """Whether a module is attention that its operator leaves to transformers, and that can keep its cache in blocks."""
    own = find(step.operator)
    unchanged = own is not None and not own.implementation and not step.inside
    return unchanged and step.role == "attention" and spec.fits(module) and spec.refuses(module, spec.config()) is None


def _taken(spec: OperatorSpec, step: Step, rule: int) -> Step:
    config: Any = spec.config
    device = canonical_device(step.generate_device)
    kwargs = config(generate_device=device, prefill_device=device).to_kwargs()
    return step._replace(operator=spec.name, kwargs=kwargs, rule=rule, alias="", prefill_device=device, runs={}, notes=())


def _check_above(plan: Plan, graph: ModuleGraph) -> None:
    """KtoptError for an operator over the changed attention that can't run it."""
    for module, step in _pairs(plan, graph):
        spec = find(step.operator)
        if spec is None or spec.refuses_below is None or step.operator == OPERATOR:
            continue
        below = plan.steps[module.index + 1 : module.end]
        if reason := spec.refuses_below(module, step, below, plan.model.config):
            what = f"{step.path} becomes {step.operator} ({plan.blame(step)})"
            raise KtoptError(f"{what}, which mode long_context doesn't allow: {reason}")
