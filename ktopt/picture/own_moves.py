"""What operators move between devices themselves, without a transfer of the plan: experts bring results to their `out_device`, and
those of a layer that is split over devices (hot experts) take hidden states to both sides, in float32."""

from __future__ import annotations

from collections.abc import Iterator

from ktopt.picture.transfer_sizes import Moved
from ktopt.plan import Plan, Step, Transfer

FLOAT32_BYTES = 4


def own_moves(plan: Plan, hidden: int | None, item_bytes: int) -> Iterator[tuple[Transfer, Moved]]:
    """Each with what it moves for a token. `hidden` is the width of hidden states, None where it isn't known; the plan's numbers
    have `item_bytes`."""
    entered = {t.path for t in plan.transfers if t.side == "input"}
    left = {t.path for t in plan.transfers if t.side == "output"}
    for step in plan.steps:
        if step.role != "experts":
            continue
        each = FLOAT32_BYTES if step.elsewhere else item_bytes
        moved = Moved(None if hidden is None else hidden * each, "not known" if hidden is None else "hidden states")
        for device in step.elsewhere:
            yield Transfer(step.path, "input", step.generate_device, device, step.path), moved
        target = _brought_to(step)
        for device in (step.generate_device, *step.elsewhere):
            if device != target and (step.elsewhere or (step.path in entered and step.path not in left)):
                yield Transfer(step.path, "output", device, target, step.path), moved


def _brought_to(step: Step) -> str:
    """Where the result of experts is: on their `out_device`, or where their input was brought."""
    wanted = step.kwargs.get("out_device")
    return wanted if isinstance(wanted, str) else step.generate_device
