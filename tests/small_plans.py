"""A plan for a big model cut down to a few tiny layers of its kind, which a dry run can carry out."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from gguf_fixtures import tiny_model

from ktopt import registry
from ktopt.operator import build_config
from ktopt.plan import Plan
from ktopt.transfers import derive_transfers
from ktopt.trees import graph_from_module

LAYER = re.compile(r"^model\.layers\.(\d+)")


def cut_down(plan: Plan, kind: str, changes: dict[str, Any]) -> Plan:
    """The plan with its layers cut down to the first and one for each way that a layer is placed, on a tiny model of that kind."""
    layers = kept_layers(plan)
    if every := plan.model.config.get("full_attention_interval"):
        types = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in layers]
        changes = {**changes, "layer_types": types}
    with torch.device("meta"):
        model = tiny_model(kind, num_hidden_layers=len(layers), **changes)
    graph = graph_from_module(model)
    steps = []
    for module in graph.modules:
        step = plan.by_path[LAYER.sub(lambda found: f"model.layers.{layers[int(found[1])]}", module.path)]
        inside = LAYER.sub(lambda found: f"model.layers.{layers.index(int(found[1]))}", step.inside)
        owner = plan.by_path[step.inside] if step.inside else step
        spec = registry.find(owner.operator)
        assert spec is not None
        config = build_config(spec, owner.kwargs)[0]
        assert config is not None
        size = spec.footprint(module, config, step.dtype).weight_bytes if module.tensors else 0
        steps.append(step._replace(path=module.path, inside=inside, weight_bytes=size, stored=()))
    ref = replace(plan.model, tree=graph.digest, config=model.config.to_dict(), config_digest="")
    return replace(plan, model=ref, steps=tuple(steps), transfers=derive_transfers(graph, steps))


def kept_layers(plan: Plan) -> list[int]:
    placed: dict[int, list[str]] = {}
    for step in plan.steps:
        found = LAYER.match(step.path)
        if found and not step.path.endswith("gate"):
            placed.setdefault(int(found[1]), []).append(f"{step.path[found.end() :]} {step.generate_device}")
    ways = {tuple(places): layer for layer, places in reversed(placed.items()) if layer > 3}
    return sorted({0, *ways.values(), max(placed)})
