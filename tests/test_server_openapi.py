"""The OpenAPI description, and answers held against it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")

from server_fixtures import Running, running

from ktopt.plan import Plan
from ktopt.server.protocol import responses
from ktopt.server.settings import Served

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
QWEN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    from fake_engine import FakeEngine

    with running(FakeEngine(CALL, template=QWEN)) as made:
        yield made


@pytest.fixture(scope="module")
def described(server: Running) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


def references(value: Any) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key == "$ref":
            yield inner
        elif isinstance(inner, dict | list):
            yield from references(inner)


def test_every_reference_leads_somewhere(described: dict[str, Any]) -> None:
    found = set(references(described))
    assert "#/components/schemas/ChatRequest" in found
    for reference in found:
        place = described
        for name in reference.removeprefix("#/").split("/"):
            place = place[name]


def test_requests_are_described_as_they_are_taken(described: dict[str, Any]) -> None:
    import jsonschema

    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    assert body["required"]
    schema = {**body["content"]["application/json"]["schema"], "components": described["components"]}
    good = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "temperature": 1, "stop": ["a"]}
    jsonschema.validate(good, schema)
    for wrong in ({}, {**good, "foo": 1}, {**good, "temperature": 3}, {"messages": [{"role": "cat", "content": "x"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_answers_are_as_described(server: Running) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in ({}, {"logprobs": True, "top_logprobs": 1, "n": 2}, {"tools": tools}):
        responses.ChatCompletion.model_validate(server.post(**given).json(), strict=True)
    for given in ({}, {"logprobs": 1, "n": 2, "echo": False}, {"prompt": ["a", "b"], "echo": True}):
        made = server.http.post("/v1/completions", json={"prompt": "x", **given})
        responses.Completion.model_validate(made.json(), strict=True)
    for path, kind in (
        ("/v1/models", responses.Models), ("/v1/models/fake", responses.Model), ("/health", responses.Health),
        ("/api/status", responses.Status), ("/api/plan", responses.PlanSummary),
    ):  # fmt: skip
        kind.model_validate(server.http.get(path).json(), strict=True)
    responses.ErrorResponse.model_validate(server.post(foo=1).json(), strict=True)


def test_a_plan_is_given_with_its_rules_and_bytes() -> None:
    import ktopt

    plan: Plan = ktopt.compile("rules/smollm2/cpu.yaml", "smollm2-135m")
    with running(served=Served(names=("m",), plan=plan, weight_bytes={"cpu": plan.weight_bytes})) as server:
        found = server.http.get("/api/plan").json()
        assert found["weight_bytes"] == plan.weight_bytes == sum(found["devices"].values())
        assert sum(step["bytes"] for step in found["steps"]) == plan.weight_bytes
        assert {rule["id"] for rule in found["rules"]} == {rule.id for rule in plan.rules}
        assert found["left_out"] == 0
        assert server.http.get("/api/status").json()["memory_bytes"]["weights on cpu"] == plan.weight_bytes


def test_health_can_be_asked_for_its_head(server: Running) -> None:
    assert server.http.head("/health").status_code == 200
    assert server.http.request("POST", "/health").status_code == 405
