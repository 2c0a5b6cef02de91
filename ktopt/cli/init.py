"""`ktopt init`: a first rule file for a model on a machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ktopt.authoring.init_rules import init_rules
from ktopt.authoring.modeline import SCHEMA_FILE, modeline
from ktopt.cli.findings import print_report
from ktopt.cli.options import add_model, model_argument, write_text
from ktopt.cli.terminal import size
from ktopt.compiler import run_stages
from ktopt.diagnostics import UsageError
from ktopt.placement import Hardware
from ktopt.plan import Plan
from ktopt.plan_diff import device_bytes
from ktopt.source import SourceFile


def configure(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--hardware",
        metavar="H",
        help="machine to lay it out on: here, a preset (cpu, 1x24GB, 8x80GB+512GB), or a file that describes it (default: cpu)",
    )
    parser.add_argument("--output", "-o", metavar="FILE", default="-", help="write the rule file here (default: standard output)")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--schema", metavar="URL", default="", help=f"what its modeline names (default: a {SCHEMA_FILE} above)")


def run(args: argparse.Namespace) -> int:
    from ktopt.hardware import load_hardware
    from ktopt.trees import load_tree

    model = model_argument(args)
    if args.output != "-" and Path(args.output).exists() and not args.force:
        raise UsageError(f"{args.output} is there already; --force overwrites it")
    hardware = load_hardware(args.hardware) if args.hardware else None
    assert model is not None
    graph = load_tree(model)
    text = init_rules(graph, hardware, modeline=modeline(args.output, args.schema))
    write_text(args.output, text)
    source = SourceFile(args.output, text)
    compilation = run_stages(source, graph, hardware=hardware)
    print_report(compilation.report.sorted(), sys.stderr, {args.output: source})
    if args.output != "-":
        machine = f" --hardware {args.hardware}" if args.hardware else ""
        print(f"wrote {args.output}; see what it does: ktopt plan {args.output} --model {model}{machine}", file=sys.stderr)
    short = shortages(compilation.plan, hardware) if compilation.plan is not None and hardware is not None else []
    if short and hardware is not None:
        print(f"{graph.name or 'the model'} doesn't fit on {hardware.name}: {'; '.join(short)}", file=sys.stderr)
    return 1 if compilation.report.errors else 0


def shortages(plan: Plan, hardware: Hardware) -> list[str]:
    """In words, each memory of the machine that weights overfill, and by how much."""
    room = {"cpu": hardware.ram_bytes, **{device.name: device.memory_bytes for device in hardware.devices}}
    held = {device: count for device, count in device_bytes(plan).items() if room.get(device) and count > room[device]}
    return [
        f"{'main memory' if device == 'cpu' else device} of {size(room[device])} would have to hold {size(count)} of weights, "
        f"{size(count - room[device])} too much"
        for device, count in held.items()
    ]
