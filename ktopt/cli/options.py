"""Options that several commands share, and the arguments of the compiler that they stand for."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ktopt.arguments import remap_given
from ktopt.diagnostics import UsageError
from ktopt.parse import read_source
from ktopt.placement import DTYPES
from ktopt.plan_options import MODES
from ktopt.source import SourceFile

MAY_BE_EMPTY = ("prompt", "system", "schema")


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """UsageError for an argument that no command can mean: an empty one, one that isn't text, weights that aren't there."""
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        name = max(action.option_strings, key=len, default=action.metavar or action.dest)
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            if not text and action.dest not in MAY_BE_EMPTY:
                raise UsageError(f"{name} is empty")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UsageError(f"{name} isn't UTF-8 text: {text!a:.80}") from None
    if not getattr(args, "asks_for_weights_itself", False):
        weights_exist(args)


def weights_exist(args: argparse.Namespace) -> None:
    """UsageError for --weights that aren't there."""
    weights = getattr(args, "weights", None)
    if weights is not None and not os.path.exists(weights):
        raise UsageError(f"--weights {weights}: no such file or folder")


def add_model(parser: argparse.ArgumentParser, *, weights: bool = True, several: bool = False) -> None:
    """--model, and --weights, which is the model where it is a GGUF file or a model folder and no --model is given. `several` makes
    --model repeatable, and args.model a list."""
    parser.add_argument(
        "--model",
        "-m",
        metavar="M",
        action="append" if several else "store",
        help="a shipped name (ktopt inspect lists them), a model folder, a config.json or a GGUF file" + "; repeatable" * several,
    )
    if weights:
        parser.add_argument(
            "--weights", "-w", metavar="W", help="GGUF file or folder, or safetensors folder; is the model too if none"
        )


def add_threads(parser: argparse.ArgumentParser) -> None:
    """The threads that a command computes with."""
    group = parser.add_argument_group("threads")
    group.add_argument("--threads", "-t", metavar="N", help="threads that compute on the CPU (default: torch's own number)")
    group.add_argument("--affinity", metavar="CORES", help="cores that they may run on, such as 0-3,6 (default: any)")


def add_storage(parser: argparse.ArgumentParser) -> None:
    """--storage, for plans that are made before there are weights."""
    parser.add_argument(
        "--storage",
        metavar="KIND",
        help="count weights as a usual GGUF file of this kind has them (Q4_K_M, Q5_K_M, Q6_K, Q8_0) where no --weights are given",
    )


def add_force(parser: argparse.ArgumentParser) -> None:
    """--force of commands that only read a plan."""
    parser.add_argument("--force", action="store_true", help="take a plan.json although other versions made it")


def add_target(parser: argparse.ArgumentParser) -> None:
    """The machine and how the plan is laid on it."""
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--hardware",
        metavar="H",
        help="machine to plan for: here, a preset (cpu, 1x24GB, 8x80GB+512GB), or a file (ktopt explain hardware says of what)",
    )
    group.add_argument(
        "--device", metavar="D", help="where modules go that nothing places (default: cuda:0 for list files, else cpu)"
    )
    group.add_argument("--dtype", choices=DTYPES, help="what weights are held in (default: the model's)")
    group.add_argument(
        "--chunk_size",
        "--chunk-size",
        dest="chunk_size",
        type=int,
        metavar="N",
        help="tokens of a prompt that pass the model and its attention at a time (default: what the rules say)",
    )
    group.add_argument(
        "--popularity",
        metavar="FILE",
        help="how often experts are chosen (ktopt profile --experts): where ktopt chooses places, layers are split by it",
    )
    group.add_argument(
        "--remap", metavar="FROM=TO", action="append", default=[], help="put TO in FROM's place, such as cuda=cpu; repeatable"
    )


def add_context(parser: argparse.ArgumentParser) -> None:
    """--context and --batch: what a plan is to have room for."""
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of a context: what they take on each device, and with --hardware whether it fits",
    )
    parser.add_argument("--batch", type=int, metavar="B", help="sequences of so many tokens that are computed at once (default: 1)")


def add_mode(parser: argparse.ArgumentParser) -> None:
    """--mode, and --config, the long-context config."""
    parser.add_argument(
        "--mode",
        choices=MODES,
        default=MODES[0],
        help="long_context: attention keeps its cache in blocks, where rules leave it alone",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a long-context config.yaml, whose sections go before those of the rule file"
    )


def rules_argument(text: str, stdin_name: str | None = None) -> str | SourceFile:
    """The rule file that a command line names: a path, "-" for standard input, or a shipped set such as smollm2/cpu."""
    if text == "-":
        source = read_source("-")
        return replace(source, path=stdin_name) if stdin_name else source
    if Path(text).exists():
        return text
    from ktopt.choosing.sets import named, names_beside

    found, beside = named(text), names_beside(text)
    if found is None and beside:
        raise UsageError(f"{text}: no such file, and no rule set that ships is called so; there are {', '.join(beside)}")
    return str(found) if found is not None else text


def rule_files(name: str) -> list[str]:
    """The rule files of a folder, in order; anything else is itself."""
    folder = Path(name)
    if not folder.is_dir():
        return [name]
    found = sorted(str(path) for suffix in ("yaml", "yml") for path in folder.rglob(f"*.{suffix}"))
    if not found:
        raise UsageError(f"{name}: no .yaml files in this folder")
    return found


def model_argument(args: argparse.Namespace, *, required: bool = True) -> str | None:
    """--model, or else --weights where that tells the model. UsageError where one is needed and there is none."""
    weights: str | None = getattr(args, "weights", None)
    model: str | None = args.model
    if model is None and weights is not None and _tells_model(Path(weights)):
        return weights
    if model is None and required:
        raise UsageError(
            "which model? Give --model: a shipped name such as deepseek-v3, a model folder, a config.json or a GGUF file"
        )
    return model


def _tells_model(weights: Path) -> bool:
    return weights.suffix == ".gguf" or (weights / "config.json").is_file() or any(weights.glob("*.gguf"))


def weights_argument(args: argparse.Namespace) -> str:
    """--weights, or --model where that is a GGUF file or a folder with weights. UsageError where there are none."""
    weights: str | None = args.weights
    if weights is None and args.model is not None and _holds_weights(Path(args.model)):
        weights = args.model
    if weights is None:
        raise UsageError("where are the weights? Give --weights: a GGUF file, or a folder of GGUF or safetensors files")
    return weights


def _holds_weights(model: Path) -> bool:
    return model.suffix == ".gguf" or any(model.glob("*.safetensors")) or any(model.glob("*.gguf"))


def compile_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword arguments of compiler.run_stages."""
    hardware = None
    if args.hardware:
        from ktopt.hardware import load_hardware

        hardware = load_hardware(args.hardware)
    return {
        "hardware": hardware,
        "device": args.device,
        "dtype": args.dtype,
        "remap": remap_argument(args.remap),
        "chunk_size": args.chunk_size,
        "config": getattr(args, "config", None),
        "mode": getattr(args, "mode", None),
        "storage": getattr(args, "storage", None),
        "popularity": getattr(args, "popularity", None),
    }


def stage_options(args: argparse.Namespace) -> dict[str, Any]:
    """compile_options, with the weights, whose headers are read where selectors ask how they are stored."""
    return {**compile_options(args), "weights": args.weights, "room": getattr(args, "room", None)}


def context_options(args: argparse.Namespace) -> dict[str, Any]:
    """What --context and --batch ask of the compiler. UsageError for --batch alone."""
    if args.batch is not None and args.context is None:
        raise UsageError("--batch: of how many tokens? Give --context too")
    return {"context": args.context, "batch": args.batch}


def remap_argument(pairs: list[str]) -> dict[str, str]:
    """{"cuda": "cpu"} of ["cuda=cpu"]; commas may separate several. UsageError for what isn't FROM=TO."""
    return remap_given(",".join(pairs)) if pairs else {}


def write_text(path: str, text: str) -> None:
    """Write a result file, or to standard output for "-". UsageError where it can't be written."""
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: can't be written: {error.strerror or error}") from None
