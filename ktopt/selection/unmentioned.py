"""Experts that a rule file forgot: the largest part of a model, left on an accelerator under a block that a rule replaces."""

from __future__ import annotations

from ktopt.diagnostics import Report
from ktopt.graph import Module
from ktopt.match import Matches
from ktopt.placement import device_kind
from ktopt.ruleset import Rule
from ktopt.selection.families import in_words, template
from ktopt.selection.spots import name_origin
from ktopt.treeindex import span_of


def check_experts_mentioned(matches: Matches, report: Report) -> None:
    """KT603 at the rule that replaces a MoE block on an accelerator while nothing says where its experts go: they stay there too,
    as the model has them. Files for the CPU, and blocks that lie elsewhere than the experts (structure.py), aren't meant."""
    if device_kind(matches.ruleset.default_device) == "cpu":
        return
    left: dict[int, list[Module]] = {}
    for module, decision in matches.open:
        if module.role == "experts" and decision.rule is None and decision.place is None and not _is_taken(module, matches):
            rule = _block_rule(module, matches)
            if rule is not None:
                left.setdefault(rule.index, []).append(module)
    for index, modules in left.items():
        rule, default = matches.ruleset.rules[index], matches.ruleset.default_device
        size = sum(t.numel for m in modules for inside in matches.graph.modules[m.index : m.end] for t in inside.tensors) / 1e9
        message = (
            f"no rule takes {in_words(matches.graph, (m.index for m in modules))}: {size:.0f} billion weights stay on {default}"
        )
        help = f"say where they go, in a rule above those that take more: {_to_paste(modules[0], matches)}"
        report.warning("KT603", f"{message}, while rule {rule.number} replaces their blocks", name_origin(rule), help=help)


def _is_taken(module: Module, matches: Matches) -> bool:
    """Whether a rule takes something inside, as it does where experts are modules of their own."""
    inside = span_of(module.index, module.end)
    return any(matches.won(rule.index) & inside for rule in matches.ruleset.rules)


def _block_rule(experts: Module, matches: Matches) -> Rule | None:
    """The rule that replaces the block that the experts are in, where that lies on the default device as they do."""
    if experts.parent < 0 or matches.device(experts.parent) != matches.ruleset.default_device:
        return None
    decided = matches.decisions[experts.parent].rule
    rule = None if decided is None else matches.ruleset.rules[decided]
    return rule if rule is not None and rule.replace.operator.name != "default" else None


def _to_paste(experts: Module, matches: Matches) -> str:
    """A rule for experts at this place in every layer, in the file's language."""
    path = template(experts)
    replace = "KTransformersExperts"
    kwargs = "{generate_device: cpu, generate_op: KExpertsCPU}"
    if matches.ruleset.form == "native":
        return f'- {{match: "@{path}", replace: {replace}, kwargs: {kwargs}, recursive: false}}'
    name = path.replace(".", r"\.").replace("*", ".*")
    return (
        f"- {{match: {{name: '^{name}$'}}, "
        f"replace: {{class: ktransformers.operators.experts.{replace}, kwargs: {kwargs}}}, recursive: False}}"
    )
