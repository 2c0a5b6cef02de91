"""A model on a machine as a Problem: what each part holds and takes on each device, and what the file has pinned.

What modules become may depend on where they are, so a plan is made for each kind of device, with all on it that nothing pins, and
bytes are read off these plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ktopt.diagnostics import KtoptError, Report
from ktopt.graph import ITEM_BYTES, Module, ModuleGraph
from ktopt.match import Matches, match
from ktopt.placement import Device, Hardware
from ktopt.placing.caches import CacheCost, Caches, caches_of
from ktopt.placing.problem import CPU, INFINITE, Item, Part, Problem, Split
from ktopt.placing.speeds import hop_us, read_us, settled_speeds
from ktopt.placing.splits import Chosen, Sides, splitting_rule, without_hot
from ktopt.plan import Plan, Step
from ktopt.plan_options import PlanOptions
from ktopt.planning import make_plan
from ktopt.popularity import Popularity, check_popularity, experts_in, hot_ids
from ktopt.registry import find
from ktopt.ruleset import RuleSet
from ktopt.weights.source import StoredTensor
from ktopt.working_memory import prompt_piece
from ktopt.working_memory.parts import RunningModule, parts_of
from ktopt.working_memory.passing import Pass, most_held, peaks

RESERVED_BYTES = 768 << 20
"""Of an accelerator, for the driver, libraries and what an allocator can't use."""
RESERVED_SHARE = 0.05
"""Of main memory, for everything else that runs."""
ROUTED_KEYS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token")
NO_CACHE = CacheCost()
LEAST_GUEST = 2
"""Pinned parts of less than one in so many of an item's bytes don't draw it to their device."""


@dataclass
class _Pile:
    """Bytes and time that add up, by device; what is in it by pin."""

    held: list[int]
    time: list[float]
    host: list[int]
    drawn: int | None = None

    def part(self, only: int | None) -> Part:
        times = tuple(t if only is None or d == only else INFINITE for d, t in enumerate(self.time))
        return Part(tuple(self.held), times, tuple(self.host) if any(self.host) else ())


@dataclass(frozen=True)
class Case:
    """A problem, and which modules each item's parts are.

    homes, experts   module indices of what is free of each item
    pins             device of each pinned module, by index
    assumed          in words, speeds that nobody gave
    plans            the plan on each device
    """

    problem: Problem
    homes: tuple[tuple[int, ...], ...]
    experts: tuple[tuple[int, ...], ...]
    pins: Mapping[int, str]
    assumed: tuple[str, ...]
    plans: tuple[Plan, ...]
    context: int
    chosen: tuple[Chosen | None, ...] = ()

    @property
    def leaves_any(self) -> bool:
        """Whether the file leaves any module with weights to be placed."""
        return any(step.weight_bytes and index not in self.pins for index, step in enumerate(self.plans[0].steps))


def make_case(
    ruleset: RuleSet,
    graph: ModuleGraph,
    hardware: Hardware,
    options: PlanOptions,
    stored: Mapping[str, StoredTensor] | None,
    context: int,
    popularity: Popularity | None = None,
    after: Callable[[Plan], Plan] = lambda plan: plan,
) -> Case:
    """The case of a rule set without what its `place:` leaves to ktopt; with `popularity`, hot experts are left to it too. `after`
    is what is made of a plan before it runs. KtoptError for models, pins and profiles that can't be placed."""
    layers = {m.parent for m in graph.modules if m.layer is not None and graph.modules[m.parent].layer is None}
    if len(layers) != 1:
        raise KtoptError(f"{graph.name or 'this model'} has no single list of decoder layers, so there is no order to place it in")
    if popularity is not None:
        check_popularity(popularity, graph)
    return _Builder(ruleset, graph, hardware, options, stored, context, popularity, after).case()


class _Builder:
    def __init__(
        self,
        ruleset: RuleSet,
        graph: ModuleGraph,
        hardware: Hardware,
        options: PlanOptions,
        stored: Mapping[str, StoredTensor] | None,
        context: int,
        popularity: Popularity | None,
        after: Callable[[Plan], Plan],
    ) -> None:
        self.graph, self.context, self.ruleset, self.options = graph, context, ruleset, options
        self.popularity, self.whole = popularity, without_hot(ruleset)
        self.devices = [Device("cpu", hardware.ram_bytes), *hardware.devices]
        self.names = [d.name for d in self.devices]
        self.hardware = hardware
        speeds, self.assumed = settled_speeds(hardware)
        self.speeds = [speeds[name] for name in self.names]
        storage = {name: tensor.types for name, tensor in stored.items()} if stored is not None and ruleset.asks_storage else None
        self.matches = match(self.whole, graph, hardware, Report(), storage=storage)
        self.plans = self._plans(stored, after)
        self.pins = self._pins()
        self.piece = min(context, prompt_piece(self.plans[0]) or context)
        self.fixed_bytes, self.fixed_us = [0] * len(self.devices), 0.0
        self.tied: dict[int, list[int]] = {}
        hidden = int(graph.config.get("hidden_size") or 0)
        self.known: dict[tuple[object, ...], tuple[int, float, int]] = {}
        self.known_caches: dict[tuple[int, str], Caches] = {}
        self.sides: dict[float, Sides] = {}
        self.hops = [hop_us(speed, hidden * ITEM_BYTES[self.plans[0].dtype]) for speed in self.speeds]

    def _plans(self, stored: Mapping[str, StoredTensor] | None, after: Callable[[Plan], Plan]) -> list[Plan]:
        """For each device a plan with all on it that nothing pins; one for devices of a kind and compute capability."""
        made: dict[tuple[str, int | None], Plan] = {}
        plans = []
        for device in self.devices:
            key = (device.kind, device.sm)
            if key not in made:
                options = replace(self.options, device=device.name)
                made[key] = after(make_plan(self.whole, self.graph, self.matches, options, Report(), stored))
            plans.append(made[key])
        return plans

    def _pins(self) -> dict[int, str]:
        pins = {}
        for module in self.graph.modules:
            device = self._pin(self.matches, module.index)
            if device is not None:
                device = self.options.place(device)
                if device not in self.names:
                    have = ", ".join(self.names)
                    raise KtoptError(
                        f"{module.path} is put on {device} by the file, and {self.hardware.name} has {have}: change that"
                    )
                pins[module.index] = device
        return pins

    def _pin(self, matches: Matches, index: int) -> str | None:
        decision = matches.decisions[index]
        if decision.closed_by is not None:
            return self._pin(matches, decision.closed_by)
        rule = None if decision.rule is None else matches.ruleset.rules[decision.rule]
        given = rule is not None and {"generate_device", "device"} & set(rule.replace.given)
        return matches.device(index) if given or decision.place else None

    def case(self) -> Case:
        groups = self._groups()
        items, homes, experts, chosen = [], [], [], list[Chosen | None]()
        for label, number, own, routed in groups:
            pile, guests = self._pile(own)
            picked, split = self._split(routed) if self.popularity is not None else (None, None)
            routed_pile, routed_guests = self._pile(routed)
            if self.popularity is None:
                self._move_hot(routed, routed_pile, pile)
            home = pile.part(pile.drawn)
            if number is None and label == "head":
                home = self._tied_head(own, home)
            routed_part = None
            if routed:
                routed_part = routed_pile.part(routed_pile.drawn)
                guests |= routed_guests
            items.append(Item(home, routed_part, tuple(sorted(guests)), label, number, split))
            chosen.append(picked)
            homes.append(tuple(m.index for m in own if m.index not in self.pins))
            experts.append(tuple(m.index for m in routed if m.index not in self.pins))
        problem = Problem(
            tuple(self.names),
            tuple(self._room(d) for d in self.devices),
            tuple(self.hops),
            tuple(self._transient(d) for d in range(len(self.devices))),
            tuple(items),
            tuple(self.fixed_bytes),
            self.fixed_us,
            self._tied_bytes(),
            tuple(sorted({self.names.index(pin) for pin in self.pins.values()} - {0})),
        )
        plans, assumed = tuple(self.plans), tuple(self.assumed)
        return Case(problem, tuple(homes), tuple(experts), self.pins, assumed, plans, self.context, tuple(chosen))

    def _sides(self, module: Module) -> Sides:
        chosen = self._share_read(module) * experts_in(module)
        return self.sides.setdefault(chosen, Sides(self.plans, self.devices, self.speeds, chosen))

    def _split(self, routed: Sequence[Module]) -> tuple[Chosen, Split] | tuple[None, None]:
        """Of a layer's experts that are not pinned to an accelerator, which is chosen how often."""
        module = next((m for m in routed if experts_in(m)), None)
        if module is None or self.popularity is None or self.pins.get(module.index, "cpu") != "cpu":
            return None, None
        rule, shares = splitting_rule(self.matches, module), self.popularity.shares(module.path)
        order = tuple(sorted(range(len(shares)), key=lambda number: (-shares[number], number)))
        config = self.ruleset.rules[rule].replace.config
        split = self._sides(module).split(module, config, [shares[number] for number in order])
        return Chosen(module, rule, order), split

    def _move_hot(self, routed: Sequence[Module], pile: _Pile, home: _Pile) -> None:
        """Hot experts that the file names are where their block is, or on the device that it says. Each is taken to be chosen as
        often as any other."""
        module = next((m for m in routed if experts_in(m)), None)
        rule = None if module is None else self.matches.decisions[module.index].rule
        if module is None or rule is None:
            return
        config: Any = self.ruleset.rules[rule].replace.config
        hot, count = len(hot_ids(config, module.layer)), experts_in(module)
        if not hot:
            return
        split = self._sides(module).split(module, config, [1 / count] * count)
        asked = None if config.hot_device is None else self.names.index(self.options.place(config.hot_device))
        for d, speed in enumerate(self.speeds):
            pile.held[d] -= pile.held[d] * hot // count
            pile.time[d] -= (pile.time[d] - speed.op_us) * hot / count if pile.time[d] != INFINITE else 0.0
            if asked in (None, d):
                held, time = hot * split.held_bytes[d], speed.op_us + split.time_us[d] * hot / count
                if asked is None:
                    home.held[d] += held
                    home.time[d] += time
                else:
                    self.fixed_bytes[d] += held
                    self.fixed_us += time

    def _groups(self) -> list[tuple[str, int | None, list[Module], list[Module]]]:
        """Each item's label, layer, modules of its home, and of its experts."""
        first = min(m.index for m in self.graph.modules if m.layer is not None)
        start: list[Module] = []
        end: list[Module] = []
        layers: dict[int, tuple[list[Module], list[Module]]] = {}
        experts_end = 0
        for module in self.graph.modules:
            if module.role == "experts":
                experts_end = max(experts_end, module.end)
            if module.layer is not None:
                layers.setdefault(module.layer, ([], []))[module.index < experts_end].append(module)
            elif module.tensors and module.role != "rotary":
                (start if module.index < first else end).append(module)
        made: list[tuple[str, int | None, list[Module], list[Module]]] = [("embedding", None, start, [])]
        for number, (own, routed) in sorted(layers.items()):
            together = any(self._runs_below(module) for module in own)
            made.append((f"layer {number}", number, [*own, *routed] if together else own, [] if together else routed))
        return [*made, ("head", None, end, [])]

    def _runs_below(self, module: Module) -> bool:
        """Whether the operator of a layer runs what is below it, which must then be where the layer is."""
        spec = find(self.plans[0].steps[module.index].operator)
        return module.role == "layer" and spec is not None and spec.refuses_below is not None

    def _pile(self, modules: Sequence[Module]) -> tuple[_Pile, set[int]]:
        """What modules hold and take on each device. Pinned ones count where they are: where that is most of them, or their
        attention, the rest goes there too (`drawn`); else they are guests, whose devices are returned."""
        drawn = self._draws(modules)
        none = [0] * len(self.devices)
        pile, guests = _Pile(list(none), [0.0] * len(none), list(none), drawn), set[int]()
        for module in modules:
            pin = self.pins.get(module.index)
            at = None if pin is None else self.names.index(pin)
            for d in range(len(self.devices)) if at in (None, drawn) else (at,):
                held, time, host = self._known_costs(module, d)
                if at in (None, drawn):
                    pile.held[d] += held
                    pile.time[d] += time
                    pile.host[d] += host
                elif held or time:
                    self.fixed_bytes[d] += held
                    self.fixed_bytes[CPU] += host
                    self.fixed_us += time
                    guests.add(d)
        return pile, guests

    def _draws(self, modules: Sequence[Module]) -> int | None:
        """The device that pins of a part draw all of it to."""
        pinned: dict[str, int] = {}
        total = 0
        for module in modules:
            weight = self.plans[0].steps[module.index].weight_bytes
            total += weight
            pin = self.pins.get(module.index)
            if pin is None:
                continue
            if module.role in ("attention", "layer", "experts"):
                return self.names.index(pin)
            pinned[pin] = pinned.get(pin, 0) + weight
        most = max(pinned, key=pinned.__getitem__, default=None)
        return self.names.index(most) if most is not None and LEAST_GUEST * pinned[most] > total else None

    def _known_costs(self, module: Module, d: int) -> tuple[int, float, int]:
        """_costs, kept for modules that are alike."""
        step = self.plans[d].steps[module.index]
        if not (step.weight_bytes or step.role == "attention" or step.rule is not None):
            return 0, 0.0, 0
        if step.role in ("attention", "layer"):
            return self._costs(module, d)
        key = (d, id(module.tensors), id(self.matches.decisions[module.index]), step.weight_bytes, step.stored)
        if key not in self.known:
            self.known[key] = self._costs(module, d)
        return self.known[key]

    def _costs(self, module: Module, d: int) -> tuple[int, float, int]:
        """Bytes that a module holds on a device, its cache included, the time that a decoded token takes it, and what main memory
        holds of its cache."""
        plan, speed = self.plans[d], self.speeds[d]
        step = plan.steps[module.index]
        cache = self._caches(d).costs.get(step.path, NO_CACHE)
        if self._refused(module, step, d):
            return step.weight_bytes, INFINITE, 0
        if not step.weight_bytes and not cache.held:
            return 0, 0.0, 0
        time = read_us(speed, step.weight_bytes * self._share_read(module), step) + speed.op_us
        return step.weight_bytes + cache.held, time + read_us(speed, cache.read), cache.host

    def _caches(self, d: int) -> Caches:
        key = (id(self.plans[d]), self.devices[d].kind)
        if key not in self.known_caches:
            self.known_caches[key] = caches_of(self.plans[d], self.names[d], self.context, self.piece)
        return self.known_caches[key]

    def _share_read(self, module: Module) -> float:
        """The part of a module's weights that a token reads: a row of an embedding, the chosen ones of experts."""
        shape = next((t.shape for t in module.parameters), (1,))
        if module.role == "embedding":
            return 1 / shape[0]
        if module.role != "experts" and module.expert is None:
            return 1.0
        config = self.graph.config.get("text_config") or self.graph.config
        chosen = next((config[key] for key in ROUTED_KEYS if isinstance(config.get(key), int)), 1)
        return min(1.0, chosen / (shape[0] if module.expert is None else self.experts_a_layer))

    @cached_property
    def experts_a_layer(self) -> int:
        """Of a model that has a module for each."""
        return max(module.expert or 0 for module in self.graph.modules) + 1

    def _refused(self, module: Module, step: Step, d: int) -> bool:
        """Whether what the file says of a module can't be on a device: an op that it names, or an operator over what is below."""
        spec, decision = find(step.operator), self.matches.decisions[module.index]
        if spec is None or decision.rule is None or decision.closed_by is not None:
            return False
        given = self.ruleset.rules[decision.rule].replace.given
        op = spec.ops.get(str(given.get("generate_op", "")))
        if op is not None and not self.options.remap:
            sm = self.devices[d].sm
            if self.devices[d].kind not in op.devices or (sm is not None and sm < op.least_sm):
                return True
        below = self.plans[d].steps[module.index + 1 : module.end]
        return spec.refuses_below is not None and spec.refuses_below(module, step, below, self.graph.config) is not None

    def _tied_head(self, modules: Sequence[Module], home: Part) -> Part:
        """The head's part as it is where the embedding isn't: with a table of its own, which it reads in any case."""
        held, time = list(home.held_bytes), list(home.time_us)
        for d, plan in enumerate(self.plans):
            for module in modules:
                shared = self._shared(plan, module)
                held[d] += shared
                time[d] += read_us(self.speeds[d], shared)
                if shared:
                    self.tied.setdefault(d, []).append(shared)
        return Part(tuple(held), tuple(time))

    def _shared(self, plan: Plan, module: Module) -> int:
        """Bytes of a module's table that the plan doesn't count, because it is the embedding's."""
        step = plan.steps[module.index]
        owner = next((note.rpartition(" ")[2] for note in step.notes if note.startswith("shares its ")), None)
        return plan.by_path[owner].weight_bytes if owner is not None else 0

    def _tied_bytes(self) -> tuple[int, ...]:
        return tuple(sum(self.tied.get(d, ())) for d in range(len(self.devices))) if self.tied else ()

    def _room(self, device: Device) -> int | None:
        if not device.memory_bytes:
            return None
        kept = RESERVED_BYTES
        if device.kind == "cpu":  # where experts may pass whose layer is elsewhere
            passing = self._passing(0, [part for part in self._running(0) if part.step.role == "experts"])
            kept = int(device.memory_bytes * RESERVED_SHARE) + passing * (len(self.devices) > 1)
        return max(0, device.memory_bytes - kept)

    def _transient(self, d: int) -> int:
        """The most that a device holds for a moment that has a layer's home, its experts' part included wherever they are."""
        return max(self._passing(d, self._running(d)), self._hot_passing(d)) + self._caches(d).moment_bytes

    def _hot_passing(self, d: int) -> int:
        """The same while hot experts run there whose others are in main memory."""
        if self.popularity is None or d == CPU:
            return 0
        plan, name, found = self.plans[CPU], self.names[d], []
        for part in parts_of(plan):
            if "hot_experts" in part.step.kwargs:
                kwargs = {**part.step.kwargs, "hot_experts": "0", "hot_device": name}
                found.append(replace(part, step=part.step._replace(kwargs=kwargs)))
        moments = peaks(plan, found, Pass(1, self.piece, self.context))
        return moments[name].nbytes if name in moments else 0

    def _passing(self, d: int, parts: Sequence[RunningModule]) -> int:
        return most_held(self.plans[d], parts, Pass(1, self.piece, self.context))

    def _running(self, d: int) -> list[RunningModule]:
        """What can run on a device of what isn't pinned elsewhere."""
        plan, found = self.plans[d], self.graph.by_path
        here = (part for part in parts_of(plan) if part.step.generate_device == plan.default_device)
        return [part for part in here if not self._refused(found[part.step.path], part.step, d)]
