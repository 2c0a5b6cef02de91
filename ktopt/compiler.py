"""ktopt is a compiler; this is it. A rule file is its source, a model's module tree its target, and it has one direction:

    text -> parse -> validate -> match -> plan -> apply
            Document  RuleSet    Matches  Plan    PreTrainedModel

`run_stages` calls the stages in that order, up to the plan, each from frozen data to frozen data, and collects every finding in one
Report. `check` returns the findings; `compile` the plan, or an error that holds the findings. `apply` (ktopt/applying) is the last
stage: it reads the plan and nothing else.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.arguments import known_options, model_given, options_given, rules_given, weights_given
from ktopt.diagnostics import CompileError, Diagnostic, Report, UsageError
from ktopt.parse import parse, read_source
from ktopt.source import Document, SourceFile
from ktopt.validate import validate

if TYPE_CHECKING:
    from ktopt.graph import ModuleGraph
    from ktopt.match import Matches
    from ktopt.placement import Hardware
    from ktopt.plan import Plan
    from ktopt.plan_options import PlanOptions
    from ktopt.ruleset import RuleSet
    from ktopt.weights.source import StoredTensor

Rules = str | Path | SourceFile
Model = Any
"""A shipped name, a folder, a config.json, a GGUF file, a config (a mapping or transformers' object), a ModuleGraph, or an
nn.Module in hand."""
Weights = Any
"""A GGUF file, a safetensors file, a folder with either, or an open WeightSource."""


@dataclass(frozen=True)
class Compilation:
    """What each stage made, None from the first that could not run, and all findings."""

    document: Document
    ruleset: RuleSet | None
    graph: ModuleGraph | None
    matches: Matches | None
    plan: Plan | None
    report: Report

    @property
    def unsilenced(self) -> list[Diagnostic]:
        """The findings that no `# ktopt: ignore[...]` comment silences, by place."""
        return _unsilenced(self.document, self.report.sorted())


def run_stages(
    rules: Rules,
    model: Model | None = None,
    *,
    weights: Weights | None = None,
    device: Any = None,
    dtype: Any = None,
    hardware: Hardware | str | Path | None = None,
    remap: Mapping[str, str] | str | None = None,
    chunk_size: int | None = None,
    config: Any = None,
    mode: str | None = None,
    context: int | None = None,
    storage: str | None = None,
    popularity: Any = None,
    room: int | None = None,
    batch: int | None = None,
    plan: bool = True,
) -> Compilation:
    """Compile `rules` for `model`, or only check the file where there is no model. Never raises for what is wrong in the file.
    Without `plan` it stops before that; making it finds only what the machine (`hardware`) can't do.

    Weights that carry their model's config (a GGUF file, a folder with a config.json) stand in for a model that isn't given. Their
    headers are compared with what the plan needs (KT7), and tell selectors how tensors are stored. WeightError where they can't be
    read, UsageError for arguments that can't be meant (arguments.py says what each may be).
    """
    rules, model, weights = rules_given(rules), model_given(model), weights_given(weights)
    asked = {
        "device": device, "dtype": dtype, "hardware": hardware, "remap": remap, "chunk_size": chunk_size, "config": config,
        "mode": mode, "context": context, "storage": storage, "popularity": popularity, "room": room,
        "batch": batch,
    }  # fmt: skip
    given = options_given(asked)
    options = None
    if given:
        from ktopt.plan_options import PlanOptions

        options = PlanOptions(**given)  # raises for what can't be meant, though there may come to be no plan
    report = Report()
    document = parse(rules if isinstance(rules, SourceFile) else read_source(rules), report)
    ruleset = validate(document, report)
    target = weights if model is None else model
    if target is None:
        return Compilation(document, ruleset, None, None, None, report)
    with _on_a_tree():
        return _on_model(document, ruleset, target, weights, options, report, plan)


def _on_model(
    document: Document,
    ruleset: RuleSet | None,
    model: Model,
    weights: Weights | None,
    options: PlanOptions | None,
    report: Report,
    wants_plan: bool,
) -> Compilation:
    """The stages that need a model's tree. They are imported here, so that a check without a model imports none of them."""
    from ktopt.block_rules import attend_by_blocks
    from ktopt.graph import ModuleGraph
    from ktopt.match import match
    from ktopt.plan_options import LONG_CONTEXT, PlanOptions
    from ktopt.planning import make_plan
    from ktopt.selection import check_selection
    from ktopt.trees import load_tree

    options = options or PlanOptions()
    graph = model if isinstance(model, ModuleGraph) else load_tree(model)
    if ruleset is None or report.stops_plan:
        return Compilation(document, ruleset, graph, None, None, report)
    if options.popularity is not None and ruleset.auto is None:
        raise UsageError(
            "popularity is for files that leave places to ktopt (`place: auto`); ktopt place --popularity writes it into others"
        )
    ruleset = replace(ruleset, default_device=options.default_device(ruleset))
    stored = _stored(ruleset, model, weights, graph, wants_plan)
    if options.storage is not None:
        from ktopt.weights.usual import usual_storage

        options = options if stored is None else replace(options, storage=None)
        stored = usual_storage(graph, options.storage) if options.storage is not None else stored
    storage = {name: tensor.types for name, tensor in stored.items()} if stored is not None and ruleset.asks_storage else None
    made_room = ""
    blocks = options.mode == LONG_CONTEXT

    def in_mode(plan: Plan) -> Plan:
        return attend_by_blocks(plan, graph) if blocks else plan

    if ruleset.auto is not None and options.hardware is not None and wants_plan:
        from ktopt.placing.place import place_automatically

        ruleset, made_room = place_automatically(ruleset, graph, options.hardware, options, stored, report, in_mode)
    matches = match(ruleset, graph, options.hardware, report, storage=storage)
    check_selection(matches, report)
    if weights is not None:
        from ktopt.weight_checks import check_weights

        check_weights(matches, weights, report)
    if report.stops_plan or not wants_plan:
        return Compilation(document, ruleset, graph, matches, None, report)
    plan = in_mode(make_plan(ruleset, graph, matches, options, report, stored))
    if options.context is not None and options.hardware is not None and not any(d.code == "KT506" for d in report.errors):
        from ktopt.working_memory.finding import check_context

        check_context(plan, ruleset, options.hardware, options.context, options.batch, report, graph, stored)
    notes = (*plan.notes, made_room) if made_room else plan.notes
    plan = replace(plan, errors=tuple(str(d) for d in _unsilenced(document, report.errors)), notes=notes)
    return Compilation(document, ruleset, graph, matches, plan, report)


def _stored(
    ruleset: RuleSet, model: Model, weights: Weights | None, graph: ModuleGraph, wants_plan: bool
) -> Mapping[str, StoredTensor] | None:
    """How the model's parameters are stored, where a selector asks or an operator keeps them so; None where nothing tells. Weights
    that weren't given are read from their file where selectors ask, or where the tree was read from it too."""
    keeps = wants_plan and any(op.keeps for rule in ruleset.rules for op in rule.replace.operator.ops.values())
    of_the_tree = weights is not None or str(graph.name).endswith(".gguf")
    if not ruleset.asks_storage and not (keeps and of_the_tree):
        return None
    from ktopt.weights.storage import stored_for

    return stored_for(model, weights, graph)


def check(rules: Rules, model: Model | None = None, **options: Any) -> Report:
    """Every finding on a rule file that no comment in it silences. Options: weights, device, dtype, hardware, remap, chunk_size,
    config, mode, context, storage, popularity, room, batch, as run_stages'."""
    known_options(options)
    return Report(run_stages(rules, model, **options).unsilenced)


def compile(rules: Rules, model: Model | None = None, **options: Any) -> Plan:
    """The plan of `rules` on `model`. CompileError, which holds the report, where no plan can be made; findings that leave a plan
    standing are in Plan.errors, and `apply` refuses such a plan unless forced. Without a model, `weights` that carry its config
    are it. Options as `check`'s."""
    known_options(options)
    if model is None and options.get("weights") is None:
        raise UsageError(
            "a plan needs a model: a shipped name, a folder, a config, a config.json, a GGUF file, or a module in hand"
        )
    compilation = run_stages(rules, model, **options)
    if compilation.plan is None:
        raise CompileError(compilation.report)
    return compilation.plan


@contextmanager
def _on_a_tree() -> Iterator[None]:
    """What working on a tree needs around it: one budget for all patterns, which may be a stranger's, and no garbage collection,
    which on a tree of 75,000 modules takes a third of the time and finds nothing."""
    from ktopt.pattern import shared_budgets

    was_on = gc.isenabled()
    gc.disable()
    try:
        with shared_budgets():
            yield
    finally:
        if was_on:
            gc.enable()


def _unsilenced(document: Document, diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    if not any("ktopt" in source.text for source in document.sources.values()):
        return diagnostics
    from ktopt.suppress import unsilenced

    return unsilenced(document, diagnostics)
