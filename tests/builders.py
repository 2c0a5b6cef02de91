"""Small module trees, operators and rule sets for tests, made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ktopt.diagnostics import Report
from ktopt.graph import Module, ModuleClass, ModuleGraph, Tensor
from ktopt.match import Matches, match
from ktopt.operator import Op, OperatorConfig, OperatorSpec, PlacedConfig, option
from ktopt.ruleset import NameClass, Replacement, Rule, RuleSet
from ktopt.source import Origin, Span

MODULE = "torch.nn.modules.module.Module"
LINEAR = ("torch.nn.modules.linear.Linear", MODULE)
EMBEDDING = ("torch.nn.modules.sparse.Embedding", MODULE)
LIST = ("torch.nn.modules.container.ModuleList", MODULE)
SILU = ("transformers.activations.SiLUActivation", MODULE)
V3 = "transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3"
OLD_V3 = "ktransformers.models.modeling_deepseek_v3."


@dataclass(frozen=True)
class Row:
    """One module of a tree to be built. Rows may come in any order in which parents stand before their children."""

    path: str
    mro: tuple[str, ...] = (MODULE,)
    tensors: tuple[Tensor, ...] = ()
    alias_paths: tuple[str, ...] = ()
    alias_classes: tuple[str, ...] = ()


def weight(*shape: int, dtype: str = "bfloat16") -> tuple[Tensor, ...]:
    return (Tensor("weight", shape, dtype),)


def make_graph(rows: Iterable[Row | str], name: str = "tiny", config: Mapping[str, Any] | None = None, **rest: Any) -> ModuleGraph:
    """A graph of rows, in pre-order whatever the rows' order. A bare string is a module without a class of interest; the root and
    missing ancestors are added."""
    wanted: dict[str, Row] = {"": Row("")}
    for row in rows:
        row = Row(row) if isinstance(row, str) else row
        parts = row.path.split(".") if row.path else []
        for depth in range(1, len(parts)):
            wanted.setdefault(".".join(parts[:depth]), Row(".".join(parts[:depth])))
        wanted[row.path] = row
    children: dict[str, list[str]] = {path: [] for path in wanted}
    for path in wanted:
        if path:
            children[path.rpartition(".")[0]].append(path)
    order: list[tuple[str, int]] = []

    def visit(path: str, parent: int) -> None:
        index = len(order)
        order.append((path, parent))
        for child in children[path]:
            visit(child, index)

    visit("", -1)
    ends = list(range(1, len(order) + 1))
    for index in range(len(order) - 1, 0, -1):
        ends[order[index][1]] = max(ends[order[index][1]], ends[index])
    classes: dict[tuple[str, ...], ModuleClass] = {}
    modules = []
    for index, (path, parent) in enumerate(order):
        row = wanted[path]
        cls = classes.setdefault(row.mro, ModuleClass(row.mro[0], row.mro))
        layer, expert = number_after(path, "layers"), number_after(path, "experts")
        modules.append(
            Module(path, cls, row.tensors, index, parent, ends[index], layer, expert, row.alias_paths, row.alias_classes)
        )
    return ModuleGraph(tuple(modules), name, config=config or {}, **rest)


def number_after(path: str, segment: str) -> int | None:
    parts = path.split(".")
    return next((int(b) for a, b in pairwise(parts) if a == segment and b.isdigit()), None)


def deepseek_like(layers: int = 61, dense: int = 3, experts: int = 0, rotary_aliases: bool = True) -> ModuleGraph:
    """A tree shaped as today's DeepSeek-V3, or with `experts` > 0 one whose experts are modules, as before fused experts."""
    rows = [
        Row("", (f"{V3}ForCausalLM", MODULE)),
        Row("model", (f"{V3}Model", MODULE)),
        Row("model.embed_tokens", EMBEDDING, weight(129280, 7168)),
        Row("model.layers", LIST),
    ]
    for layer in range(layers):
        rows += _layer(f"model.layers.{layer}", layer < dense, experts)
    aliases = tuple(f"model.layers.{i}.self_attn.rotary_emb" for i in range(layers)) if rotary_aliases else ()
    rows += [
        Row("model.norm", (f"{V3}RMSNorm", MODULE), weight(7168)),
        Row(
            "model.rotary_emb",
            (f"{V3}RotaryEmbedding", MODULE),
            (Tensor("inv_freq", (32,), "float32", True),),
            aliases,
            (f"{OLD_V3}DeepseekV3RotaryEmbedding",),
        ),
        Row("lm_head", LINEAR, weight(129280, 7168)),
    ]
    return make_graph(rows, "deepseek-like", {"num_hidden_layers": layers})


def _layer(path: str, dense: bool, experts: int) -> list[Row]:
    norm = (f"{V3}RMSNorm", MODULE)
    rows = [Row(path, (f"{V3}DecoderLayer", MODULE)), Row(f"{path}.self_attn", (f"{V3}Attention", MODULE))]
    for name, shape in {"q_a_proj": (1536, 7168), "q_b_proj": (24576, 1536), "kv_a_proj_with_mqa": (576, 7168)}.items():
        rows.append(Row(f"{path}.self_attn.{name}", LINEAR, weight(*shape)))
    rows += [
        Row(f"{path}.self_attn.kv_a_layernorm", norm, weight(512)),
        Row(f"{path}.self_attn.kv_b_proj", LINEAR, weight(32768, 512)),
        Row(f"{path}.self_attn.o_proj", LINEAR, weight(7168, 16384)),
    ]
    if dense:
        rows += _mlp(f"{path}.mlp", 18432)
    else:
        rows += [Row(f"{path}.mlp", (f"{V3}MoE", MODULE), (), (), (f"{OLD_V3}DeepseekV3MoE",))]
        rows += _experts(f"{path}.mlp.experts", experts)
        rows += [Row(f"{path}.mlp.gate", (f"{V3}TopkRouter", MODULE), weight(256, 7168), (), (f"{OLD_V3}MoEGate",))]
        rows += _mlp(f"{path}.mlp.shared_experts", 2048)
    return [*rows, Row(f"{path}.input_layernorm", norm, weight(7168)), Row(f"{path}.post_attention_layernorm", norm, weight(7168))]


def _experts(path: str, count: int) -> list[Row]:
    if not count:
        fused = (Tensor("gate_up_proj", (256, 4096, 7168), "bfloat16"), Tensor("down_proj", (256, 7168, 2048), "bfloat16"))
        return [Row(path, (f"{V3}Experts", MODULE), fused), Row(f"{path}.act_fn", SILU)]
    return [Row(path, LIST)] + [row for expert in range(count) for row in _mlp(f"{path}.{expert}", 2048)]


def _mlp(path: str, width: int) -> list[Row]:
    return [
        Row(path, (f"{V3}MLP", MODULE), (), (), (f"{OLD_V3}DeepseekV3MLP",)),
        Row(f"{path}.gate_proj", LINEAR, weight(width, 7168)),
        Row(f"{path}.up_proj", LINEAR, weight(width, 7168)),
        Row(f"{path}.down_proj", LINEAR, weight(7168, width)),
        Row(f"{path}.act_fn", SILU),
    ]


@dataclass(frozen=True, kw_only=True)
class AnyConfig(PlacedConfig):
    """kwargs of the operators below."""

    generate_op: str | None = option(None, help="an op", op=True)
    transfer_map: dict[int, str] | None = option(None, help="layer -> device")


OPS = {name: Op(name, ("cpu", "cuda"), name, packs=name == "Packed") for name in ("Packed", "Plain")}


def spec(name: str, *roles: str, **rest: Any) -> OperatorSpec:
    return OperatorSpec(name, AnyConfig, name, roles=roles, ops=OPS, **rest)


DEFAULT = spec("default")


def origin(line: int, column: int = 1) -> Origin:
    return Origin("rules.yaml", Span.at(line, column))


def rule(
    name: str | None = None,
    cls: str | None = None,
    operator: OperatorSpec = DEFAULT,
    *,
    recursive: bool = True,
    selector: Any = None,
    when: Any = None,
    expect: int | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """One rule to be numbered by `rule_set`."""
    config: OperatorConfig = operator.config(**kwargs)
    return {
        "clauses": selector or (name, cls),
        "operator": operator,
        "config": config,
        "given": kwargs,
        "recursive": recursive,
        "when": when,
        "expect": expect,
    }


def rule_set(*rules: Mapping[str, Any], form: str = "list", default_device: str = "cuda:0", places: Any = ()) -> RuleSet:
    """Rules in order; rule N (from 0) stands at line 10 N + 1, its name at + 1, its class at + 2, its kwargs at + 3."""
    made = []
    for index, given in enumerate(rules):
        line = 10 * index + 1
        clauses = given["clauses"]
        chosen = NameClass(*clauses, origin(line + 1, 5), origin(line + 2, 5)) if isinstance(clauses, tuple) else clauses
        kwarg_origins = {key: origin(line + 3, 7) for key in given["given"]}
        operator = given["operator"]
        replace = Replacement(operator, operator.name, given["config"], given["given"], origin(line + 2, 5), kwarg_origins)
        made.append(
            Rule(
                index,
                f"rule-{index + 1}",
                chosen,
                replace,
                origin(line),
                origin(line, 3),
                given["recursive"],
                given["when"],
                given["expect"],
                origin(line + 4) if given["expect"] is not None else None,
            )
        )
    return RuleSet(form, "rules.yaml", "", tuple(made), tuple(places), default_device=default_device)


def decide(graph: ModuleGraph, *rules: Mapping[str, Any], **rest: Any) -> Matches:
    """The matches of rules on a graph; fails where matching reports anything."""
    report = Report()
    matches = match(rule_set(*rules, **rest), graph, None, report)
    assert not report.items
    return matches
