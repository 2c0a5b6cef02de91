"""The plan stage: what each module becomes, where it lives, how many bytes it takes, and which rule decided.

It reads a rule set's matches and a tree, and touches no model. What it can't settle (an op that no device here runs, a machine that
is too small) is a diagnostic at the rule that asked for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktopt import __version__
from ktopt.below import check_below
from ktopt.config import merged
from ktopt.diagnostics import Report
from ktopt.graph import Module, ModuleGraph, main_dtype, model_dtype
from ktopt.kept import Kept, kept, kept_types, tied
from ktopt.match import Decision, Matches
from ktopt.operator import PREFILL, Op, OperatorConfig, OperatorSpec, op_on, without_effect
from ktopt.placement import canonical_device, device_kind
from ktopt.plan import ModelRef, Plan, RuleRef, Step
from ktopt.plan_options import PlanOptions
from ktopt.registry import find
from ktopt.ruleset import Rule, RuleSet, rule_devices
from ktopt.selector.fields import about_machine, about_storage
from ktopt.source import FILE_START, Origin
from ktopt.transfers import derive_transfers
from ktopt.versions import installed
from ktopt.weights.source import StoredTensor


@dataclass(frozen=True)
class _Ruling:
    """What one rule (or none) makes of the modules that it wins on one place: shared by all of them."""

    spec: OperatorSpec
    config: OperatorConfig
    kwargs: Mapping[str, Any]
    prefill_device: str
    generate_device: str
    replicas: tuple[str, ...]
    runs: Mapping[str, tuple[str, str]]
    notes: tuple[str, ...]
    keeps: tuple[str, ...] = ()


def make_plan(
    ruleset: RuleSet,
    graph: ModuleGraph,
    matches: Matches,
    options: PlanOptions,
    report: Report,
    stored: Mapping[str, StoredTensor] | None = None,
) -> Plan:
    """Compile matches to a plan. Findings go to `report`; errors found so far are kept in Plan.errors.

    stored   how the model's parameters are stored, where that is known: what operators keep so counts with its bytes in the file
    """
    planner = _Planner(ruleset, graph, matches, options, report, stored)
    steps = planner.steps()
    check_below(ruleset, graph, matches, steps, report)
    planner.check_memory(steps)
    return Plan(
        model=ModelRef(graph.name, graph.model_type, graph.architectures, graph.digest, graph.config),
        rule_file=ruleset.path,
        rule_digest=ruleset.digest,
        rules=tuple(_rule_ref(rule, active is not False) for rule, active in zip(ruleset.rules, matches.active, strict=True)),
        steps=steps,
        transfers=derive_transfers(graph, steps),
        default_device=planner.default_device,
        dtype=planner.dtype,
        hardware=options.hardware.name if options.hardware else "",
        remap=dict(options.remap),
        errors=tuple(str(d) for d in report.errors),
        notes=planner.notes(),
        ktopt_version=__version__,
        transformers_version=installed("transformers"),
        long_context=planner.settings["long_context"],
        kvc2=planner.settings["kvc2"],
    )


def _rule_ref(rule: Rule, active: bool) -> RuleRef:
    start = rule.origin.span.start
    return RuleRef(rule.id, rule.origin.file, start.line, start.column, rule.replace.operator.name, active)


class _Planner:
    """Makes the steps, and remembers what it has already worked out for a rule on a place."""

    def __init__(
        self,
        ruleset: RuleSet,
        graph: ModuleGraph,
        matches: Matches,
        options: PlanOptions,
        report: Report,
        stored: Mapping[str, StoredTensor] | None,
    ) -> None:
        self.ruleset, self.graph, self.matches, self.options, self.report = ruleset, graph, matches, options, report
        self.stored = stored
        self.default_device = options.default_device(ruleset)
        asked = options.dtype or ruleset.dtype
        self.dtype = asked or model_dtype(graph)
        self.keeps_dtypes = graph.in_hand and not asked
        default = find("default")
        assert default is not None
        self.default = default
        self.settings = merged(options.config, {"long_context": ruleset.long_context, "kvc2": ruleset.kvc2})
        self.splits_prefill = False
        self.rulings: dict[tuple[Any, ...], _Ruling] = {}

    def steps(self) -> tuple[Step, ...]:
        """A row for each module. Modules that are alike share all of their row but the path, which makes 75,000 rows cheap."""
        made: list[Step] = []
        tails: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        new, stored = tuple.__new__, bool(self.stored)
        for module, decision in zip(self.graph.modules, self.matches.decisions, strict=True):
            key: tuple[Any, ...] = (id(module.cls), id(module.tensors), id(decision), module.path.endswith("experts"))
            if stored and module.tensors:
                stays = self._kept(module, decision)
                key += (stays.types, stays.less, stays.lacking)
            tail = tails.get(key)
            if tail is None:
                tail = tails[key] = self._tail(module, decision, made)
            made.append(new(Step, (module.path, *tail)))
        return tied(tuple(made), self.graph, self.stored or {})

    def _tail(self, module: Module, decision: Decision, made: Sequence[Step]) -> tuple[Any, ...]:
        """All of a row but its path, in the order of Step's fields."""
        if decision.closed_by is not None:
            return self._closed_tail(module, made[decision.closed_by], self._ruling(self.matches.decisions[decision.closed_by]))
        ruling = self._ruling(decision)
        dtype = self._dtype(module, ruling)
        stays = self._kept(module, decision)
        notes = ruling.notes
        if stays.lacking:
            notes += (f"stored as {', '.join(stays.lacking)}, for which there is no kernel: held in {dtype}",)
        return (
            module.cls.name,
            module.role,
            ruling.spec.name,
            ruling.kwargs,
            ruling.prefill_device,
            ruling.generate_device,
            dtype,
            self._bytes(module, ruling, dtype) - stays.less,
            decision.rule,
            decision.alias,
            ruling.replicas,
            "",
            ruling.runs,
            notes,
            stays.types,
        )

    def _kept(self, module: Module, decision: Decision) -> Kept:
        """What of a module's weights stays as it is stored."""
        if not self.stored or not module.tensors or decision.closed_by is not None:
            return NOTHING_KEPT
        ruling = self._ruling(decision)
        return kept(module, ruling.keeps, self.stored, self._dtype(module, ruling)) if ruling.keeps else NOTHING_KEPT

    def _closed_tail(self, module: Module, owner: Step, ruling: _Ruling) -> tuple[Any, ...]:
        """A module below one whose rule has `recursive: false`: it is that operator's, and no rule's of its own."""
        return (
            module.cls.name,
            module.role,
            "default",
            _NO_KWARGS,
            owner.prefill_device,
            owner.generate_device,
            self.dtype,
            self._bytes(module, ruling, self.dtype),
            None,
            "",
            (),
            owner.path,
            _NO_KWARGS,
            (),
            (),
        )

    def _dtype(self, module: Module, ruling: _Ruling) -> str:
        """What a module's weights are held in: one in hand that no operator takes keeps its own, unless a dtype is asked for."""
        if not self.keeps_dtypes or ruling.spec is not self.default:
            return self.dtype
        return main_dtype(module.parameters) or self.dtype

    def _bytes(self, module: Module, ruling: _Ruling, dtype: str) -> int:
        return ruling.spec.footprint(module, ruling.config, dtype).weight_bytes if module.tensors else 0

    def _ruling(self, decision: Decision) -> _Ruling:
        key = (decision.rule, decision.place, decision.alias_rules, decision.also)
        ruling = self.rulings.get(key)
        if ruling is None:
            ruling = self.rulings[key] = self._rule(decision)
        return ruling

    def _rule(self, decision: Decision) -> _Ruling:
        place = decision.place or self.default_device
        if decision.rule is None:
            device = self._at(place, self._asks(None, (), decision.place))
            config = self.default.config(generate_device=device, prefill_device=device)  # type: ignore[call-arg]
            return _Ruling(self.default, config, config.to_kwargs(), device, device, (), {}, ())
        rule = self.ruleset.rules[decision.rule]
        generate, prefill = self._devices(rule, place, bool(decision.place))
        places = (place, *decision.also)
        homes = [self._devices(self.ruleset.rules[i], p, bool(decision.place))[0] for i in decision.alias_rules for p in places]
        replicas = tuple(dict.fromkeys(d for d in homes if d != generate))
        config, runs = self._config(rule, generate, prefill, decision.place)
        notes = without_effect(config)
        notes += [f"{asked} gives way to {op}: {why}" for asked, (op, why) in runs.items()]
        if replicas:
            notes.append(f"one copy each on {', '.join((generate, *replicas))}: upstream had one per layer")
        self._check_prefill(rule, config, generate, prefill)
        keeps = kept_types(rule.replace.operator, config, runs)
        return _Ruling(rule.replace.operator, config, config.to_kwargs(), prefill, generate, replicas, runs, tuple(notes), keeps)

    def _check_prefill(self, rule: Rule, config: OperatorConfig, generate: str, prefill: str) -> None:
        """KT408 where a prefill device is given and the generate device comes from elsewhere, so that only a plan can compare them;
        and a note of the plan wherever prefill was to run elsewhere than decoding, or by another op."""
        given = rule.replace.given
        if prefill != generate and "prefill_device" in given and "generate_device" not in given:
            message = f"rule {rule.number}: `prefill_device: {given['prefill_device']}` has no effect: {PREFILL}, {generate}"
            self.report.info("KT408", message, rule.replace.kwarg_origins.get("prefill_device", rule.replace.origin))
        ops = [getattr(config, name, None) for name in ("generate_op", "prefill_op")]
        if prefill != generate or ("prefill_op" in given and ops[1] not in (ops[0], "None")):
            self.splits_prefill = True

    def _devices(self, rule: Rule, place: str, placed: bool) -> tuple[str, str]:
        """(generate, prefill) of a rule's modules, remapped."""
        generate, prefill = rule_devices(self.ruleset, rule, place, placed)
        asks = self._asks(rule, ("generate_device", "device"), place if placed and generate == place else None)
        if prefill == generate and "prefill_device" not in rule.replace.given:
            return (self._at(generate, asks),) * 2
        prefill_asks = self._asks(rule, ("prefill_device",), place if placed and prefill == place else None)
        return self._at(generate, asks), self._at(prefill, prefill_asks)

    def _asks(self, rule: Rule | None, kwargs: Sequence[str], place: str | None) -> tuple[str, Origin]:
        """Who asks for a device, and where: a rule's kwarg, a line of `place:`, else the rule, or the default."""
        given = next((name for name in kwargs if rule and name in rule.replace.given), None)
        line = next((p for p in self.ruleset.places if p.device == place), None)
        if rule and given:
            return f"rule {rule.number} places modules", rule.replace.kwarg_origins.get(given, rule.replace.origin)
        if line:
            return "`place:` puts modules", line.origin
        if rule:
            return f"rule {rule.number} places modules", rule.replace.origin
        written = self.ruleset.default_device_origin if self.options.device is None else None
        return "unplaced modules go", written or self._file_origin()

    def _at(self, device: str, asks: tuple[str, Origin]) -> str:
        device = self.options.place(device)
        hardware = self.options.hardware
        if hardware is not None and not hardware.has(device):
            have = ", ".join(d.name for d in hardware.devices) or "no accelerator"
            who, origin = asks
            self.report.error(
                "KT501",
                f"{who} on {device}, which {hardware.name} does not have (it has {have})",
                origin,
                help="place them on a device of this machine, or remap: --remap " + f"{device_kind(device)}=cpu",
            )
        return device

    def _config(
        self, rule: Rule, generate: str, prefill: str, place: str | None
    ) -> tuple[OperatorConfig, dict[str, tuple[str, str]]]:
        """The rule's config with its devices settled, and the ops that give way to others there."""
        spec, config = rule.replace.operator, rule.replace.config
        changes: dict[str, Any] = {}
        runs: dict[str, tuple[str, str]] = {}
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            if f.name in ("generate_device", "device"):
                changes[f.name] = generate
            elif f.name == "prefill_device":
                changes[f.name] = prefill
            elif f.name == "chunk_size" and not f.metadata.get("ignored"):
                changes[f.name] = self._chunk_size(value, f.name in rule.replace.given)
            elif f.name == "transfer_map" and value:
                changes[f.name] = {layer: self.options.place(canonical_device(d)) for layer, d in value.items()}
            elif f.metadata.get("device") and isinstance(value, str):
                changes[f.name] = self.options.place(value)
            elif f.metadata.get("device") and place and not f.metadata.get("ignored") and f.name not in rule.replace.given:
                changes[f.name] = self.options.place(place)
            elif f.metadata.get("op") and value in spec.ops:
                device = prefill if f.name.startswith("prefill") else generate
                chosen, why = op_on(spec, spec.ops[value], device)
                chosen = self._young_enough(rule, spec, chosen, f.name, device)
                if f.name not in rule.replace.given:
                    changes[f.name] = chosen.name  # nobody asked for an op: the default is the best one that runs there
                elif chosen is not spec.ops[value]:
                    runs[value] = (chosen.name, why)
                    if f.name == "generate_op" and not self.options.remap:
                        self._check_op(rule, spec.ops[value], chosen, generate)
        return dataclasses.replace(config, **changes), runs

    def _chunk_size(self, value: Any, given: bool) -> Any:
        """Tokens of a prompt at a time: what was asked for beside the rules, else a rule's kwarg, else what `long_context` says,
        else the operator's own number."""
        config, asked = self.options.config, self.options.chunk_size
        if not asked and config is not None and not config.found:
            asked = config.given.get("long_context", {}).get("chunk_size")
        return asked or (value if given else self.settings["long_context"].get("chunk_size", value))

    def _young_enough(self, rule: Rule, spec: OperatorSpec, op: Op, kwarg: str, device: str) -> Op:
        """The op, or a counterpart where nobody asked for it and the machine's device is too old for it; KT406 where a rule did."""
        found = self.options.hardware.device(device) if self.options.hardware else None
        if found is None or found.sm is None or found.sm >= op.least_sm:
            return op
        other, _ = op_on(spec, spec.ops[op.counterpart], device)
        if kwarg not in rule.replace.given:
            return other
        if kwarg == "generate_op":
            needs = f"{op.name} needs compute capability {op.least_sm / 10:.1f}, and {device} has {found.sm / 10:.1f}"
            origin = rule.replace.kwarg_origins.get(kwarg, rule.replace.origin)
            help = f"name {other.name}, or place the modules on a newer device"
            self.report.error("KT406", f"rule {rule.number} kwargs.{kwarg}: {needs}", origin, help=help)
        return op

    def _check_op(self, rule: Rule, asked: Op, chosen: Op, device: str) -> None:
        """KT406: the op that a rule names doesn't run where its modules are; without a remapping that is a mistake."""
        kind, kinds = device_kind(device), " or ".join(asked.devices)
        if kind in asked.devices:
            return
        self.report.error(
            "KT406",
            f"rule {rule.number} kwargs.generate_op: {asked.name} runs on {kinds} only, and its modules are on {device}",
            rule.replace.kwarg_origins.get("generate_op", rule.replace.origin),
            help=f"name {chosen.name} for {kind}, or place the modules on {kinds}",
        )

    def check_memory(self, steps: tuple[Step, ...]) -> None:
        """KT504: weights that don't fit a device of the machine planned for, with the five largest items."""
        hardware = self.options.hardware
        if hardware is None:
            return
        held: dict[str, list[tuple[int, Step]]] = {}
        for index, step in enumerate(steps):
            for device in (step.generate_device, *step.replicas):
                held.setdefault(device, []).append((index, step))
        for device, rows in held.items():
            found = hardware.device(device)
            have = found.memory_bytes if found else hardware.ram_bytes if device == "cpu" else 0
            need = sum(step.weight_bytes for _, step in rows)
            if have and need > have:
                largest = sorted((step for _, step in rows), key=lambda s: -s.weight_bytes)[:5]
                items = ", ".join(f"{s.path} {s.weight_bytes / 1e9:.2f} GB" for s in largest)
                self.report.error(
                    "KT504",
                    f"{device} would hold {need / 1e9:.1f} GB of weights and {hardware.name} has {have / 1e9:.1f} GB there",
                    self._who_fills(rows),
                    help=f"move modules elsewhere; the largest are {items}",
                )

    def _who_fills(self, rows: Sequence[tuple[int, Step]]) -> Origin:
        """Where the file puts most of what these rows hold: a rule's device, a line of `place:`, or the default."""
        filled: dict[Origin, int] = {}
        for index, step in rows:
            if step.weight_bytes:
                origin = self._says_where(index)
                filled[origin] = filled.get(origin, 0) + step.weight_bytes
        return max(filled, key=filled.__getitem__)

    def _says_where(self, index: int) -> Origin:
        decision = self.matches.decisions[index]
        if decision.closed_by is not None:
            return self._says_where(decision.closed_by)
        rule = None if decision.rule is None else self.ruleset.rules[decision.rule]
        return self._asks(rule, ("generate_device", "device"), decision.place)[1]

    def notes(self) -> tuple[str, ...]:
        made = []
        if self.options.remap:
            made.append("remapped " + ", ".join(f"{a} to {b}" for a, b in self.options.remap.items()))
        for kind, ask in (
            (about_machine, "ask about the machine: plan with --hardware"),
            (about_storage, "ask how weights are stored: plan with --weights"),
        ):
            if unsettled := self.matches.unsettled(kind):
                made.append(f"{', '.join(name for name, _ in unsettled)} {ask} to settle them")
        if self.splits_prefill:
            made.append(PREFILL)
        keeps = any(ruling.keeps for ruling in self.rulings.values())
        if self.options.storage is not None and keeps:
            made.append(f"bytes of what ops keep as it is stored are those of a usual {self.options.storage} file (--storage)")
        elif self.stored is None and not self.graph.in_hand and keeps:
            made.append(UNTOLD)
        return tuple(made)

    def _file_origin(self) -> Origin:
        return self.ruleset.origin or Origin(self.ruleset.path, FILE_START)


_NO_KWARGS: Mapping[str, Any] = {}
NOTHING_KEPT = Kept()
UNTOLD = "bytes are those of the plan's dtype, though some ops keep weights as their file stores them: --weights counts them so"
