"""`Config`: a config.yaml as KTransformers' users read theirs, found where they keep it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ktopt import config as settings
from ktopt.config import SECTIONS
from ktopt.config_file import is_config, read_config
from ktopt.diagnostics import Report, UsageError
from ktopt.operator import nearest, option_names
from ktopt.parse import parse, read_source

PLACES = ("ktopt.yaml", "~/.ktransformers/config.yaml")
"""Where a config is looked for, the first first."""


class Config(settings.Config):
    """The config in a file: `path`, or else ktopt.yaml in the working folder, or else ~/.ktransformers/config.yaml.

    `config.model`, `config.long_context` and `config.kvc2` are the sections, whose keys are attributes and items of theirs; a key
    of `long_context` is an attribute of the config too. Lengths are in whole blocks, which the log says where that is more than
    was written. CompileError, whose report has every finding, where the file can't be used; UsageError where there is none.
    """

    path: str

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        place = find_config() if path is None else Path(path)
        if place is None:
            raise UsageError(f"there is no config: write {' or '.join(PLACES)}, or say Config(path)")
        read = read_config(place)
        for name in ("model", "long_context", "kvc2", "given"):
            object.__setattr__(self, name, getattr(read, name))
        object.__setattr__(self, "found", path is None)
        object.__setattr__(self, "path", str(place))

    def __getattr__(self, name: str) -> Any:
        known = option_names(settings.LongContextSettings)
        if name in known and "long_context" in self.__dict__:
            return getattr(self.long_context, known[name])
        near = nearest(name, [*SECTIONS, *known])
        raise AttributeError(f"a config has no {name!r}" + (f"; did you mean {near!r}?" if near else ""))


def find_config() -> Path | None:
    """The first file at one of PLACES that is a config, or None."""
    for place in PLACES:
        path = Path(os.path.expanduser(place))  # without a home ~ stays as it is, and isn't there
        if path.is_file() and is_config(parse(read_source(path), Report())):
            return path
    return None


def found_config() -> Config | None:
    """The config that lies where configs are looked for, or None."""
    return Config() if find_config() is not None else None
