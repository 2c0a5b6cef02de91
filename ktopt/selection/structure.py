"""Whether what the rules put together can work together: operators that fit, layers in one piece, modules left behind."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ktopt.diagnostics import Fix, Related, Report, Severity
from ktopt.graph import Module
from ktopt.match import Decision, Matches
from ktopt.operator import yaml_text
from ktopt.pattern import PatternError, PatternTimeout, compile_pattern
from ktopt.pattern.check import pattern_fix
from ktopt.pattern.numbers import in_words as numbers_in_words
from ktopt.placement import device_kind
from ktopt.ruleset import NameClass, Rule
from ktopt.selection.families import in_words, inner_name, layers_in_words
from ktopt.selection.written_for import check_families, is_for
from ktopt.source import Origin
from ktopt.treeindex import members


def check_structure(matches: Matches, report: Report) -> None:
    """KT407, KT502, KT503, KT505, KT601, KT602 and KT603; without KT502, KT503 and KT603 where `place: auto` is yet to say where
    modules go."""
    settled = matches.ruleset.auto is None
    layers = _by_layer(matches)
    for rule in matches.ruleset.rules:
        if matches.active[rule.index] is not False:
            _check_fit(rule, matches, report)
            if settled:
                _check_transfer_map(rule, matches, layers, report)
    check_families(matches, report)
    _check_aliases(matches, report)
    if settled:
        _check_layers_whole(matches, layers, report)
        _check_left_behind(matches, layers, report)
    _check_kv_b_proj(matches, report)
    _check_experts(matches, report)


def _line(rule: Rule) -> str:
    return f"rule {rule.number} (line {rule.origin.span.start.line})"


def _device_origin(rule: Rule) -> Origin:
    return rule.replace.kwarg_origins.get("generate_device", rule.origin)


def _name_origin(rule: Rule) -> Origin:
    return (rule.match.name_origin if isinstance(rule.match, NameClass) else None) or rule.match_origin


def _rule_of(matches: Matches, decision: Decision) -> Rule | None:
    return None if decision.rule is None else matches.ruleset.rules[decision.rule]


def _check_fit(rule: Rule, matches: Matches, report: Report) -> None:
    """KT407: the operator can't take a module's place. Asked once for modules of one class, role and shape, whose layers have the
    same hot experts."""
    operator, config = rule.replace.operator, rule.replace.config
    by_layer = layers if isinstance(layers := getattr(config, "hot_experts", None), Mapping) else {}
    asked: dict[tuple[Any, ...], str | None] = {}
    refused: dict[str, list[int]] = {}
    for index in members(matches.won(rule.index)):
        module = matches.graph.modules[index]
        cls = module.cls
        key = (
            id(cls),
            id(module.alias_classes),
            id(module.tensors),
            cls.role == "container" and module.role,
            by_layer.get(module.layer),
        )
        if key not in asked:
            asked[key] = _refusal(module, operator.fits(module), operator.roles, operator.refuses(module, config))
        if (reason := asked[key]) is not None:
            refused.setdefault(reason, []).append(index)
    _check_hot_layers(rule, by_layer, matches, report)
    if len(refused) > 1 and _report_searched(rule, refused, matches, report):
        return
    for reason, indices in refused.items():
        message = f"rule {rule.number}: {operator.name} can't take {in_words(matches.graph, indices)}: {reason}"
        report.error("KT407", message, rule.replace.origin, help="narrow the match, or name an operator that fits")


def _check_hot_layers(rule: Rule, by_layer: Mapping[Any, Any], matches: Matches, report: Report) -> None:
    """KT306 as a warning: hot experts of layers that none of the rule's modules is in."""
    taken = {matches.graph.modules[index].layer for index in members(matches.won(rule.index))}
    if taken and (lost := sorted(layer for layer in by_layer if layer not in taken)):
        have = layers_in_words(layer for layer in taken if layer is not None)
        message = f"rule {rule.number}: `hot_experts` names {layers_in_words(lost)}, and the rule takes {have}"
        help = "take them out of `hot_experts`, or widen the match"
        report.warning("KT306", message, rule.replace.kwarg_origins.get("hot_experts", rule.origin), help=help)


def _report_searched(rule: Rule, refused: dict[str, list[int]], matches: Matches, report: Report) -> bool:
    """KT407 once, where a name is found in the middle of paths and so takes modules of several kinds, with what to write instead;
    False where that isn't the reason."""
    name = rule.match.name if isinstance(rule.match, NameClass) and rule.match.cls is None else None
    whole = next(iter(_anchored(name, rule, matches)), None) if name else None
    if name is None or whole is None:
        return False
    indices = [i for found in refused.values() for i in found]
    taken = in_words(matches.graph, sorted(indices))
    message = (
        f"rule {rule.number}: `{name}` is searched for anywhere in a path, so the rule takes {taken} too, "
        f"and {rule.replace.operator.name} can't take their place"
    )
    fix = pattern_fix(f"write {whole}", _name_origin(rule), whole)
    report.error("KT407", message, _name_origin(rule), help=f"write {whole}, which ends where the path ends", fix=fix)
    return True


def _anchored(name: str, rule: Rule, matches: Matches) -> Iterator[str]:
    """The name with an end, and a beginning, by which it takes only modules that the operator can replace."""
    if name.endswith("$") or "|" in name:
        return
    for whole in (f"^{name}$", rf"\.{name}$", f"{name}$") if not name.startswith(("^", "\\.")) else (f"{name}$",):
        try:
            pattern = compile_pattern(whole)
            taken = [m for m in matches.graph if pattern.search(m.path)]
        except (PatternError, PatternTimeout):
            return
        if any(rule.replace.operator.fits(m) for m in taken):
            yield whole


def _refusal(module: Module, fits: bool, roles: Iterable[str], refusal: str | None) -> str | None:
    if not fits:
        return f"it replaces {' or '.join(roles)} modules, and this is a {module.cls.simple_name} ({module.role})"
    return refusal


def _check_aliases(matches: Matches, report: Report) -> None:
    """KT505: rules for a module's older paths want different things of it."""
    for module, decision in matches.open:
        if len(decision.alias_rules) < 2:
            continue
        first, *others = (matches.ruleset.rules[i] for i in decision.alias_rules)
        for other in others:
            difference = _difference(first, other)
            if difference:
                pair = f"rules {first.number} and {other.number}"
                message = f"{pair} both decide {module.path}, by older paths of it, and give it {difference}"
                related = [Related(f"rule {first.number}", first.replace.origin)]
                help = "give them one operator and one set of kwargs; only devices may differ"
                report.error("KT505", message, other.replace.origin, help=help, related=related)


def _difference(a: Rule, b: Rule) -> str:
    if a.replace.operator.name != b.replace.operator.name:
        return f"{a.replace.operator.name} and {b.replace.operator.name}"
    for f in dataclasses.fields(a.replace.config):
        one, two = getattr(a.replace.config, f.name), getattr(b.replace.config, f.name)
        if one != two and not f.metadata.get("device"):
            return f"{f.name} {yaml_text(one)} and {yaml_text(two)}"
    return ""


def _by_layer(matches: Matches) -> dict[int, list[Module]]:
    """The modules of each layer that hold something or are replaced, without those inside a closed module."""
    found: dict[int, list[Module]] = {}
    for module, decision in matches.open:
        if module.layer is None:
            continue
        rule = _rule_of(matches, decision)
        if module.tensors or (rule is not None and rule.replace.operator.name != "default"):
            found.setdefault(module.layer, []).append(module)
    return found


def _check_layers_whole(matches: Matches, by_layer: dict[int, list[Module]], report: Report) -> None:
    """KT502: rules put one layer on two accelerators. Experts on the CPU beside a GPU are the rule, not the exception.
    The smaller part is taken for the mistake."""
    splits: dict[tuple[int, str, str, int], tuple[list[int], dict[str, None]]] = {}
    for layer, modules in by_layer.items():
        placed: dict[str, list[Module]] = {}
        for module in modules:
            if matches.decisions[module.index].rule is not None:
                placed.setdefault(matches.device(module.index), []).append(module)
        accelerators = [d for d in placed if device_kind(d) != "cpu"]
        if len(accelerators) < 2:
            continue
        odd = min(accelerators, key=lambda d: (len(placed[d]), -_main_rule(placed[d], matches)))
        rest = max(accelerators, key=lambda d: (len(placed[d]), d != odd))
        last = {d: _main_rule(placed[d], matches) for d in (odd, rest)}
        layers, names = splits.setdefault((last[odd], odd, rest, last[rest]), ([], {}))
        layers.append(layer)
        names.update(dict.fromkeys(inner_name(m) for m in placed[odd]))
    for (index, odd, rest, other), (layers, names) in splits.items():
        _report_split(matches, report, matches.ruleset.rules[index], matches.ruleset.rules[other], (odd, rest), layers, list(names))


def _main_rule(modules: list[Module], matches: Matches) -> int:
    """The rule that decides most of these modules, the last of several."""
    rules = [rule for m in modules if (rule := matches.decisions[m.index].rule) is not None]
    return max(rules, key=lambda rule: (rules.count(rule), rule))


def _report_split(
    matches: Matches, report: Report, rule: Rule, other: Rule, devices: tuple[str, str], layers: list[int], names: list[str]
) -> None:
    odd, rest = devices
    each = f"each of layers {numbers_in_words(layers)}" if len(layers) > 1 else f"layer {layers[0]}"
    listed = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    message = (
        f"{_line(rule)}: {each} is split over {' and '.join(sorted(devices))} (on {odd}: {listed}); "
        f"rule {other.number} puts the rest on {rest}"
    )
    related = [Related(f"rule {other.number} puts its part on {rest}", _device_origin(other))]
    report.error("KT502", message, _device_origin(rule), help=f"put these modules on {rest} too", related=related)


def _check_left_behind(matches: Matches, by_layer: dict[int, list[Module]], report: Report) -> None:
    """KT603: modules that no rule takes lie on the default device while the rest of their layer was put elsewhere. If only experts
    were, the model is split between GPU and CPU as such models are."""
    default, untouched = matches.ruleset.default_device, Decision()
    left: dict[tuple[int, str], list[int]] = {}
    for modules in by_layer.values():
        placed = [m for m in modules if matches.decisions[m.index].rule is not None and m.role != "experts"]
        devices = {matches.device(m.index): matches.decisions[m.index].rule or 0 for m in reversed(placed)}
        if not devices or default in devices:
            continue
        behind = [m for m in modules if matches.decisions[m.index] == untouched and any(not tensor.buffer for tensor in m.tensors)]
        if not behind:
            continue
        elsewhere = min(devices, key=lambda d: (device_kind(d) == "cpu", devices[d]))
        left.setdefault((devices[elsewhere], elsewhere), []).extend(m.index for m in behind)
    for (index, device), indices in left.items():
        rule = matches.ruleset.rules[index]
        message = (
            f"{in_words(matches.graph, indices)}: no rule takes them, and they stay on {default} while the rest is on {device}"
        )
        help = f"add a last rule of class default that puts them on {device}"
        report.warning("KT603", message, _device_origin(rule), help=help)


def _check_transfer_map(rule: Rule, matches: Matches, by_layer: dict[int, list[Module]], report: Report) -> None:
    """KT503: where the rule says that layers change device, and where they do."""
    written = getattr(rule.replace.config, "transfer_map", None)
    if not isinstance(written, dict) or not matches.won(rule.index) or not matches.graph.layer_count:
        return
    devices = _layer_devices(matches, by_layer)
    real = {layer: device for layer, device in devices.items() if layer - 1 in devices and devices[layer - 1] != device}
    if {int(layer): device for layer, device in written.items()} == real:
        return
    found = ", ".join(f"{layer}: {device}" for layer, device in real.items()) or "nowhere"
    message = (
        f"rule {rule.number}: transfer_map is {{{', '.join(f'{k}: {v}' for k, v in written.items())}}}, and by the rules layers "
    )
    message += f"change device at {found}" if real else f"are all on {next(iter(devices.values()), 'one device')}"
    help = "ktopt makes the transfers that the placement needs; transfer_map can be left out"
    report.warning("KT503", message, rule.replace.kwarg_origins.get("transfer_map", rule.replace.origin), help=help)


def _layer_devices(matches: Matches, by_layer: dict[int, list[Module]]) -> dict[int, str]:
    """The device of each layer: where most of its modules are that don't lie on the CPU beside an accelerator."""
    found: dict[int, str] = {}
    for layer, modules in sorted(by_layer.items()):
        counts: dict[str, int] = {}
        for module in modules:
            device = matches.device(module.index)
            counts[device] = counts.get(device, 0) + 1
        accelerators = {d: n for d, n in counts.items() if device_kind(d) != "cpu"} or counts
        found[layer] = max(accelerators, key=lambda d: accelerators[d])
    return found


def _check_kv_b_proj(matches: Matches, report: Report) -> None:
    """KT601: absorbed attention multiplies queries and results by kv_b_proj's weight: a few bits of it cost precision in both."""
    taken: dict[tuple[int, int], list[int]] = {}
    for module, decision in matches.open:
        if decision.rule is None or not module.path.endswith(".kv_b_proj"):
            continue
        attention = _rule_of(matches, matches.decisions[module.parent])
        operator = attention.replace.operator if attention is not None else None
        if attention is not None and operator and "attention" in operator.roles and is_for(operator, matches.graph):
            taken.setdefault((decision.rule, attention.index), []).append(module.index)
    for (index, attention_index), indices in taken.items():
        rule, attention = matches.ruleset.rules[index], matches.ruleset.rules[attention_index]
        config, ops = rule.replace.config, rule.replace.operator.ops
        op = ops.get(str(getattr(config, "generate_op", None)))
        if op is None or op.name == "KLinearTorch" or op.keeps or _takes_too_many(rule, report):
            continue
        severity = Severity.WARNING if op.packs else Severity.INFO
        message = (
            f"rule {rule.number} takes {in_words(matches.graph, indices)}; "
            f"{attention.replace.operator.name} (rule {attention.number}) "
            + (f"then works on the numbers that {op.name} makes of it" if op.packs else f"unpacks it from {op.name}")
        )
        related = [Related("the attention that absorbs it", attention.replace.origin)]
        help = _how_to_leave_kv_b_proj(rule) if op.packs else None
        fix = _without_kv_b_proj(rule) if op.packs else None
        report.report("KT601", severity, message, _name_origin(rule), help=help, related=related, fix=fix)


def _takes_too_many(rule: Rule, report: Report) -> bool:
    """Whether an error says of the rule's pattern that its layer number doesn't end: what follows the number is then not looked for
    where it was meant to be."""
    at = _name_origin(rule)
    errors = (d for d in report if d.code == "KT305" and d.severity is Severity.ERROR)
    return any(d.file == at.file and d.span.start.line == at.span.start.line for d in errors)


def _how_to_leave_kv_b_proj(rule: Rule) -> str:
    if not isinstance(rule.match, NameClass):
        return "add - @model.layers.*.self_attn.kv_b_proj to the selector"
    ahead = r"(?!.*self_attn\.kv_b_proj)"
    return f"add {ahead} to the pattern" if rule.match.name else f"give the rule a name too, such as ^{ahead}"


def _without_kv_b_proj(rule: Rule) -> Fix | None:
    """The rule's pattern with a look-ahead that leaves kv_b_proj out, where the pattern is anchored and has one branch."""
    name = rule.match.name if isinstance(rule.match, NameClass) else None
    if not name or not name.startswith("^") or "|" in re.sub(r"\([^()]*\)", "", name):
        return None
    return pattern_fix("leave kv_b_proj out", _name_origin(rule), r"^(?!.*self_attn\.kv_b_proj)" + name[1:])


def _check_experts(matches: Matches, report: Report) -> None:
    """KT602: experts were replaced under a block that still calls them one by one; transformers' fused ones are called as ours."""
    taken: dict[int, list[int]] = {}
    for module, decision in matches.open:
        if decision.rule is None or module.role != "experts" or module.parent < 0:
            continue
        rule = matches.ruleset.rules[decision.rule]
        if "experts" not in rule.replace.operator.roles:
            continue
        block = _rule_of(matches, matches.decisions[module.parent])
        replaced = block is not None and block.replace.operator.name != "default"
        if not replaced and module.cls.simple_name == "ModuleList":
            taken.setdefault(rule.index, []).append(module.index)
    for index, indices in taken.items():
        rule = matches.ruleset.rules[index]
        caller = matches.graph.modules[matches.graph.modules[indices[0]].parent].cls.simple_name
        message = (
            f"rule {rule.number} replaces {in_words(matches.graph, indices)}, but {caller} calls its experts one by one, "
            f"and no rule replaces it"
        )
        help = "add a rule that replaces the block, such as KDeepseekV3MoE for DeepseekV3MoE"
        report.error("KT602", message, _name_origin(rule), help=help)
