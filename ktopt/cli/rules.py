"""`ktopt rules`: the rule sets that ship, what each needs, and which suit a model and a machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktopt.choosing.sets import named, shipped_rules
from ktopt.cli.options import add_model, add_storage, model_argument
from ktopt.cli.rules_table import next_steps, overview, verdicts
from ktopt.cli.terminal import columns, style_of
from ktopt.diagnostics import UsageError
from ktopt.operator import nearest


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--hardware",
        metavar="H",
        help="the machine: here, a preset (1x24GB+128GB), or a file (default: here, or without a model that of each set)",
    )
    parser.add_argument("--context", type=int, metavar="N", help="tokens of context that memory is reckoned for (default: 8192)")
    add_storage(parser)
    parser.add_argument("--show", metavar="SET", help="print a set's text, such as that of smollm2/cpu, to be changed")
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(args: argparse.Namespace) -> int:
    if args.show is not None:
        sys.stdout.write(_named(args.show).read_text(encoding="utf-8"))
        return 0
    if args.context is not None and args.context < 1:
        raise UsageError(f"--context: a number of tokens from 1 on, not {args.context}")
    from ktopt.choosing.fits import DEFAULT_CONTEXT, DEFAULT_STORAGE, Asked, fits_of
    from ktopt.hardware import load_hardware
    from ktopt.trees import load_tree

    model = model_argument(args, required=False)
    machine = args.hardware or ("here" if model is not None else None)
    hardware = load_hardware(machine) if machine else None
    asked = Asked(hardware, args.context or DEFAULT_CONTEXT, args.weights, args.storage or DEFAULT_STORAGE)
    graphs = [load_tree(name) for name in ([model] if model is not None else _known())]
    found = [(graph, fits_of(graph, asked, timed=model is not None)) for graph in graphs]
    suits = any(not fit.reason for _, fits in found for fit in fits)
    if args.format == "json":
        print(json.dumps([as_data(graph.name, fit, asked) for graph, fits in found for fit in fits], indent=2))
    elif model is None or machine is None:
        print(overview(found, asked, columns(sys.stdout), style_of(sys.stdout)))
    else:
        graph, fits = found[0]
        print(verdicts(graph, fits, asked, columns(sys.stdout), style_of(sys.stdout)), end="\n\n")
        print(next_steps(model, fits, machine, asked))
    return 0 if suits else 1


def _named(name: str) -> Path:
    """A set's file. UsageError for a name that none has."""
    found = named(name)
    if found is None:
        near = nearest(name, shipped_rules())
        raise UsageError(f"no rule set is called {name!r}" + (f"; did you mean {near}?" if near else "; `ktopt rules` lists them"))
    return found


def _known() -> Sequence[str]:
    from ktopt.models.shipped import ALSO_CALLED, known_models

    return [name for name in known_models() if name not in ALSO_CALLED]


def as_data(model: str, fit: Any, asked: Any) -> dict[str, Any]:
    """A set for a model as plain values."""
    return {
        "set": fit.name,
        "file": str(fit.shipped.path),
        "summary": fit.shipped.summary,
        "model": model,
        "machine": asked.hardware.name if asked.hardware else fit.shipped.machine,
        "suits": not fit.reason,
        "reason": fit.reason,
        "context": asked.context,
        "storage": None if asked.weights else asked.storage,
        "memory": [
            {
                "device": each.device,
                "weight_bytes": each.weight_bytes,
                "cache_bytes": each.cache_bytes,
                "transient_bytes": each.transient_bytes,
                "loading_bytes": each.loading.nbytes,
                "together_bytes": each.together,
                "room_bytes": fit.room.get(each.device),
            }
            for each in fit.memory
        ],
        "longest_context": fit.longest,
        "token_us": fit.token_us,
    }
