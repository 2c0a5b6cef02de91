"""What `ktopt rules` prints: the sets that ship with what each needs, or those for one model with why they suit or don't."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from textwrap import fill, indent, wrap

from ktopt.choosing.fits import Asked, Fit
from ktopt.choosing.sets import shipped_sets
from ktopt.cli.table import Column, layout
from ktopt.cli.terminal import size
from ktopt.graph import ModuleGraph
from ktopt.placement import Hardware
from ktopt.placing.speeds import settled_speeds
from ktopt.render.style import PLAIN, Style, plural, printable

WIDTH = 100
NEEDS = (Column("each card", right=True), Column("main memory", right=True), Column("context up to", right=True))


def overview(found: Iterable[tuple[ModuleGraph, Sequence[Fit]]], asked: Asked, limit: int, style: Style = PLAIN) -> str:
    """Every set of every model, with what it needs on the machine that it is for; or those that suit a machine."""
    rows = [
        [fit.name, graph.name, fit.shipped.machine, *_needs(fit)]
        for graph, fits in found
        for fit in sorted(fits, key=lambda fit: fit.shipped.cards)
        if not fit.reason
    ]
    on = f" that suit {machine_of(asked.hardware)}" if asked.hardware is not None else ""
    head = f"Rule sets{on}: memory for {asked.context:,} tokens, weights as a usual {asked.storage} file has them"
    table = layout((Column("set"), Column("model"), Column("machine"), *NEEDS), rows, limit, style)
    more = "`ktopt rules --model M` says which suit this machine, `ktopt rules --show SET` prints one."
    return "\n\n".join((_title(head, limit, style), table if rows else "none", more))


def verdicts(graph: ModuleGraph, fits: Sequence[Fit], asked: Asked, limit: int, style: Style = PLAIN) -> str:
    """The sets that suit a model on a machine, the best first, and why the others don't."""
    assert asked.hardware is not None
    weights = "" if asked.weights else f", weights as a usual {asked.storage} file has them"
    head = f"{graph.name or 'the model'} on {machine_of(asked.hardware)}: {asked.context:,} tokens{weights}"
    parts = [_title(head, limit, style)]
    rows = [[fit.name, *_needs(fit), _speed(fit)] for fit in fits if not fit.reason]
    if rows:
        parts.append(layout((Column("suits"), *NEEDS, Column("tokens/s", right=True)), rows, limit, style))
    if assumed := settled_speeds(asked.hardware)[1]:
        parts.append(f"taken for granted: {', '.join(assumed)}; ktopt profile measures it" if rows else "")
    unfit = [_wrapped(f"{fit.name}: {fit.reason}", limit) for fit in fits if fit.reason and not fit.other_size]
    if other := [fit.name for fit in fits if fit.other_size]:
        unfit.append(_wrapped(f"{', '.join(other)}: for models of other sizes", limit))
    if unfit:
        parts.append("\n".join((style.paint("doesn't suit", "bold"), *unfit)))
    if others := len(shipped_sets()) - len(fits):
        parts.append(f"{plural(others, 'other set')}: for other architectures")
    return "\n\n".join(filter(None, parts))


def next_steps(model: str, fits: Sequence[Fit], machine: str, asked: Asked) -> str:
    """Commands to go on with: to look at the best set and to run it, or to write rules where none suits."""
    model, machine = shlex.quote(model), shlex.quote(machine)
    if not fits or fits[0].reason:
        return f"none suits; ktopt init writes a first rule file:\n  ktopt init --model {model} --hardware {machine} -o rules.yaml"
    best = fits[0].name
    weights = shlex.quote(str(asked.weights)) if asked.weights else "WEIGHTS"
    stored = f"--weights {weights}" if asked.weights else f"--storage {asked.storage}"
    named = "" if weights == model else f"--model {model} "
    return (
        f"next\n  ktopt plan {best} {named}{stored} --hardware {machine} --context {asked.context}\n"
        f"  ktopt chat {best} --weights {weights}"
    )


def machine_of(hardware: Hardware) -> str:
    """A machine in words: "box (2 x RTX 4090 of 25.8 GB, 137.4 GB of main memory)"."""
    cards: dict[tuple[str, int], int] = {}
    for device in hardware.devices:
        key = device.model or device.kind, device.memory_bytes
        cards[key] = cards.get(key, 0) + 1
    has = [
        f"{count} x {name} of {size(memory)}" if count > 1 else f"{name} of {size(memory)}"
        for (name, memory), count in cards.items()
    ]
    has.append(f"{size(hardware.ram_bytes)} of main memory" if hardware.ram_bytes else "main memory not known")
    return f"{hardware.name} ({', '.join(has)})"


def _needs(fit: Fit) -> list[str]:
    card = size(fit.fullest_card) if fit.fullest_card else "-"
    return [card, size(fit.main_memory), f"{fit.longest:,}"]


def _speed(fit: Fit) -> str:
    return f"about {1e6 / fit.token_us:,.1f}" if fit.token_us else ""


def _title(text: str, limit: int, style: Style) -> str:
    lines = wrap(printable(text), limit, break_long_words=False, break_on_hyphens=False)
    return "\n".join(style.paint(line, "bold") for line in lines)


def _wrapped(text: str, limit: int) -> str:
    return indent(fill(printable(text), min(limit, WIDTH) - 2, break_long_words=False, break_on_hyphens=False), "  ")
