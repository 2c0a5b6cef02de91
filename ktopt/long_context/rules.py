"""Rules for a model that comes without any: on one device, by the operators that ktopt has for each part."""

from __future__ import annotations

from typing import Any

from ktopt.compiler import run_stages
from ktopt.diagnostics import KtoptError, Severity
from ktopt.graph import ModuleGraph
from ktopt.placement import canonical_device, device_kind
from ktopt.plan_options import LONG_CONTEXT
from ktopt.source import SourceFile
from ktopt.trees import load_tree

NAME = "(rules of mode long_context)"
LAYERS = "  - {id: layers, match: '@**.layers.*', replace: KDecoderLayer}\n"


def rules_for(model: Any, device: str) -> SourceFile:
    """A native rule file that puts a model on a device: on a CPU its linears, experts and embedding by the kernels, and its decoder
    layers as one operator each, where they can be."""
    graph = model if isinstance(model, ModuleGraph) else load_tree(model)
    texts = [_text(graph, device, layers) for layers in (LAYERS, "")]
    return next((text for text in map(_source, texts) if _fits(text, graph)), _source(texts[-1]))


def _source(text: str) -> SourceFile:
    return SourceFile(NAME, text)


def _text(graph: ModuleGraph, device: str, layers: str) -> str:
    on_cpu, roles = device_kind(device) == "cpu", {module.role for module in graph.modules}
    lines = ["version: 1"] + ["dtype: float32"] * on_cpu
    lines += ["place:", f"  '{canonical_device(device)}': '@**'", "rules:"]
    if "experts" in roles:
        lines.append(_rule("experts", "name=experts", "KTransformersExperts", "KExpertsCPU" if on_cpu else ""))
    lines.append(_rule("linears", "class=Linear", "KTransformersLinear", "KLinearCPUInfer" if on_cpu else ""))
    if on_cpu:
        lines.append(_rule("embedding", "class=Embedding", "KEmbedding", "KEmbeddingCPU"))
    return "\n".join(lines) + "\n" + layers * on_cpu


def _rule(name: str, match: str, operator: str, op: str) -> str:
    kwargs = f", kwargs: {{generate_op: {op}}}" if op else ""
    return f"  - {{id: {name}, match: '{match}', replace: {operator}{kwargs}}}"


def _fits(rules: SourceFile, graph: ModuleGraph) -> bool:
    """Whether the rules have no error on the model, attention in blocks included."""
    try:
        report = run_stages(rules, graph, mode=LONG_CONTEXT).report
    except KtoptError:
        return False
    return not any(finding.severity is Severity.ERROR for finding in report)
