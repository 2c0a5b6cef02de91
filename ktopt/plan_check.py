"""Whether a plan from a file is one: each of its rows compared with the model's tree and with what its operator declares.

A plan file may have been edited, or damaged, or made by other versions; what it says is carried out as it stands. So before one is
shown, compared or applied, the tree is rebuilt from the config that it carries, and everything that follows from tree, operators
and devices is worked out again. What only rules can tell (which operator, which device) is the plan's own to say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ktopt import registry
from ktopt.diagnostics import KtoptError
from ktopt.graph import ITEM_BYTES, Module, ModuleGraph
from ktopt.kept import is_matrix, kept_types, possible_bytes
from ktopt.operator import OperatorConfig, OperatorSpec, build_config, op_on, yaml_text
from ktopt.placement import DTYPES, Footprint, device_kind
from ktopt.plan import Plan, Step, digest_of
from ktopt.plan_json import PlanFileError, load_plan
from ktopt.versions import installed
from ktopt.weights.agreement import config_contradictions

_SHARES = re.compile(r"shares its (\w+) with (\S+)")
SHOWN = 4
"""How many of many alike findings a message lists."""
COUNTED = {"ktopt": 2, "transformers": 1}
"""How many numbers of a version must agree. Of ktopt's two, since before 1.0 a minor version may change what an operator means; of
transformers' the first, whose classes a plan names: where a minor version changed those, the tree differs, and that is refused."""


def open_plan(path: str | os.PathLike[str], force: bool = False, *, rebuild: bool = True) -> Plan:
    """The plan in a file, checked. KtoptError names the file and what differs.

    force    take a plan that other versions made
    rebuild  build the tree from the plan's config and compare it. Without, and for a plan of a module that has no config, the
             comparison is made when the plan is applied
    """
    path = Path(path)
    plan = load_plan(path)
    check_versions(plan, str(path), force)
    if rebuild and plan.model.config.get("model_type"):
        from ktopt.trees import load_tree

        verify(plan, load_tree(plan.model.config), str(path))
    return plan


def check_versions(plan: Plan, where: str, force: bool = False) -> None:
    """KtoptError where a plan was made by versions of ktopt or transformers that these don't stand in for (COUNTED). A plan without
    versions, which a lock file is, is taken."""
    from ktopt import __version__

    made_by = {"ktopt": (plan.ktopt_version, __version__), "transformers": (plan.transformers_version, installed("transformers"))}
    for package, (theirs, ours) in made_by.items():
        count = COUNTED[package]
        if theirs and ours and theirs.split(".")[:count] != ours.split(".")[:count] and not force:
            raise KtoptError(
                f"{where}: this plan was made by {package} {theirs}, and here is {ours}: make it again with `ktopt plan`, or use "
                "it all the same with --force"
            )


def verify(plan: Plan, graph: ModuleGraph, where: str = "", config: Any = None) -> None:
    """KtoptError where a plan isn't one for this tree. `where` names its file; `config` is the config of the model, as a mapping,
    to say why tensor shapes differ."""
    kinds = [list(found) for found in _differences(plan, graph)]
    other_tree = graph.digest != plan.model.tree
    if not any(kinds) and other_tree:
        kinds = [_config_differences(plan, config or {})]
    if not any(kinds):
        kinds = [list(found) for found in _row_problems(plan, graph)]
    if not any(kinds) and other_tree:
        kinds = [["tensor shapes differ, or the plan's `tree` was changed"]]
    if not any(kinds) and digest_of(plan.model.config) != plan.model.config_digest:
        kinds = [["its config was changed after the plan was made (its config_digest is another's)"]]
    if not any(kinds):
        return
    listed = "\n".join(_listed(lines) for lines in kinds if lines)
    raise PlanFileError(
        f"{where}{': ' * bool(where)}this plan doesn't fit the model ({plan.model.source}):\n{listed}\nMake the plan again for it"
    )


def verify_config(plan: Plan, config: Mapping[str, Any], where: str) -> None:
    """KtoptError where a plan's model and another of the same tree compute differently, as their configs have it; `where` names the
    other."""
    found = config_contradictions(config, plan.model.config)
    if found:
        lines = [f"{each.key}: {yaml_text(each.model)} in the plan, {yaml_text(each.file)} in the model" for each in found]
        raise PlanFileError(
            f"this plan was made for {plan.model.source}, and doesn't fit {where}:\n{_listed(lines)}\nMake the plan again for it"
        )


def verify_model(plan: Plan, model: Any) -> None:
    """KtoptError unless a plan was made for what `model` names, as `ktopt.trees.load_tree` takes it."""
    from ktopt.trees import load_tree

    graph = model if isinstance(model, ModuleGraph) else load_tree(model)
    verify_config(plan, graph.config, graph.name)
    verify(plan, graph, config=graph.config)


def _differences(plan: Plan, graph: ModuleGraph) -> Iterator[Iterable[str]]:
    """How the plan's modules differ from the tree's: paths, classes and roles, order."""
    found, planned = graph.by_path, plan.by_path
    yield (f"{path}: in the plan, not in the model" for path in planned if path not in found)
    yield (f"{path or '(the model)'}: in the model, not in the plan" for path in found if path not in planned)
    seen: set[str] = set()
    yield [f"{s.path}: twice in the plan" for s in plan.steps if s.path in seen or seen.add(s.path)]  # type: ignore[func-returns-value]
    pairs = [(step, found[step.path]) for step in plan.steps if step.path in found]
    yield (f"{s.path}: the plan has {s.cls}, the model has {m.cls.name}" for s, m in pairs if s.cls != m.cls.name)
    yield (f"{s.path}: role {s.role} in the plan, {m.role} in the model" for s, m in pairs if s.role != m.role)
    if len(seen) == len(plan.steps) == len(pairs) == len(found):
        moved = [s.path for (s, _), m in zip(pairs, graph.modules, strict=True) if s.path != m.path]
        yield [f"{path}: out of the model's order" for path in moved]


def _row_problems(plan: Plan, graph: ModuleGraph) -> Iterator[Iterable[str]]:
    """What is wrong with rows of the right modules. Transfers last."""
    check = _StepCheck(plan, graph)
    for problems_of in (check.basics, check.operator, check.bytes):
        yield (
            f"{plan.blame(step)}: {step.path or '(the model)'}: {problem}"
            for step, module in zip(plan.steps, graph.modules, strict=True)
            for problem in problems_of(step, module)
        )
    if plan.dtype not in DTYPES:
        yield [f"dtype {plan.dtype!r} is not one of {', '.join(DTYPES)}"]
    known = plan.by_path
    yield (f"transfer at {t.path!r}: no such module" for t in plan.transfers if t.path not in known)
    yield (f"transfer at {t.path}: after {t.after!r}, which is no module" for t in plan.transfers if t.after not in ("", *known))


class _StepCheck:
    """Checks of one row; what is alike for many rows is worked out once."""

    def __init__(self, plan: Plan, graph: ModuleGraph) -> None:
        self.plan, self.graph = plan, graph
        self._configs: dict[str, tuple[OperatorSpec | None, OperatorConfig | None, str]] = {}
        self._bytes: dict[tuple[Any, ...], tuple[set[int], Mapping[str, int]]] = {}

    def config(self, step: Step) -> tuple[OperatorSpec | None, OperatorConfig | None, str]:
        """A row's operator and config, or what is wrong with them."""
        key = f"{step.operator}\0{step.kwargs!r}"
        if key not in self._configs:
            self._configs[key] = _config_of(step)
        return self._configs[key]

    def basics(self, step: Step, module: Module) -> Iterator[str]:
        if step.dtype not in DTYPES:
            yield f"dtype {step.dtype!r} is not one of {', '.join(DTYPES)}"
        if step.rule is None:
            if step.operator != "default":
                yield f"operator {step.operator} and no rule that gives it"
        elif self.plan.rules[step.rule].operator != step.operator:
            yield f"operator {step.operator}, and its rule gives {self.plan.rules[step.rule].operator}"
        if step.inside:
            owner = self.plan.by_path.get(step.inside)
            if owner is None or not step.path.startswith(f"{step.inside}."):
                yield f"inside {step.inside!r}, which is no module above it"
            elif owner.rule is None or step.rule is not None or step.operator != "default":
                yield f"inside {step.inside}, and so no rule's of its own: one of both is wrong"

    def operator(self, step: Step, module: Module) -> Iterator[str]:
        """Whether the operator is known, takes these kwargs and this module, and runs on these devices."""
        spec, config, problem = self.config(step)
        if problem or spec is None or config is None:
            yield problem
            return
        for name, device in (
            ("generate_device", step.generate_device), ("device", step.generate_device), ("prefill_device", step.prefill_device),
        ):  # fmt: skip
            given = getattr(config, name, None)
            if given is not None and given != device and not step.inside:
                yield f"kwargs say {name} {given}, and it is placed on {device}"
        if self.plan.errors or step.inside:
            return  # compiled with errors, which say this already
        if not spec.fits(module):
            roles = ", ".join(spec.roles)
            yield f"{spec.name} can't take it: it fits {roles}, and this is {module.role} ({module.cls.simple_name})"
        elif reason := spec.refuses(module, config) or self._refuses_below(spec, step, module):
            yield f"{spec.name} can't take it: {reason}"
        yield from _op_problems(spec, config, step)

    def _refuses_below(self, spec: OperatorSpec, step: Step, module: Module) -> str | None:
        below = self.plan.steps[module.index + 1 : module.end]
        return spec.refuses_below(module, step, below, self.plan.model.config) if spec.refuses_below else None

    def bytes(self, step: Step, module: Module) -> Iterator[str]:
        """Whether the bytes are the footprint. Tensors that keep their own dtype may have been counted in another model's: a model
        in hand and one built from its config need not agree in those."""
        owner = self.plan.by_path.get(step.inside, step) if step.inside else step
        spec, config, _ = self.config(owner)
        if spec is None or config is None or step.dtype not in DTYPES:
            return
        if step.stored:
            yield from self._stored_bytes(step, module, spec, config)
            return
        hot = getattr(config, "hot_experts", None)
        key = (
            id(module.tensors),
            module.cls.name,
            module.name,
            step.dtype,
            spec.name,
            repr(owner.kwargs),
            module.layer if hot else None,
        )
        if key not in self._bytes:
            found = list(_footprints(spec, config, module, step.dtype))
            self._bytes[key] = {each.weight_bytes for each in found}, found[0].elsewhere
        allowed, elsewhere = self._bytes[key]
        if step.weight_bytes not in allowed and step.weight_bytes + self._shared(step, module) not in allowed:
            yield f"weight_bytes {step.weight_bytes}, and its tensors take {min(allowed)}"
        if step.elsewhere != elsewhere:
            yield f"elsewhere {dict(step.elsewhere)}, and its tensors take {dict(elsewhere)} there"

    def _stored_bytes(self, step: Step, module: Module, spec: OperatorSpec, config: OperatorConfig) -> Iterator[str]:
        """Whether the op keeps the types that the row says its weights stay in, and the bytes can be theirs."""
        keeps = kept_types(spec, config, step.runs)
        unknown = sorted(set(step.stored) - set(keeps))
        if unknown or step.inside:
            yield f"stored as {', '.join(step.stored)}, and its op doesn't keep {', '.join(unknown) or 'weights so'}"
            return
        takes = spec.footprint(module, config, step.dtype)
        dense = sum(t.numel for t in module.tensors if is_matrix(t)) * ITEM_BYTES[step.dtype]
        rest = takes.weight_bytes - int(dense * takes.here)
        least, most = (int(count * takes.here) for count in possible_bytes(module, step.stored, step.dtype))
        if self._shared(step, module):
            least = 0
        if not rest + least <= step.weight_bytes <= rest + most:
            yield f"weight_bytes {step.weight_bytes}, and its tensors take {rest + least} to {rest + most} as stored"
        if step.elsewhere != takes.elsewhere:
            yield f"elsewhere {dict(step.elsewhere)}, and its tensors take {dict(takes.elsewhere)} there"

    def _shared(self, step: Step, module: Module) -> int:
        """Bytes of the tensors that a row says it shares with another's, where they could be one. Whether they are, a model on the
        meta device can't always tell: transformers ties weights once they are loaded."""
        shared = 0
        for leaf, owner in (found.groups() for note in step.notes if (found := _SHARES.fullmatch(note))):
            other = self.plan.by_path.get(owner)
            theirs = {t.name: t.shape for t in self.graph.by_path[owner].tensors} if other else {}
            tensor = next((t for t in module.tensors if t.name == leaf), None)
            if other and tensor and theirs.get(leaf) == tensor.shape and other.generate_device == step.generate_device:
                shared += tensor.numel * ITEM_BYTES[step.dtype if "float" in tensor.dtype else tensor.dtype]
        return shared


def _config_of(step: Step) -> tuple[OperatorSpec | None, OperatorConfig | None, str]:
    spec = registry.find(step.operator)
    if spec is None:
        return None, None, f"no operator is named {step.operator}"
    config, problems = build_config(spec, step.kwargs)
    said = "; ".join(p.message for p in problems if p.kind not in ("ignored", "idle"))
    return spec, config, "" if config is not None else said


def _op_problems(spec: OperatorSpec, config: OperatorConfig, step: Step) -> Iterator[str]:
    """Whether the row says of each op that the rule asks for what runs in its place on its device, and nothing else."""
    expected: dict[str, tuple[str, str]] = {}
    for f in fields(config):
        asked = spec.ops.get(str(getattr(config, f.name))) if f.metadata.get("op") or f.name == "hot_op" else None
        if asked is None or (f.name == "hot_op" and not getattr(config, "hot_experts", None)):
            continue
        device = step.prefill_device if f.name.startswith("prefill") else step.generate_device
        device = str(getattr(config, "hot_device", None) or device) if f.name == "hot_op" else device
        chosen, why = op_on(spec, asked, device)
        if chosen is not asked:
            expected[asked.name] = (chosen.name, why)
        elif device_kind(device) not in asked.devices:
            yield f"{asked.name} doesn't run on {device}"
    for op, (chosen_name, why) in expected.items():
        if step.runs.get(op, ("",))[0] != chosen_name:
            yield f"`runs` lacks {op} -> {chosen_name}: {why}"
    for op, (runs, _) in step.runs.items():
        if op not in expected:
            yield f"`runs` has {runs} for {op}, which nothing asks for or which runs itself"


def _footprints(spec: OperatorSpec, config: OperatorConfig, module: Module, dtype: str) -> Iterator[Footprint]:
    if not module.tensors:
        yield Footprint()
        return
    yield spec.footprint(module, config, dtype)
    for other in DTYPES:
        tensors = tuple(replace(t, dtype=other) if "float" in t.dtype else t for t in module.tensors)
        yield spec.footprint(replace(module, tensors=tensors), config, dtype)


def _config_differences(plan: Plan, mine: Any) -> list[str]:
    return [
        f"{key}: {yaml_text(value)} in the plan, {yaml_text(mine[key])} in the model"
        for key, value in plan.model.config.items()
        if key in mine and mine[key] != value and isinstance(value, (int, str, float))
    ]


def _listed(lines: list[str]) -> str:
    more = [f"  ... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join([f"  {line}" for line in lines[:SHOWN]] + more)
