"""Operators take the places of their modules, before any weight is loaded; until then every swap can be undone."""

from __future__ import annotations

import torch
from torch import nn

from ktopt.applying.checks import Prepared, Replacement
from ktopt.diagnostics import KtoptError, UsageError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
SHOWN = 4
"""How many parameters a message names."""


def _only_records(hook: object) -> bool:
    """Whether a forward hook is transformers' own, which keeps results for `output_attentions` and the like."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def _count(hooks: int) -> str:
    return "a hook that is" if hooks == 1 else f"{hooks} hooks that are"


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
            self._refuse_losses(replacement, original, built)
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
        except UsageError:  # no rule's fault
            raise
        except KtoptError as error:
            raise KtoptError(f"{where}: {error}") from error
        except Exception as error:
            raise KtoptError(f"{where} can't be built: {type(error).__name__}: {error}") from error
        if not isinstance(built, nn.Module):
            raise KtoptError(f"{where}: its build returned {type(built).__name__}, not a module")
        return built

    def _refuse_losses(self, replacement: Replacement, original: nn.Module, built: nn.Module) -> None:
        """KtoptError where the original holds what its operator can't take over: hooks, a forward of its own, other parameters."""
        where = f"{self._prepared.plan.blame(replacement.context.step)}: {replacement.path}: {replacement.context.step.operator}"
        kept = {id(module) for module in built.modules()}
        for name, module in original.named_modules():
            if id(module) in kept:
                continue
            path = f"{replacement.path}.{name}" if name else replacement.path
            if "forward" in vars(module):
                raise KtoptError(f"{where} would lose the forward that was set on {path} itself")
            hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
            if any(not _only_records(hook) or name for hook in hooks):
                raise KtoptError(
                    f"{where} would lose {_count(len(hooks))} registered on {path}; remove them, or add them afterwards"
                )
            for hook in hooks:
                built.register_forward_hook(hook)
        had = {name for name, _ in original.named_parameters(remove_duplicate=False)}
        has = {name for name, _ in built.named_parameters(remove_duplicate=False)}
        for names, problem in ((has - had, "lacks the parameter"), (had - has, "has what the operator doesn't take over:")):
            if names:
                kind = type(original).__name__
                raise KtoptError(f"{where} can't replace it: this {kind} {problem} {', '.join(sorted(names)[:SHOWN])}")

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
