"""A first rule file for a model on a machine, with comments that say what each part is for. Behind `ktopt init`.

It names an operator for every part that has one, keeps the rest as transformers made it, and places all of it. What it writes
checks clean, and says by `expect` how many modules each rule takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ktopt import registry
from ktopt.authoring.fmt import format_text
from ktopt.authoring.layout import SHARE_OF_MEMORY, lay_out, measure
from ktopt.authoring.scalars import string
from ktopt.compiler import run_stages
from ktopt.diagnostics import KtoptError
from ktopt.graph import Module, ModuleGraph
from ktopt.operator import OperatorSpec
from ktopt.pattern.numbers import runs
from ktopt.placement import Hardware
from ktopt.source import SourceFile

TRIES = 6
"""How often the share of memory for weights is lowered when operators need more than their plain weights."""

GENERAL = {"linear": "KTransformersLinear", "experts": "KTransformersExperts"}
NAMED = {
    "DeepseekV3Attention": "KDeepseekV2Attention",
    "DeepseekV2RotaryEmbedding": "YarnRotaryEmbedding",
    "DeepseekV3RotaryEmbedding": "YarnRotaryEmbeddingV3",
    "MixtralSparseMoeBlock": "KMistralSparseMoEBlock",
}
"""Operators for classes whose names they don't carry."""

ROLES = {
    "rotary": "Position embeddings.",
    "router": "Routers choose the experts of each token: small, and sensitive to rounding.",
    "experts": "Routed experts: most of the weights, of which each token uses a few.",
    "moe": "The block that calls router and experts.",
    "attention": "Attention, whose projections the linear rule takes one by one.",
    "norm": "Norms.",
    "linear": "All linear layers inside the decoder layers. The best op for the device is chosen; name another by generate_op.",
}
"""The parts that get rules, in the file's order, each with a comment."""


@dataclass
class _Rule:
    id: str
    match: str
    replace: str
    expect: int
    comments: list[str] = field(default_factory=list)
    kwargs: str = ""
    closes: bool = False

    def lines(self) -> Iterator[str]:
        yield from (f"  # {comment}" for comment in self.comments)
        yield f"  - id: {self.id}"
        yield f"    match: {string(self.match)}"
        yield f"    replace: {self.replace}"
        if self.kwargs:
            yield f"    kwargs: {{{self.kwargs}}}"
        yield f"    expect: {self.expect}"
        if self.closes:
            yield "    recursive: false"


def init_rules(graph: ModuleGraph, hardware: Hardware | None = None, *, modeline: str = "") -> str:
    """A native rule file for the model, in normal form.

    hardware   the machine to lay it out on; without one everything goes to the CPU
    modeline   a first line for editors, or ""

    KtoptError where no file is found that checks clean; main memory that is too small for the model is left for `check` to say.
    """
    if not graph.layer_count or len(_layer_lists(graph)) != 1:
        raise KtoptError(
            f"{graph.name or 'this model'} has no single list of decoder layers, so there is no pattern to write for it"
        )
    findings: list[str] = []
    for attempt in range(TRIES):
        text = _Writer(graph, hardware, modeline, SHARE_OF_MEMORY * 0.9**attempt).text()
        report = run_stages(SourceFile("rules.yaml", text), graph, hardware=hardware).report
        findings = [str(d) for d in report.sorted() if not (d.code == "KT504" and "cpu would" in d.message)]
        if not findings:
            return text
    raise KtoptError("the rules written for {} don't check clean:\n  {}".format(graph.name, "\n  ".join(findings[:5])))


def _layer_lists(graph: ModuleGraph) -> list[str]:
    """The paths of the lists that hold decoder layers."""
    parents = {m.parent for m in graph.modules if m.layer is not None and graph.modules[m.parent].layer is None}
    return [graph.modules[parent].path for parent in sorted(parents)]


class _Writer:
    def __init__(self, graph: ModuleGraph, hardware: Hardware | None, modeline: str, share: float) -> None:
        self.graph, self.hardware, self.modeline = graph, hardware, modeline
        self.dtype = str(graph.config.get("dtype") or graph.config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        self.sizes = measure(graph, self.dtype)
        tied = bool(graph.tied)
        self.layout = lay_out(self.sizes, hardware, share, tied=tied)
        self.layers = _layer_lists(graph)[0]
        self.outside = [m for m in graph.modules if m.layer is None and m.tensors]

    def text(self) -> str:
        lines = [*([self.modeline] if self.modeline else []), *self.header(), "", "version: 1"]
        if self.graph.architectures:
            lines.append(f"architectures: [{', '.join(self.graph.architectures)}]")
        lines += ["", *self.places(), "", "rules:"]
        for rule in self.rules():
            lines += rule.lines()
        return format_text(SourceFile("rules.yaml", "\n".join(lines) + "\n"))

    def header(self) -> list[str]:
        graph = self.graph
        name = graph.name or "this model"
        size = f"{self.sizes.total / 1e9:,.1f} GB in {self.dtype}"
        kind = f"{', '.join(graph.architectures)}, " if graph.architectures else ""
        machine = self.hardware.name if self.hardware else "the CPU"
        return [
            f"# {_line(name)} ({kind}{graph.layer_count} layers, {size}) on {_line(machine)}.",
            "# Every module goes to the first rule that matches it; `expect` is how many modules a rule must take.",
            "# ktopt check finds mistakes, ktopt plan shows the result, ktopt why MODULE explains it.",
        ]

    def places(self) -> list[str]:
        layout = self.layout
        lines = ["# Where modules live: the first line that takes one places it. Moves between devices follow from this."]
        if layout.devices == ["cpu"]:
            return [*lines, "place:", '  cpu: "@**"']
        ends = [m.path for m in self.outside if not self.is_embedding(m) and m.role != "rotary"]
        start = [m.path for m in self.outside if m.role == "rotary"]
        embeddings = [m.path for m in self.outside if self.is_embedding(m)]
        on: dict[str, list[str]] = {device: [self.layer_test(device)] for device in layout.devices}
        for device, paths in ((layout.start, start), (layout.ends, ends), (layout.embedding, embeddings)):
            on.setdefault(device, []).extend(f"@{path}" for path in paths)
        lines.append("place:")
        for device, parts in on.items():
            lines += [f"  # {comment}" for comment in self.remarks(device)]
            lines.append(f"  {string(device, 'key')}: {string(' | '.join(parts))}")
        return lines

    def remarks(self, device: str) -> Iterator[str]:
        if device == "cpu" and "cpu" in self.layout.devices:
            yield "these layers didn't fit"
        if device == "cpu" and self.layout.embedding == "cpu":
            yield "an embedding is only looked up, which main memory is fast enough for"

    def layer_test(self, device: str) -> str:
        return f"layer in {self.ranges({n for n, d in self.layout.layers.items() if d == device})}"

    def ranges(self, layers: set[int]) -> str:
        last = self.graph.layer_count - 1
        return ", ".join(f"{a}.." if b == last and a < b else str(a) if a == b else f"{a}..{b}" for a, b in runs(layers))

    def is_embedding(self, module: Module) -> bool:
        return module.role == "embedding" or module.name == "embed_tokens"

    def rules(self) -> Iterator[_Rule]:
        groups: dict[str, dict[str, list[Module]]] = {role: {} for role in ROLES}
        for module in self.graph.modules:
            if module.role in groups and not self.inside_experts(module):
                groups[module.role].setdefault(module.cls.simple_name, []).append(module)
        for role, by_class in groups.items():
            first = True
            made = self.linears if role == "linear" else self.experts if role == "experts" else self.others
            for number, (cls, modules) in enumerate(by_class.items(), 1):
                for rule in made(role, cls, modules):
                    if role not in ("linear", "experts"):
                        rule.id = role if number == 1 else f"{role}-{number}"
                    if first:
                        rule.comments.insert(0, ROLES[role])
                    first = False
                    yield rule

    def inside_experts(self, module: Module) -> bool:
        return any(above.role == "experts" for above in self.graph.ancestors(module))

    def others(self, role: str, cls: str, modules: list[Module]) -> Iterator[_Rule]:
        spec = operator_for(modules[0])
        comments = [] if spec.name != "default" else ["`default` keeps the module as transformers made it."]
        yield _Rule(role, f"class={cls}", spec.name, len(modules), comments)

    def experts(self, role: str, cls: str, modules: list[Module]) -> Iterator[_Rule]:
        spec = operator_for(modules[0])
        on_device = [m for m in modules if m.layer in (self.layout.experts or ())]
        left = [m for m in modules if m.layer not in (self.layout.experts or ())]
        everywhere = self.layout.devices == ["cpu"]
        closes = spec.name != "default"
        if on_device:
            layers = {m.layer for m in on_device if m.layer is not None}
            here = f"class={cls} & layer in {self.ranges(layers)}" if left else f"class={cls}"
            yield _Rule(
                "experts", here, spec.name, len(on_device), ["These have room beside their layer."] * bool(left), "", closes
            )
        if left:
            layers = {m.layer for m in left if m.layer is not None}
            there = f"class={cls} & layer in {self.ranges(layers)}" if on_device else f"class={cls}"
            name = "experts-on-cpu" if on_device else "experts"
            kwargs = "" if everywhere else "generate_device: cpu"
            comments = [] if everywhere else ["They don't fit beside the rest, and are computed from main memory."]
            yield _Rule(name, there, spec.name, len(left), comments, kwargs, closes)

    def linears(self, role: str, cls: str, modules: list[Module]) -> Iterator[_Rule]:
        spec = operator_for(modules[0])
        absorbed = [m for m in modules if m.name == "kv_b_proj" and operator_for(self.graph.modules[m.parent]).name != "default"]
        taken = [m for m in modules if m.layer is not None and m not in absorbed]
        comments: list[str] = []
        match = f"@{self.layers}.*.** & class={cls}"
        for router in self.named(lambda m: m.role == "router" and self.is_linear(m)):
            match += f" - class={router}"
        if absorbed:
            match += " - name=kv_b_proj"
            comments.append("kv_b_proj stays plain: absorbed attention folds it into its neighbours.")
        if taken:
            yield _Rule("linears", match, spec.name, len(taken), comments)
        outside = [m for m in modules if m.layer is None]
        if outside:
            paths = " | ".join(f"@{m.path}" for m in outside)
            yield _Rule("head", paths, spec.name, len(outside), ["The head: hidden states to logits."])

    def named(self, wanted: Callable[[Module], bool]) -> list[str]:
        return list(dict.fromkeys(m.cls.simple_name for m in self.graph.modules if wanted(m)))

    def is_linear(self, module: Module) -> bool:
        """Whether a rule for Linear would take it, by an older class of it."""
        return any(name.endswith(".Linear") for name in module.alias_classes)


def operator_for(module: Module) -> OperatorSpec:
    """The operator for a module: the general one of its role, the one that carries its class's name, or `default`."""
    fitting = [s for s in registry.specs() if module.role in s.roles and not s.lost and s.refuses(module, s.config()) is None]
    names = {module.cls.simple_name, *(name.rpartition(".")[2] for name in module.alias_classes)}
    wanted = [GENERAL.get(module.role, ""), *(NAMED.get(name, "") for name in sorted(names))]
    for spec in fitting:
        if spec.name in wanted:
            return spec
    carrying = [s for s in fitting if any(s.name.lower().startswith(f"k{name.lower()}") for name in names)]
    if carrying:
        return min(carrying, key=lambda s: len(s.name))
    default = registry.find("default")
    assert default is not None
    return default


def _line(text: str) -> str:
    """A name fit for a comment."""
    return "".join(c if c.isprintable() else "?" for c in text)
