"""Pictures for tests: of a plan with experts in main memory, and of one whose words a stranger wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ktopt.compiler import run_stages
from ktopt.picture.picture import Picture, picture_of
from ktopt.source import SourceFile

QWEN = """\
version: 1
place:
  cpu: "@model.layers.*.mlp.experts"
  "cuda:0": "@**"
rules:
  - id: experts
    match: "@model.layers.*.mlp.experts"
    replace: KTransformersExperts
    kwargs: {generate_op: KExpertsCPU}
"""
HOT = QWEN.replace("KExpertsCPU}", 'KExpertsCPU, hot_experts: {0: "0..15", 1: "3, 17, 90..99", 2: "0..15"}}')
HOSTILE = "</script><script>parent.hit=1</script><img src=x onerror=parent.hit=1>\"'&]]>--!><\x1b[2J\\N{}|<b>"


def picture(
    rules: str | Path, model: str, *, everything: bool = False, unfold: bool = False, hardware: str | None = None
) -> Picture:
    source = SourceFile("rules.yaml", rules) if isinstance(rules, str) else rules
    compilation = run_stages(source, model, hardware=hardware)
    assert compilation.plan is not None, list(compilation.report)
    return picture_of(compilation.plan, compilation.graph, everything=everything, unfold=unfold)


def hostile_picture() -> Picture:
    """Of a plan whose names, notes and rules a stranger wrote."""
    plan = picture(QWEN, "qwen3-30b-a3b").plan
    path = f"model.{HOSTILE.replace('.', '')}"
    named = {"path": path, "notes": (HOSTILE,), "kwargs": {HOSTILE: HOSTILE}, "cls": HOSTILE, "rule": 0}
    steps = tuple(step._replace(**named) if step.path == "model.norm" else step for step in plan.steps)
    rules = tuple(replace(rule, id=HOSTILE, file=HOSTILE) for rule in plan.rules)
    words = {"rule_file": HOSTILE, "notes": (HOSTILE,), "errors": (HOSTILE,), "hardware": HOSTILE, "transfers": ()}
    return picture_of(replace(plan, steps=steps, rules=rules, model=replace(plan.model, source=HOSTILE), **words), None)
