"""A list-form rule file made into a native one that is proved to resolve alike: behind `ktopt migrate`.

    the old file -> its rules on every model (drafts.py), each with a selector that takes the same (selectors.py, regexes.py)
                 -> the device map that they make (places.py)
                 -> rules that say the same of different layers as one, comments kept (remarks.py)
                 -> text (writing.py), compiled and compared with the old file's plan on every model (proof.py)

Where the plans differ, the rules concerned are taken apart, then kept by their own name and class with their own devices, until
the plans are alike. Where even that differs, nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from ktopt.authoring.migrating.drafts import Draft, Old, group, read_old
from ktopt.authoring.migrating.places import by_device, exceptions, homes, needs, place_map
from ktopt.authoring.migrating.proof import Difference, compared, difference
from ktopt.authoring.migrating.remarks import Remarks, read_remarks, without_old_rules
from ktopt.authoring.migrating.trees import Tree, likely_models
from ktopt.authoring.migrating.writing import name_drafts, native_text
from ktopt.compiler import Compilation, run_stages
from ktopt.diagnostics import CompileError, KtoptError, Severity
from ktopt.graph import ModuleGraph
from ktopt.match import Matches
from ktopt.pattern.numbers import in_words
from ktopt.plan import Plan, Step
from ktopt.ruleset import RuleSet
from ktopt.source import SourceFile


@dataclass(frozen=True)
class Migration:
    """A migrated file.

    text       the native file, in normal form
    models     the models on which it was proved to resolve as the old one
    modules    how many modules were compared on each
    rules      how many rules the old file has, and the new one
    notes      what the author has to know: rules left out, rules that keep their regex
    """

    text: str
    models: tuple[str, ...]
    modules: tuple[int, ...]
    rules: tuple[int, int]
    notes: tuple[str, ...] = ()


def migrate(source: SourceFile, models: Sequence[ModuleGraph] = (), *, path: str = "", modeline: str = "") -> Migration:
    """The native form of a list-form file.

    models     models to prove it on; by default the shipped ones that it fits best
    path       what the new file is called in messages
    modeline   a first line for editors, or ""

    CompileError where the file has errors that leave no plan. KtoptError where it is native already, fits no model, or can't be
    written so that both resolve alike.
    """
    ruleset = _list_form(source)
    graphs = list(models) or likely_models(ruleset)
    if not graphs:
        raise KtoptError(f"{source.path}: no shipped model has modules that its rules take; say which with --model")
    compiled = [_compiled(source, graph) for graph in graphs]
    return _Migrator(source, ruleset, graphs, compiled, path or source.path, modeline).run()


def _list_form(source: SourceFile) -> RuleSet:
    checked = run_stages(source)
    if checked.ruleset is None:
        raise CompileError(checked.report)
    if checked.ruleset.form != "list":
        raise KtoptError(f"{source.path} is in the native form already: there is nothing to migrate")
    return checked.ruleset


def _compiled(source: SourceFile, graph: ModuleGraph) -> tuple[Matches, Plan]:
    compilation = run_stages(source, graph)
    if compilation.matches is None or compilation.plan is None:
        raise CompileError(compilation.report)
    return compilation.matches, compilation.plan


@dataclass
class _State:
    """How far the rules have been taken back: rules on their own, rules by name and class, placing rules that stay rules, and
    modules that need a line of their own, each with its device."""

    apart: set[int] = field(default_factory=set)
    literal: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    together: bool = False
    left: set[tuple[str, str]] = field(default_factory=set)

    @property
    def size(self) -> int:
        return len(self.apart) + len(self.literal) + len(self.kept) + len(self.left)


class _Migrator:
    def __init__(
        self,
        source: SourceFile,
        ruleset: RuleSet,
        graphs: Sequence[ModuleGraph],
        compiled: Sequence[tuple[Matches, Plan]],
        path: str,
        modeline: str,
    ) -> None:
        self.source, self.ruleset, self.graphs, self.path, self.modeline = source, ruleset, graphs, path, modeline
        self.trees = [Tree(graph) for graph in graphs]
        self.matches = [matches for matches, _ in compiled]
        self.plans = [plan for _, plan in compiled]
        remarks, tail = read_remarks(source)
        self.tail, self.commented_out = without_old_rules(tail)
        for remark in remarks:
            remark.above, count = without_old_rules(remark.above)
            self.commented_out += count
        self.olds = read_old(ruleset, remarks, self.trees, self.matches)
        self.default = ruleset.default_device
        self.wanted = needs(self.olds, self.trees, self.matches, self.default)
        self.map = place_map(self.wanted, self.trees, self.default)
        self.homes = homes(self.map, self.trees)
        self.dead = [old for old in self.olds if not any(old.wins)]

    def run(self) -> Migration:
        state = _State(kept={old.index for old in self.olds if old.only_places and self._stands_before_others(old)})
        while True:
            drafts = self.drafts(state)
            text = self.text(drafts, state)
            differences = self.prove(text)
            if not differences:
                return self.migration(*self.joined(text, drafts, state), state)
            before = state.size
            self.take_back(state, drafts, differences)
            if state.size == before:
                raise KtoptError(self.refusal(differences))

    def joined(self, text: str, drafts: list[Draft], state: _State) -> tuple[str, list[Draft]]:
        """A proved text with the rules that had to stand apart from others made one with each other, where that is proved too."""
        merged = self.drafts(state, together=True)
        if len(merged) < len(drafts):
            shorter = self.text(merged, state)
            if not self.prove(shorter):
                state.together = True
                return shorter, merged
        return text, drafts

    def _stands_before_others(self, old: Old) -> bool:
        """Whether a placing rule keeps modules from a later rule that does more."""
        later = [o for o in self.olds[old.index + 1 :] if not o.only_places]
        return any(wins & takes for o in later for wins, takes in zip(old.wins, o.takes, strict=True))

    def drafts(self, state: _State, *, together: bool = False) -> list[Draft]:
        stays = state.kept | state.literal
        olds = [old for old in self.olds if any(old.wins) and (not old.only_places or old.index in stays)]
        drafts = group(olds, self.homes, self.default, state.apart | state.kept, state.literal, together=together)
        for draft in drafts:
            draft.remarks = Remarks()
            for old in draft.olds:
                draft.remarks.add(old.remarks, layers=len(draft.olds) == 1)
        name_drafts(drafts, self.trees)
        return drafts

    def text(self, drafts: Sequence[Draft], state: _State) -> str:
        olds = [old for draft in drafts for old in draft.olds]
        elsewhere = exceptions(olds, self.wanted, self.homes, self.trees, self.default)
        left = by_device([*elsewhere, *sorted(state.left)], self.trees)
        places = self.map.before_rest(left)
        places, left = (places, {}) if places is not None else (self.map, left)
        architectures = list(dict.fromkeys(name for graph in self.graphs for name in graph.architectures))
        name = PurePath(self.source.path).name if self.source.path != "-" else "a list-form file"
        models = ", ".join(graph.name for graph in self.graphs)
        header = [
            *([self.modeline] if self.modeline else []),
            f"# Made from {name} by ktopt migrate; both resolve alike on {models}.",
            "",
        ]
        comments = self.place_comments(olds)
        tail = [*self.dead_comments(), *self.tail]
        return native_text(self.path, header, architectures, places, comments, drafts, left, self.trees, tail)

    def place_comments(self, kept: Sequence[Old]) -> dict[str, list[str]]:
        """Comments of rules that only placed, and those that tell a rule's layers where several became one."""
        rules = {old.index for old in kept}
        found: dict[str, list[str]] = {"": []}
        for old in self.olds:
            if not any(old.wins):
                continue
            remarks, of_layers = old.remarks, old.remarks.of_layers
            if of_layers:
                device = old.home if old.home in self.map.lines else ""
                _add_new(found.setdefault(device, []), [of_layers])
            if old.index not in rules:
                _add_new(found[""], [text for text in remarks.above if text != of_layers])
                _add_new(found[""], [text for texts in remarks.beside.values() for text in texts])
            _add_new(found[""], remarks.transfers)
        return found

    def dead_comments(self) -> list[str]:
        lines: list[str] = []
        for old in self.dead:
            lines += ["", f"# Left out: {self.dead_note(old)}", *old.remarks.above]
        return lines

    def dead_note(self, old: Old) -> str:
        clauses = [f"name {old.match.name}"] * (old.match.name is not None) + [f"class {old.match.cls}"] * (
            old.match.cls is not None
        )
        what = "matches nothing" if not any(old.takes) else "matches only what rules before it take"
        line = old.rule.origin.span.start.line
        return f"the rule at line {line} of the old file ({', '.join(clauses)}), which {what}."

    def prove(self, text: str) -> list[tuple[Difference, Compilation]]:
        found = []
        for graph, old in zip(self.graphs, self.plans, strict=True):
            new = run_stages(SourceFile(self.path, text), graph)
            if new.plan is None:
                errors = tuple(str(d) for d in new.report.sorted() if d.severity is Severity.ERROR)
                found.append((Difference(graph.name, errors, frozenset()), new))
                continue
            differs = difference(graph, old, new.plan)
            if differs is not None:
                found.append((differs, new))
        return found

    def take_back(self, state: _State, drafts: Sequence[Draft], found: Sequence[tuple[Difference, Compilation]]) -> None:
        """Take the rules that the differences concern one step back: apart, then by name and class."""
        concerned: set[int] = set()
        before = len(state.left)
        for differs, new in found:
            number = next(i for i, graph in enumerate(self.graphs) if graph.name == differs.model)
            for path in differs.paths:
                if new.plan is not None and self._only_elsewhere(self.plans[number].by_path[path], new.plan.by_path[path]):
                    state.left.add((self.plans[number].by_path[path].generate_device, path))
                    continue
                decision = self.matches[number].decisions[self.graphs[number].by_path[path].index]
                concerned |= {*decision.alias_rules, *([decision.rule] if decision.rule is not None else [])}
                step = new.plan.by_path[path] if new.plan else None
                if step is not None and step.rule is not None and step.rule < len(drafts):
                    concerned |= {old.index for old in drafts[step.rule].olds}
        concerned -= state.literal
        if not concerned and len(state.left) > before:
            return
        fresh = concerned - state.apart
        if fresh:
            state.apart |= fresh
            state.kept |= {i for i in fresh if self.olds[i].only_places}
        elif concerned:
            state.literal |= concerned
        else:
            state.literal |= {old.index for old in self.olds if any(old.wins)}

    @staticmethod
    def _only_elsewhere(old: Step, new: Step) -> bool:
        """Whether a module that both files leave as it is has but another device."""
        plain = old.operator == new.operator == "default" and new.rule is None and not old.inside and not old.replicas
        return plain and old.generate_device == old.prefill_device != new.generate_device

    def migration(self, text: str, drafts: Sequence[Draft], state: _State) -> Migration:
        notes = [f"left out {self.dead_note(old)}" for old in self.dead]
        if self.commented_out:
            rules = "rule" if self.commented_out == 1 else "rules"
            notes.append(f"left out {self.commented_out} {rules} that stood in comments")
        literal = [draft.first.rule.origin.span.start.line for draft in drafts if draft.choice is None]
        regex = [draft.first.rule.origin.span.start.line for draft in drafts if draft.choice and not draft.choice.plain]
        if literal:
            notes.append(f"kept name and class as they were, for want of a selector proved equal: line {in_words(literal)}")
        if regex:
            notes.append(f"kept the regex, as `path ~ /.../`: line {in_words(regex)}")
        if state.apart - state.literal and not state.together:
            lines = [self.olds[i].rule.origin.span.start.line for i in sorted(state.apart - state.literal)]
            notes.append(f"not merged with others like it, since their order matters: line {in_words(lines)}")
        counts = tuple(len(compared(graph, plan)) for graph, plan in zip(self.graphs, self.plans, strict=True))
        new_rules = len(_list(text))
        return Migration(text, tuple(g.name for g in self.graphs), counts, (len(self.ruleset.rules), new_rules), tuple(notes))

    def refusal(self, found: Sequence[tuple[Difference, Compilation]]) -> str:
        differs = found[0][0]
        shown = "\n  ".join(differs.words[:8])
        return f"{self.source.path}: no native file was found that resolves alike on {differs.model}:\n  {shown}"


def _add_new(lines: list[str], more: Sequence[str]) -> None:
    """Append comments that aren't there yet, and blank lines."""
    lines += [text for text in more if not text or text not in lines]


def _list(text: str) -> tuple[object, ...]:
    ruleset = run_stages(SourceFile("", text)).ruleset
    return ruleset.rules if ruleset is not None else ()
