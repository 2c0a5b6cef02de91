"""Operators take the places of their modules, before any weight is loaded; until then every swap can be undone."""

from __future__ import annotations

import torch
from torch import nn

from ktopt.applying.checks import Prepared, Replacement
from ktopt.diagnostics import KtoptError


class Swap:
    """Builds each operator from its original and puts it in, children before parents, so that a parent's operator is built from
    children that are already what the plan says. `root` is the model, or what replaced it; `replaced` are the paths swapped."""

    def __init__(self, prepared: Prepared) -> None:
        self.root = prepared.root
        self._prepared = prepared
        self.replaced: set[str] = set()
        self._done: list[tuple[nn.Module, str, nn.Module]] = []

    def run(self) -> None:
        """Swap all. KtoptError names the rule and the module that failed; the caller then undoes."""
        modules = dict(self.root.named_modules(remove_duplicate=False))
        for replacement in reversed(self._prepared.replacements):
            original = modules[replacement.path]
            built = self._build(replacement, original)
            if built is original:
                continue
            self.replaced.add(replacement.path)
            if not replacement.path:
                self.root = built
                continue
            parent_path, _, name = replacement.path.rpartition(".")
            parent = modules[parent_path]
            parent._modules[name] = built
            self._done.append((parent, name, original))

    def _build(self, replacement: Replacement, original: nn.Module) -> nn.Module:
        context = replacement.context
        where = f"{self._prepared.plan.blame(context.step)}: {replacement.path}: {context.step.operator}"
        try:
            with torch.device("meta"):
                built = replacement.implementation.build(original, context)
        except KtoptError as error:
            raise KtoptError(f"{where}: {error}") from error
        except Exception as error:
            raise KtoptError(f"{where} can't be built: {type(error).__name__}: {error}") from error
        if not isinstance(built, nn.Module):
            raise KtoptError(f"{where}: its build returned {type(built).__name__}, not a module")
        return built

    def undo(self) -> None:
        """Put every original back, last one first."""
        while self._done:
            parent, name, original = self._done.pop()
            parent._modules[name] = original
        self.root = self._prepared.root
        self.replaced.clear()

    def forget(self) -> None:
        """Let the originals go: there is no way back."""
        self._done.clear()
