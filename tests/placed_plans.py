"""What a placement says that devices hold, beside the plan of it."""

from __future__ import annotations

import pytest

from ktopt.placing.place import Placing
from ktopt.plan import Plan
from ktopt.working_memory import working_memory

ROTARY_BYTES = 4096
"""The frequencies, which are no item of a placement."""


def assert_holds_what_was_said(placing: Placing, plan: Plan, context: int) -> None:
    """Weights and cache to the byte; and for a moment no more than a placement leaves room for on devices with layers."""
    memory = {each.device: each for each in working_memory(plan, context)}
    problem = placing.case.problem
    layers = zip(problem.items, placing.assignment.homes, strict=True)
    homes = {problem.devices[home] for item, home in layers if item.number is not None}
    for device, passing in zip(problem.devices, problem.transient_bytes, strict=True):
        found = memory.get(device)
        kept = 0 if found is None else found.weight_bytes + found.cache_bytes
        assert placing.held[device] - passing * (device in homes) == pytest.approx(kept, abs=ROTARY_BYTES)
        if device in homes:
            assert found is not None
            assert found.transient_bytes <= passing
