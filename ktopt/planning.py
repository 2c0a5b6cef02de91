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
from ktopt.below import check_below, in_two_pieces, noted_below
from ktopt.config import merged
from ktopt.diagnostics import Report
from ktopt.graph import Module, ModuleGraph, main_dtype, model_dtype
from ktopt.kept import Kept, kept, kept_types, tied
from ktopt.match import Decision, Matches
from ktopt.operator import PREFILL, OperatorConfig, OperatorSpec, op_on, without_effect
from ktopt.placement import Footprint, canonical_device, device_kind
from ktopt.plan import ModelRef, Plan, RuleRef, Step
from ktopt.plan_options import PlanOptions
from ktopt.registry import find
from ktopt.ruleset import Rule, RuleSet, rule_devices
from ktopt.running_ops import Spot, check_op, hot_kwargs, young_enough
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
    steps = noted_below(ruleset, graph, planner.steps())
    check_below(ruleset, graph, matches, steps, report)
    if options.context is None and not any(found.code == "KT506" for found in report.errors):
        planner.check_memory(steps)  # else KT507 says it of more than weights, or KT506 of any map
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
        self.splitting = {r.index for r in ruleset.rules if getattr(r.replace.config, "hot_experts", None)}

    def steps(self) -> tuple[Step, ...]:
        """A row for each module. Modules that are alike share all of their row but the path, which makes 75,000 rows cheap."""
        made: list[Step] = []
        tails: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        new, stored = tuple.__new__, bool(self.stored)
        for module, decision in zip(self.graph.modules, self.matches.decisions, strict=True):
            key: tuple[Any, ...] = (id(module.cls), id(module.tensors), id(decision), module.path.endswith("experts"))
            spot = self._spot(module, decision, made) if decision.rule in self.splitting else None
            if spot is not None:
                key += (spot,)
            if stored and module.tensors:
                stays = self._kept(module, decision, spot)
                key += (stays.types, stays.less, stays.lacking)
            tail = tails.get(key)
            if tail is None:
                tail = tails[key] = self._tail(module, decision, made, spot)
            made.append(new(Step, (module.path, *tail)))
        return in_two_pieces(tied(tuple(made), self.graph, self.stored or {}), self.graph, self.stored or {})

    def _spot(self, module: Module, decision: Decision, made: Sequence[Step]) -> Spot | None:
        return Spot(module.layer, made[module.parent].generate_device) if decision.closed_by is None else None

    def _tail(self, module: Module, decision: Decision, made: Sequence[Step], spot: Spot | None) -> tuple[Any, ...]:
        """All of a row but its path, in the order of Step's fields."""
        if decision.closed_by is not None:
            return self._closed_tail(module, made[decision.closed_by], self._ruling(self.matches.decisions[decision.closed_by]))
        ruling = self._ruling(decision, spot)
        dtype = self._dtype(module, ruling)
        takes = self._footprint(module, ruling, dtype)
        stays = self._kept(module, decision, spot)
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
            takes.weight_bytes - int(stays.less * takes.here),
            decision.rule,
            decision.alias,
            ruling.replicas,
            "",
            ruling.runs,
            notes,
            stays.types,
            takes.elsewhere,
        )

    def _kept(self, module: Module, decision: Decision, spot: Spot | None = None) -> Kept:
        """What of a module's weights stays as it is stored."""
        if not self.stored or not module.tensors or decision.closed_by is not None:
            return NOTHING_KEPT
        ruling = self._ruling(decision, spot)
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
            self._footprint(module, ruling, self.dtype).weight_bytes,
            None,
            "",
            (),
            owner.path,
            _NO_KWARGS,
            (),
            (),
            _NO_KWARGS,
        )

    def _dtype(self, module: Module, ruling: _Ruling) -> str:
        """What a module's weights are held in: one in hand that no operator takes keeps its own, unless a dtype is asked for."""
        if not self.keeps_dtypes or ruling.spec is not self.default:
            return self.dtype
        return main_dtype(module.parameters) or self.dtype

    def _footprint(self, module: Module, ruling: _Ruling, dtype: str) -> Footprint:
        return ruling.spec.footprint(module, ruling.config, dtype) if module.tensors else NOTHING

    def _ruling(self, decision: Decision, spot: Spot | None = None) -> _Ruling:
        key = (decision.rule, decision.place, decision.alias_rules, decision.also, spot)
        ruling = self.rulings.get(key)
        if ruling is None:
            ruling = self.rulings[key] = self._rule(decision, spot)
        return ruling

    def _rule(self, decision: Decision, spot: Spot | None) -> _Ruling:
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
        config, runs = self._config(rule, generate, prefill, decision.place, spot)
        notes = without_effect(config)
        notes += [f"{asked} gives way to {op}: {why}" for asked, (op, why) in runs.items()]
        if getattr(config, "hot_experts", None) and getattr(config, "hot_device", None) == generate and not self.options.remap:
            notes.append(f"its hot experts are on {generate}, as the others are")
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
        self, rule: Rule, generate: str, prefill: str, place: str | None, spot: Spot | None
    ) -> tuple[OperatorConfig, dict[str, tuple[str, str]]]:
        """The rule's config with its devices settled, and the ops that give way to others there."""
        spec, config = rule.replace.operator, rule.replace.config
        changes = hot_kwargs(rule, spot, lambda asked: self._at(asked, self._asks(rule, ("hot_device",), place)))
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
            elif f.name in changes:
                continue
            elif f.metadata.get("device") and isinstance(value, str):
                changes[f.name] = self.options.place(value)
            elif f.metadata.get("device") and place and not f.metadata.get("ignored") and f.name not in rule.replace.given:
                changes[f.name] = self.options.place(place)
            elif f.name == "hot_op" and not changes["hot_experts"]:
                continue
            elif (f.metadata.get("op") or f.name == "hot_op") and value in spec.ops:
                device = {"prefill_op": prefill, "hot_op": changes.get("hot_device")}.get(f.name) or generate
                chosen, why = op_on(spec, spec.ops[value], device)
                chosen = young_enough(self.options.hardware, rule, spec, chosen, f.name, device, self.report)
                if f.name not in rule.replace.given:
                    changes[f.name] = chosen.name  # nobody asked for an op: the default is the best one that runs there
                elif chosen is not spec.ops[value]:
                    runs[value] = (chosen.name, why)
                    if not self.options.remap:
                        check_op(rule, f.name, spec.ops[value], chosen, device, self.report)
        return dataclasses.replace(config, **changes), runs

    def _chunk_size(self, value: Any, given: bool) -> Any:
        """Tokens of a prompt at a time: what was asked for beside the rules, else a rule's kwarg, else what `long_context` says,
        else the operator's own number."""
        config, asked = self.options.config, self.options.chunk_size
        if not asked and config is not None and not config.found:
            asked = config.given.get("long_context", {}).get("chunk_size")
        return asked or (value if given else self.settings["long_context"].get("chunk_size", value))

    def check_memory(self, steps: tuple[Step, ...]) -> None:
        """KT504: weights that don't fit a device of the machine planned for, with the five largest items."""
        hardware = self.options.hardware
        if hardware is None:
            return
        held: dict[str, list[tuple[int, Step, int]]] = {}
        for index, step in enumerate(steps):
            for device, count in step.held_bytes.items():
                held.setdefault(device, []).append((index, step, count))
        for device, rows in held.items():
            found = hardware.device(device)
            have = found.memory_bytes if found else hardware.ram_bytes if device == "cpu" else 0
            need = sum(count for _, _, count in rows)
            if have and need > have:
                from ktopt.working_memory.remedies import largest_groups, listed

                items = listed(largest_groups((step.path, count) for _, step, count in rows))
                self.report.error(
                    "KT504",
                    f"{device} would hold {need / 1e9:.1f} GB of weights and {hardware.name} has {have / 1e9:.1f} GB there",
                    self._who_fills(rows),
                    help=f"move modules elsewhere; the largest are {items}" + self._as_stored(),
                )

    def _as_stored(self) -> str:
        """What would count less, where ops keep weights as they are stored and nobody said how that is."""
        if self.stored is not None or not any(ruling.keeps for ruling in self.rulings.values()):
            return ""
        return "; --weights, or --storage Q4_K_M as long as there are none, counts weights as they are stored"

    def _who_fills(self, rows: Sequence[tuple[int, Step, int]]) -> Origin:
        """Where the file puts most of what these rows hold: a rule's device, a line of `place:`, or the default."""
        filled: dict[Origin, int] = {}
        for index, _, count in rows:
            if count:
                origin = self._says_where(index)
                filled[origin] = filled.get(origin, 0) + count
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
NOTHING = Footprint()
UNTOLD = (
    "bytes are those of the plan's dtype, though some ops keep weights as their file stores them: --weights, or --storage KIND as "
    "long as there are none, counts them so"
)
