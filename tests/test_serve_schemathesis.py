"""Requests that schemathesis makes of the server's own OpenAPI description, valid and not: each gets an answer that the description
has, by status, content type and schema, and none is the server's failure."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis isn't installed: pip install 'ktopt[dev]'")
uvicorn = pytest.importorskip("uvicorn", reason="the server isn't installed: pip install 'ktopt[serve]'")

from fake_engine import FakeEngine  # noqa: E402
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance  # noqa: E402

from ktopt.server.app import create_app  # noqa: E402
from ktopt.server.settings import Served, Settings  # noqa: E402

KEY = {"Authorization": "Bearer sk-test"}
VALID, BROKEN = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
OPERATIONS = {
    ("POST", "/v1/chat/completions"): {VALID: 30, BROKEN: 30},
    ("POST", "/v1/completions"): {VALID: 30, BROKEN: 30},
    ("GET", "/v1/models"): {VALID: 1},
    ("GET", "/v1/models/{name}"): {VALID: 10},
    ("GET", "/health"): {VALID: 1},
    ("GET", "/metrics"): {VALID: 1},
    ("GET", "/api/status"): {VALID: 1},
    ("GET", "/api/plan"): {VALID: 1},
}
"""How many requests of each sort; what takes nothing can't be given anything wrong."""
NOT_IN_A_SCHEMA = [positive_data_acceptance, negative_data_rejection]
"""Checks left out: ranges of tokens, and what goes together, are in no schema, so a request that is valid by the description may be
refused; and 1.0 is an integer to JSON Schema."""


@pytest.fixture(scope="module")
def described() -> Iterator[Any]:
    """The description, of a server that runs."""
    app = create_app(FakeEngine("Hello"), Settings(api_key="sk-test", any_model=True), Served(names=("smollm2-135m",)))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield schemathesis.openapi.from_url(f"http://127.0.0.1:{listening.getsockname()[1]}/openapi.json", headers=KEY)
        server.should_exit = True
        thread.join(10)


def test_all_operations_are_tried(described: Any) -> None:
    found = {(each.ok().method.upper(), each.ok().path) for each in described.get_all_operations()}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "mode", "count"),
    [(*where, mode, count) for where, modes in OPERATIONS.items() for mode, count in modes.items()],
)
def test_every_answer_is_as_the_description_says(described: Any, method: str, path: str, mode: Any, count: int) -> None:
    statuses = set()

    @settings(
        max_examples=count, derandomize=True, deadline=None, database=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def every(case: Any) -> None:
        statuses.add(case.call_and_validate(headers=KEY, excluded_checks=NOT_IN_A_SCHEMA).status_code)

    every()
    assert statuses & ({200, 404} if mode == VALID else {400})
