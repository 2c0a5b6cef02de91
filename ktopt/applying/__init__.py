"""The last stage: a plan and weights become a running transformers model. It is a transaction.

    prepare   (checks.py) the plan is compared with the model's tree, every operator's implementation resolved, every tensor looked
              up; nothing is touched, and a plan that can't be carried out is refused here
    swap      (swap.py, hooks.py) operators take their modules' places, without weights, and transfers become hooks; undone if
              anything fails
    load      (load.py) tensors go from their file to their operator, one at a time. Once the first is placed there is no way
              back: only reading and memory can still fail, and then the model refuses to run

dry_run.py carries out a plan on fake tensors of its real devices, to prove that no transfer is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ktopt.applying.checks import Prepared, check_devices, check_errors, prepare
from ktopt.applying.finish import finish, load_generation_config, make_unusable
from ktopt.applying.hooks import install_transfers
from ktopt.applying.load import Loader, ProgressEvent, TensorFeed
from ktopt.applying.swap import Swap
from ktopt.diagnostics import KtoptError, UsageError
from ktopt.plan import Plan

__all__ = ["Application", "ProgressEvent", "apply_plan"]

Progress = Callable[[ProgressEvent], None]


def apply_plan(
    plan: Plan,
    model: nn.Module | None = None,
    weights: Any = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Any:
    """Carry out a plan.

    plan      from `ktopt.compile` or `ktopt.plan_json.load_plan`
    model     a model in hand, which is changed and returned; None builds one from the plan's config
    weights   a path or an open WeightSource; None takes the values from the model in hand
    force     go on although the plan holds errors
    progress  called after every tensor

    Returns the model in eval mode, with the plan as `model.ktopt_plan`. KtoptError says what stands in the way; until the first
    tensor is placed the model is then as it was.
    """
    check_errors(plan, force)
    check_devices(plan)
    if model is None and weights is None:
        raise UsageError("apply needs weights (a GGUF file, or a folder of safetensors), or a model that has its own")
    root = build_model(plan) if model is None else model
    with open_tensors(plan, root, weights) as tensors:
        application = Application(prepare(plan, root, tensors), tensors)
        application.swap()
        made = application.load(progress)
    if model is None:
        for place in (weights, plan.model.source):
            if isinstance(place, (str, os.PathLike)) and load_generation_config(made, Path(place)):
                break
    return made


def build_model(plan: Plan) -> Any:
    """The plan's model on the meta device: the right classes, no weights."""
    from ktopt.trees import build_meta_model

    return build_meta_model({**plan.model.config, "dtype": plan.dtype}, plan.model.source)


@contextmanager
def open_tensors(plan: Plan, root: nn.Module, weights: Any) -> Iterator[Any]:
    """The weights as a source; a file that this opened is closed at the end."""
    if weights is None:
        from ktopt.weights.module import ModuleTensors

        yield ModuleTensors(root)
    elif isinstance(weights, (str, os.PathLike)):
        from ktopt.weights.open import open_weights

        source = open_weights(Path(weights), plan.model.config)
        try:
            yield source
        finally:
            source.close()
    else:
        yield weights


@dataclass
class Application:
    """A prepared plan being carried out on its model."""

    prepared: Prepared
    tensors: Any

    def __post_init__(self) -> None:
        self._swap = Swap(self.prepared)
        self._hooks: list[Any] = []

    def swap(self) -> Any:
        """Put the operators in and install the transfers; on failure everything is back as it was. Returns the root."""
        try:
            self._swap.run()
            self._hooks = install_transfers(self._swap.root, self.prepared.plan)
        except BaseException:
            self.undo()
            raise
        return self._swap.root

    def undo(self) -> None:
        """Take the hooks and the operators out again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._swap.undo()

    def load(self, progress: Progress | None = None) -> Any:
        """Place every tensor, then finish the model and return it."""
        root = self._swap.root
        feed = TensorFeed(self.prepared, self.tensors, progress, self._swap.forget)
        try:
            Loader(self.prepared, feed, root, self._swap.replaced).run()
        except BaseException as error:
            if feed.placed:
                make_unusable(root, feed.current)
            else:
                self.undo()
            if isinstance(error, Exception):
                raise KtoptError(_failure(feed, error)) from error
            raise
        return finish(root, self.prepared.plan)


def _failure(feed: TensorFeed, error: Exception) -> str:
    state = "the model is incomplete and can't be used" if feed.placed else "the model is as it was"
    reason = str(error) or type(error).__name__
    return f"{feed.where()}: loading {feed.current or 'the weights'} failed: {reason}; {state}"
