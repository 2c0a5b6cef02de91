"""Carries the oracle's decisions over from upstream's tree to today's.

A module of today's tree stands for the modules that upstream had at the same path or at its alias paths. What upstream decided for
those is what ktopt must decide for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ktopt.graph import Module
from oracle.upstream_semantics import Decision
from oracle.upstream_trees import UpstreamModule


class CannotCarryOver(Exception):
    """Upstream decided differently for modules that are one module today: no single answer exists."""


@dataclass(frozen=True)
class Expected:
    """What ktopt must decide for a module. `inside` is the module above it whose rule has `recursive: False`, if there is one: then
    no rule reaches it."""

    operator: str
    kwargs: Mapping[str, Any]
    generate_device: str
    prefill_device: str
    replicas: tuple[str, ...] = ()
    inside: str = ""


class CarryOver:
    """Upstream's tree and its decisions, asked for modules of today's tree."""

    def __init__(self, tree: Sequence[UpstreamModule], decisions: Mapping[str, Decision]) -> None:
        self.modules = {module.path: module for module in tree}
        self.decisions = decisions

    def counterparts(self, module: Module) -> list[str]:
        """Paths in upstream's tree that `module` stands for, its own path first."""
        return [path for path in (module.path, *module.alias_paths) if path in self.modules]

    def expect(self, module: Module) -> Expected | None:
        """None where upstream had no such module."""
        paths = self.counterparts(module)
        if not paths:
            return None
        entries = {path: self.decisions[path] for path in paths if path in self.decisions}
        if not entries:
            return Expected("default", {}, "", "", inside=self._closing(paths[0]))
        if module.parameters and self.modules[paths[0]].is_list:
            self._check_members(paths[0], entries[paths[0]])
        own = entries.pop(module.path, None)
        return merge(module.path, own, list(entries.values()))

    def _closing(self, path: str) -> str:
        """The nearest module above `path` that the walk came to: there it turned back."""
        while path not in self.decisions:
            path = path.rpartition(".")[0]
        return path

    def _check_members(self, path: str, decision: Decision) -> None:
        """Fused experts hold what were the experts' own parameters, which must have gone where the list went."""
        place = (decision.generate_device, decision.prefill_device)
        for member, entry in self.decisions.items():
            if member.startswith(path + ".") and (
                entry.operator != "default" or (entry.generate_device, entry.prefill_device) != place
            ):
                raise CannotCarryOver(f"{member} got {entry.operator} on {entry.generate_device}, {path} {decision.operator}")


def merge(path: str, own: Decision | None, aliases: Sequence[Decision]) -> Expected:
    """One decision from that for the module's own path, where upstream had it, and those for its alias paths. Aliases that a rule
    took decide, unless a rule above theirs took the own path; without any, the own path does."""
    taken = [entry for entry in aliases if entry.rule is not None]
    first_rule = min((entry.rule for entry in taken if entry.rule is not None), default=None)
    if own is not None and (first_rule is None or (own.rule is not None and own.rule < first_rule)):
        taken = [own]
    voters = taken or list(aliases[:1])
    first = voters[0]
    for entry in voters:
        if (entry.operator, without_devices(entry.kwargs)) != (first.operator, without_devices(first.kwargs)):
            raise CannotCarryOver(f"{path}: {first.operator} and {entry.operator} for its counterparts")
    homes = dict.fromkeys(entry.generate_device for entry in voters)
    replicas = tuple(device for device in homes if device != first.generate_device)
    return Expected(first.operator, first.kwargs, first.generate_device, first.prefill_device, replicas)


def without_devices(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if not key.endswith("device")}
