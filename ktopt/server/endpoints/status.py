"""What the page shows and monitors ask: /health, /metrics, /api/status, /api/plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from ktopt.plan import Plan
from ktopt.runtime.memory import resident_bytes
from ktopt.server.service import Service

MOST_STEPS = 4096
"""Rows of a plan that are given at most: those of a large mixture of experts are 75,000."""


def health(service: Service) -> Response:
    """200 while requests are taken, 503 once the server stops, or its engine has ended without being told to."""
    if service.traffic.closing:
        return JSONResponse({"status": "stopping"}, 503, {"Retry-After": "1"})
    if service.engine.status().closing:
        return JSONResponse({"status": "failed"}, 503)
    return JSONResponse({"status": "ok"})


def metrics(service: Service) -> Response:
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def status(service: Service) -> dict[str, Any]:
    """The engine's status, the model, and memory by tier: weights by device, what the engine holds, the process."""
    made = asdict(service.engine.status())
    made["memory_bytes"] = {
        **{f"weights on {device}": count for device, count in service.served.weight_bytes.items()},
        **made["memory_bytes"],
    }
    made["process_bytes"] = resident_bytes()
    made["model"] = service.served.name
    made["details"] = service.served.details
    made["closing"] = made["closing"] or service.traffic.closing
    limits = service.settings
    made["limits"] = {
        "max_new_tokens": limits.max_new_tokens,
        "max_prompt_tokens": limits.max_prompt_tokens,
        "max_streams": limits.max_streams,
        "max_body_bytes": limits.max_body_bytes,
    }
    return made


def plan(service: Service) -> dict[str, Any]:
    """The plan that the model runs by: its rules, bytes by device and by operator, and the modules that have weights or a rule, as
    many as are given (`left_out` says how many aren't)."""
    found = service.served.plan
    if found is not None:
        return {"model": service.served.name, **plan_summary(found)}
    none: dict[str, Any] = {"rule_file": None, "rules": [], "devices": {}, "operators": {}, "steps": [], "left_out": 0}
    return {"model": service.served.name, **none}


def plan_summary(found: Plan) -> dict[str, Any]:
    devices: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for step in found.steps:
        devices.update(step.held_bytes)
        operators[step.operator] += step.weight_bytes
    told = [step for step in found.steps if step.weight_bytes or step.rule is not None]
    return {
        "source": found.model.source,
        "model_type": found.model.model_type,
        "rule_file": found.rule_file,
        "dtype": found.dtype,
        "weight_bytes": found.weight_bytes,
        "rules": [{"id": rule.id, "line": rule.line, "operator": rule.operator, "active": rule.active} for rule in found.rules],
        "devices": {device: count for device, count in devices.items() if count},
        "operators": dict(operators.most_common()),
        "notes": list(found.notes),
        "steps": [
            {
                "path": step.path,
                "class": step.cls.rpartition(".")[2],
                "operator": step.operator,
                "device": step.generate_device,
                "prefill_device": step.prefill_device,
                "dtype": step.dtype,
                "stored": list(step.stored),
                "bytes": step.weight_bytes,
                "rule": None if step.rule is None else found.rules[step.rule].id,
                "runs": {asked: list(runs) for asked, runs in step.runs.items()},
            }
            for step in told[:MOST_STEPS]
        ],
        "left_out": max(0, len(told) - MOST_STEPS),
    }
