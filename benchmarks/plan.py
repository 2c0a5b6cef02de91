"""How long it takes to plan a 60-rule file for eight GPUs on a DeepSeek-V3 tree with every expert a module (75,457 modules).

    python benchmarks/plan.py [--runs N] [--json FILE] [--stages]

In process, from the file's text to a Plan that is not yet written, with a fresh graph each time (nothing of it computed before).
Beside it: a plain walk as KTransformers' code does it, every module against every rule with `re.search` and an is-instance test.
Two variants: with the experts closed by `recursive: False`, as in KTransformers' files, and open, so that each module is decided.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from common import ROOT, UPSTREAM_RULES, Row, arguments, row, show, stopwatch

sys.path.insert(0, str(ROOT / "tests"))

from oracle.upstream_semantics import resolve
from oracle.upstream_trees import CONFIGS, as_graph, load_config, upstream_tree

from ktopt.graph import ModuleGraph
from ktopt.source import SourceFile

MODELING = "ktransformers.models.modeling_deepseek_v3"
OPERATORS = "ktransformers.operators"
STAGES = ("parse", "validate", "match", "check_selection", "make_plan")
LAYERS = 61
GPUS = 8


def rules_for_gpus(closed: bool) -> list[dict[str, Any]]:
    """A rule list in KTransformers' language that spreads DeepSeek-V3's layers over eight GPUs: seven rules a GPU and four more."""
    per_gpu = -(-LAYERS // GPUS)
    rules = [placed("^model.embed_tokens", None, "default", "cpu")]
    for gpu in range(GPUS):
        layers = "|".join(str(i) for i in range(gpu * per_gpu, min((gpu + 1) * per_gpu, LAYERS)))
        rules += list(rules_of_layers(rf"^model\.layers\.({layers})\.", f"cuda:{gpu}", closed))
    last = f"cuda:{GPUS - 1}"
    model = placed("^model$", None, f"{OPERATORS}.models.KDeepseekV2Model", None)
    model["replace"]["kwargs"] = {
        "per_layer_prefill_intput_threshold": 0,
        "transfer_map": {gpu * per_gpu: f"cuda:{gpu}" for gpu in range(1, GPUS)},
    }
    head = placed("^lm_head", "torch.nn.Linear", f"{OPERATORS}.linear.KTransformersLinear", last)
    return [*rules, model, head, placed("^model.norm", None, "default", last)]


def rules_of_layers(prefix: str, device: str, closed: bool) -> Iterator[dict[str, Any]]:
    yield placed(prefix, f"{MODELING}.DeepseekV3RotaryEmbedding", f"{OPERATORS}.RoPE.YarnRotaryEmbeddingV3", device)
    linear = placed(prefix + r"(?!self_attn\.kv_b_proj).*$", "torch.nn.Linear", f"{OPERATORS}.linear.KTransformersLinear", device)
    linear["replace"]["kwargs"] |= {"generate_op": "KLinearMarlin", "prefill_op": "KLinearTorch"}
    yield linear
    yield placed(prefix + r"mlp$", f"{MODELING}.DeepseekV3MoE", f"{OPERATORS}.experts.KDeepseekV3MoE", device)
    yield placed(prefix + r"mlp\.gate$", f"{MODELING}.MoEGate", f"{OPERATORS}.gate.KMoEGate", device)
    experts = placed(prefix + r"mlp\.experts$", None, f"{OPERATORS}.experts.KTransformersExperts", "cpu")
    experts["replace"]["kwargs"] |= {
        "prefill_device": device,
        "prefill_op": "KExpertsTorch",
        "generate_op": "KExpertsCPU",
        "out_device": device,
    }
    if closed:
        experts["recursive"] = False
    yield experts
    yield placed(prefix + r"self_attn$", None, f"{OPERATORS}.attention.KDeepseekV2Attention", device)
    yield placed(prefix, None, "default", device)


def placed(name: str, cls: str | None, operator: str, device: str | None) -> dict[str, Any]:
    match = {"name": name} | ({"class": cls} if cls else {})
    kwargs = {"generate_device": device, "prefill_device": device} if device else {}
    return {"match": match, "replace": {"class": operator, "kwargs": kwargs}}


def measure(what: str, text: str, graph: ModuleGraph, runs: int, target: float | None) -> list[Row]:
    """The first compilation of this process or file, and the median of the next."""
    from ktopt.compiler import run_stages

    first: list[float] = []
    later: list[float] = []
    for turn in range(runs + 1):
        compilation = None  # the last one is freed outside the measured time
        fresh = dataclasses.replace(graph)
        re.purge()
        with stopwatch(later if turn else first):
            compilation = run_stages(SourceFile("bench.yaml", text), fresh)
        if compilation.plan is None or len(compilation.plan.steps) != len(graph):
            sys.exit("\n".join(map(str, compilation.report)))
    return [row(f"{what}: first", first), row(f"{what}: next", later, target=target)]


def measure_stages(what: str, text: str, graph: ModuleGraph, runs: int) -> list[Row]:
    """Where the time goes: each stage's median."""
    from ktopt import compiler

    taken: dict[str, list[float]] = {}

    def timed(name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        def stage_and_watch(*args: Any, **kwargs: Any) -> Any:
            with stopwatch(taken.setdefault(name, [])):
                return stage(*args, **kwargs)

        return stage_and_watch

    kept = {name: getattr(compiler, name) for name in STAGES}
    try:
        for name, stage in kept.items():
            setattr(compiler, name, timed(name, stage))
        for _ in range(runs):
            re.purge()
            compiler.run_stages(SourceFile("bench.yaml", text), dataclasses.replace(graph))
    finally:
        for name, stage in kept.items():
            setattr(compiler, name, stage)
    return [row(f"{what}: {name}", times) for name, times in taken.items()]


def measure_walk(what: str, rules: list[dict[str, Any]], walk: Callable[[list[dict[str, Any]]], Any], runs: int) -> Row:
    taken: list[float] = []
    for _ in range(runs):
        re.purge()
        with stopwatch(taken):
            walk(rules)
    return row(f"{what}: plain walk", taken)


def main() -> None:
    parser = arguments("How long planning takes on 75,457 modules.", runs=7)
    parser.add_argument("--stages", action="store_true", help="show each stage's time too")
    options = parser.parse_args()
    config = load_config("deepseek-v3") if CONFIGS.exists() else shipped_config()
    tree = upstream_tree(config)
    graph = as_graph(tree, config, "deepseek-v3")
    cases = {
        "60 rules, experts closed": (rules_for_gpus(closed=True), 300.0),
        "60 rules, experts open": (rules_for_gpus(closed=False), 300.0),
    }
    upstream = UPSTREAM_RULES / "DeepSeek-V3-Chat-multi-gpu-4.yaml"
    if upstream.exists():
        cases["DeepSeek-V3-Chat-multi-gpu-4.yaml"] = (yaml.safe_load(upstream.read_text(encoding="utf-8")), 300.0)
    rows: list[Row] = []
    for what, (rules, target) in cases.items():
        text = yaml.safe_dump(rules, sort_keys=False)
        rows += measure(what, text, graph, options.runs, target)
        if options.stages:
            rows += measure_stages(what, text, graph, options.runs)
        rows.append(measure_walk(what, rules, lambda r: resolve(r, tree), min(options.runs, 3)))
    show(f"planning {len(graph):,} modules", rows, options.json, {"rules": {k: len(r) for k, (r, _) in cases.items()}})


def shipped_config() -> dict[str, Any]:
    from ktopt.trees import load_tree

    return dict(load_tree("deepseek-v3").config)


if __name__ == "__main__":
    main()
