"""What callers of the Python API give, brought into the one form that the stages take, or refused in words.

Devices and dtypes may be torch's objects; they are recognised without importing torch.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.diagnostics import UsageError
from ktopt.source import SourceFile

if TYPE_CHECKING:
    from ktopt.config import Config
    from ktopt.placement import Hardware
    from ktopt.popularity import Popularity

OPTIONS = (
    "weights",
    "device",
    "dtype",
    "hardware",
    "remap",
    "chunk_size",
    "config",
    "mode",
    "context",
    "storage",
    "popularity",
    "room",
    "batch",
)
"""Keyword arguments of check and compile."""


def known_options(options: Iterable[str], known: Iterable[str] = OPTIONS) -> None:
    """UsageError for a keyword argument that there isn't."""
    from ktopt.operator import nearest

    for name in options:
        if name not in known:
            near = nearest(name, known)
            raise UsageError(
                f"there is no option {name!r}" + (f"; did you mean {near}?" if near else f"; options are {', '.join(known)}")
            )


def rules_given(rules: Any) -> str | Path | SourceFile:
    """A rule file: a path, or a text with its name. Rules as Python values are refused, since findings have places in a text."""
    if isinstance(rules, SourceFile):
        return rules
    path = _path(rules)
    if path is None:
        message = f"rules are the path of a rule file, or a ktopt.source.SourceFile(name, text), not {_what(rules)}"
        as_text = "; write them as YAML: SourceFile('rules', yaml.safe_dump(rules))"
        raise UsageError(message + as_text * isinstance(rules, list | dict))
    if not path:
        raise UsageError("which rule file? Its path is empty")
    return path if isinstance(rules, str) else Path(path)


def weights_given(weights: Any) -> Any:
    """None, a path, or an open WeightSource."""
    path = _path(weights)
    if path == "":
        raise UsageError("which weights? Their path is empty")
    if weights is None or path is not None or (hasattr(weights, "stored") and not isinstance(weights, type)):
        return weights
    raise UsageError(f"weights are a path, or an open ktopt.weights.source.WeightSource, not {_what(weights)}")


def is_model(model: Any) -> bool:
    """Whether something can name or be a model: a name or path, a config, a module tree, a module in hand."""
    if isinstance(model, type):
        return False
    kinds = ("_modules", "to_dict", "by_path")
    return _path(model) is not None or isinstance(model, Mapping) or any(hasattr(model, name) for name in kinds)


def model_given(model: Any) -> Any:
    """What names a model, or is one; None stays None."""
    if model is None or is_model(model):
        return model
    raise UsageError(
        "a model is a shipped name, a folder, a config.json, a GGUF file, a config as a mapping or as transformers' object, or a "
        f"module in hand, not {_what(model)}"
    )


def options_given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of OPTIONS but weights, as PlanOptions takes them, without what isn't given."""
    read: dict[str, Any] = {
        "device": _device,
        "dtype": _dtype,
        "hardware": _hardware,
        "remap": remap_given,
        "chunk_size": _count,
        "config": config_given,
        "mode": str,
        "context": lambda number: _count(number, "context"),
        "storage": _storage,
        "popularity": _popularity,
        "room": lambda number: _count(number, "room"),
        "batch": lambda number: _count(number, "batch", "sequences"),
    }
    return {name: read[name](value) for name, value in options.items() if value is not None}


def _storage(kind: Any) -> str:
    from ktopt.weights.usual import check_storage

    if not isinstance(kind, str):
        raise UsageError(f"storage is the name of a kind of file, such as Q4_K_M, not {_what(kind)}")
    return check_storage(kind)


def _count(number: Any, name: str = "chunk_size", of: str = "tokens") -> int:
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    raise UsageError(f"{name} is a number of {of}, not {_what(number)}")


def _popularity(given: Any) -> Popularity:
    """A profile of experts, or the path of one."""
    from ktopt.popularity import Popularity, load_popularity

    if isinstance(given, Popularity):
        return given
    path = _path(given)
    if not path:
        raise UsageError(f"popularity is the path of a profile of experts, or a ktopt.popularity.Popularity, not {_what(given)}")
    return load_popularity(path)


def config_given(config: Any) -> Config:
    """A long-context config, or the path of one. CompileError, whose report has the findings, for a file that can't be one."""
    from ktopt.config import Config

    if isinstance(config, Config):
        return config
    path = _path(config)
    if not path:
        raise UsageError(f"config is the path of a config.yaml, or a ktopt.config.Config, not {_what(config)}")
    from ktopt.config_file import read_config

    return read_config(path)


def remap_given(remap: Any) -> dict[str, str]:
    """{"cuda": "cpu"} of such a mapping, or of "cuda=cpu", where commas separate several."""
    if isinstance(remap, str):
        return dict(_pair(part) for part in remap.split(","))
    if isinstance(remap, Mapping):
        return {_device(source): _device(target) for source, target in remap.items()}
    raise UsageError(f'remap is a mapping such as {{"cuda": "cpu"}}, not {_what(remap)}')


def _pair(text: str) -> tuple[str, str]:
    source, equals, target = (part.strip() for part in text.partition("="))
    if not (source and equals and target):
        raise UsageError(f"--remap {text}: write FROM=TO, such as cuda=cpu or cuda:1=cuda:0")
    return source, target


def _device(device: Any) -> str:
    if isinstance(device, str):
        return device
    if _is_torchs(device, "device"):
        return str(device)
    raise UsageError(f'a device is a name such as "cpu" or "cuda:1", or a torch.device, not {_what(device)}')


def _dtype(dtype: Any) -> str:
    if isinstance(dtype, str) or _is_torchs(dtype, "dtype"):
        return str(dtype).removeprefix("torch.")
    raise UsageError(f'dtype is a name such as "bfloat16", or a torch.dtype, not {_what(dtype)}')


def _hardware(hardware: Any) -> Hardware:
    from ktopt.hardware import load_hardware
    from ktopt.placement import Hardware

    if isinstance(hardware, Hardware):
        return hardware
    path = _path(hardware)
    if path is None:
        raise UsageError(
            f'hardware is "here", a preset such as "1x24GB", the path of a hardware file, or a Hardware, not {_what(hardware)}'
        )
    return load_hardware(path)


def _is_torchs(value: Any, name: str) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ == name


def _path(value: Any) -> str | None:
    """A path as text, or None for what is no path. UsageError for one that the system refuses to look at."""
    if not isinstance(value, str | os.PathLike):
        return None
    path = os.fsdecode(value)
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise UsageError(f"{path:.200}: can't be read: {error.strerror or error}") from None
    except ValueError:  # a NUL character; it is no path, but may yet be said to be an unknown name
        pass
    return path


def _what(value: Any) -> str:
    """A value in a message: None, or what it is an instance of, and how it looks where that is short."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shown = repr(value) if isinstance(value, bool | int | float | list | dict | tuple) else ""
    return shown if shown and len(shown) <= 40 else f"an object of type {type(value).__name__}"
