"""The argument parser of every command: an option that there isn't is refused with the nearest that there is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from ktopt.operator import nearest


class Parser(argparse.ArgumentParser):
    """argparse's, with such a hint."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        return parsed

    def _hint(self, unknown: Sequence[str]) -> str:
        shown = [name for action in self._actions if action.help != argparse.SUPPRESS for name in action.option_strings]
        for word in unknown:
            name = word.split("=")[0]
            if name.startswith("--") and (near := nearest(name, shown)):
                return f"; did you mean {near} instead of {name}?"
        return ""
