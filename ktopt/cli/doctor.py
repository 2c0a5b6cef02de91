"""`ktopt doctor`: what this machine has that ktopt can use, from package metadata and /proc; torch is not imported.

`ktopt doctor DIR` checks a folder that `ktopt apply` wrote instead: its plan, and every byte of its weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ktopt import __version__
from ktopt.cli.terminal import size, style_of
from ktopt.diagnostics import UsageError
from ktopt.hardware import cpu_model, detect
from ktopt.placement import Hardware
from ktopt.versions import installed

NEEDED = ("torch", "transformers", "gguf", "safetensors", "numpy")
USEFUL_FEATURES = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx", "neon", "asimd", "sve")
FLASHINFER_SM = 75
BLOCKS_SM = 80


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", nargs="?", help="check this folder of ktopt apply fully, and not the machine")
    parser.add_argument("--json", action="store_true", help="as JSON, which --hardware of other commands takes as a file")


def run(args: argparse.Namespace) -> int:
    if args.folder is not None:
        if not Path(args.folder).is_dir():
            raise UsageError(f"{args.folder}: no such folder")
        return check_folder(Path(args.folder), args.json)
    facts = gather()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print(_text(facts))
    return 1 if facts["missing"] or any(p["error"] for p in facts["operator_plugins"]) else 0


def check_folder(folder: Path, as_json: bool) -> int:
    """Check a folder's plan and all bytes of its weights; KtoptError names the file that isn't what it was."""
    from ktopt.folder import verify_folder

    passed = []
    for name in verify_folder(folder):
        passed.append(name)
        if not as_json:
            print(f"ok  {name}", flush=True)
    if as_json:
        print(json.dumps({"folder": str(folder), "passed": passed}, indent=2))
    return 0


def gather() -> dict[str, Any]:
    """The facts as plain values: versions, machine, flashinfer, operator plug-ins, and the needed packages that are missing."""
    machine = detect()
    versions = {name: installed(name) or None for name in NEEDED}
    kernels, infer = cpu_kernels(), flashinfer(installed("flashinfer-python") or None, machine)
    return {
        "ktopt": __version__,
        "name": machine.name,
        "python": platform.python_version(),
        "packages": versions,
        "missing": [name for name, found in versions.items() if found is None],
        "os": platform.platform(terse=True),
        "cpu": {
            "model": cpu_model(),
            "cores": machine.cores,
            "features": [f for f in USEFUL_FEATURES if f in machine.cpu_features],
            "flags": sorted(machine.cpu_features),
        },
        "cpu_kernels": kernels,
        "ram_bytes": machine.ram_bytes,
        "gpus": [{"name": d.name, "model": d.model, "memory_bytes": d.memory_bytes, "sm": d.sm} for d in machine.devices],
        "flashinfer": infer,
        "latent_attention": latent_attention(kernels, infer, machine),
        "block_attention": block_attention(kernels, infer, machine),
        "operator_plugins": plugins(),
    }


def latent_attention(kernels: dict[str, Any], infer: dict[str, Any], machine: Hardware) -> dict[str, str]:
    """What computes DeepSeek's latent attention here, by kind of device, and where it isn't the fastest thing, why."""
    made = {"cpu": f"CPU kernels ({kernels['isa']}) in decoding and for prompts" if kernels["usable"] else "torch by tiles"}
    if machine.devices:
        made["cuda"] = "FlashInfer" if infer["usable"] else f"torch by tiles: FlashInfer is {infer['why_not']}"
    return made


def block_attention(kernels: dict[str, Any], infer: dict[str, Any], machine: Hardware) -> dict[str, str]:
    """What computes attention to the blocks of a long cache here, by kind of device, and where it isn't the fastest thing, why."""
    made = {"cpu": f"CPU kernels ({kernels['isa']})" if kernels["usable"] else "torch: the CPU kernels can't be used"}
    if machine.devices:
        why = "" if infer["usable"] else f"FlashInfer is {infer['why_not']}"
        if not why and all((d.sm or 0) < BLOCKS_SM for d in machine.devices):
            why = f"FlashInfer's kernels for it need compute capability {BLOCKS_SM / 10}"
        made["cuda"] = f"torch: {why}" if why else "FlashInfer, for keys of 64, 128 or 256 numbers; else torch"
    return made


def cpu_kernels() -> dict[str, Any]:
    """The instruction set that the CPU kernels run on here, or why they can't be used and what that costs."""
    from ktopt.kernels import cpu

    usable, why = cpu.available()
    lost = (
        f"{why}; until then KLinearCPUInfer, KExpertsCPU and KEmbeddingCPU compute by torch, slower, on larger weights, and "
        "KDecoderLayer and KDeepseekV2Attention run as transformers' layers and by torch"
    )
    return {"isa": cpu.isa() if usable else None, "usable": usable, "why_not": "" if usable else lost}


def flashinfer(installed: str | None, machine: Hardware) -> dict[str, Any]:
    """Whether FlashInfer's attention can be used, and where not, why."""
    why = ""
    if installed is None:
        why = 'not installed; pip install "ktopt[cuda]"'
    elif not machine.devices:
        why = "no NVIDIA GPU found (nvidia-smi lists none)"
    elif all((d.sm or 0) < FLASHINFER_SM for d in machine.devices):
        why = f"no GPU of compute capability {FLASHINFER_SM / 10} or later"
    return {"version": installed, "usable": not why, "why_not": why}


def plugins() -> list[dict[str, str]]:
    """Operator plug-ins of other packages (entry-point group ktopt.operators), each with the error of importing it, or ""."""
    found = []
    for entry in entry_points(group="ktopt.operators"):
        if entry.value.startswith("ktopt."):
            continue
        error = ""
        try:
            entry.load()
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        found.append({"name": entry.name, "module": entry.value, "error": error})
    return found


def _text(facts: dict[str, Any]) -> str:
    style = style_of(sys.stdout)

    def row(name: str, value: str, fine: bool | None = None) -> str:
        mark = {True: style.paint("ok", "green"), False: style.paint("no", "red"), None: "  "}[fine]
        return f"{mark}  {name:<13} {value}"

    cpu = facts["cpu"]
    lines = [row("ktopt", facts["ktopt"]), row("python", f"{facts['python']} ({facts['os']})")]
    lines += [row(name, found or f"missing: pip install {name}", found is not None) for name, found in facts["packages"].items()]
    lines.append(
        row("cpu", f"{cpu['model'] or 'unknown'}, {cpu['cores']} cores; {' '.join(cpu['features']) or 'no known features'}")
    )
    kernels = facts["cpu_kernels"]
    lines.append(row("cpu kernels", kernels["isa"] if kernels["usable"] else kernels["why_not"], kernels["usable"]))
    lines.append(row("ram", size(facts["ram_bytes"]) if facts["ram_bytes"] else "unknown"))
    for gpu in facts["gpus"]:
        sm = f", compute capability {gpu['sm'] / 10}" if gpu["sm"] else ""
        lines.append(row(gpu["name"], f"{gpu['model']}, {size(gpu['memory_bytes'])}{sm}", True))
    if not facts["gpus"]:
        lines.append(row("gpu", "none found; rule files for GPUs run here with --remap cuda=cpu"))
    infer = facts["flashinfer"]
    lines.append(
        row("flashinfer", infer["version"] if infer["usable"] else f"not usable: {infer['why_not']}", infer["usable"] or None)
    )
    for name, key in (("latent attn", "latent_attention"), ("block attn", "block_attention")):
        lines.append(row(name, "; ".join(f"{kind}: {what}" for kind, what in facts[key].items())))
    for plugin in facts["operator_plugins"]:
        lines.append(row("plug-in", f"{plugin['name']} ({plugin['module']}) {plugin['error']}".rstrip(), not plugin["error"]))
    return "\n".join(lines)
