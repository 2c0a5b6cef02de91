"""A plan carried out on fake tensors: real device names, real shapes, no memory and no accelerator.

torch's FakeTensorMode runs a model without values and refuses an operation whose tensors are on different devices. So a small model
of the plan's shape proves, on any machine, that the plan's transfers suffice: prefill of several tokens, then one decoding step.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ktopt.applying import Application, build_model
from ktopt.applying.checks import prepare
from ktopt.applying.fake_indexing import IndexWithoutGuard
from ktopt.diagnostics import KtoptError
from ktopt.placement import device_kind
from ktopt.plan import Plan
from ktopt.weights import StoredTensor

PREFILL_TOKENS = 5
FIRST_STAND_IN = 100
"""Number of the first CUDA device that stands for one of another kind."""


def dry_run(plan: Plan) -> None:
    """Run the plan's model on fake tensors; KtoptError names the module where tensors of two devices meet. It is for models of few
    layers: time goes with their number, memory doesn't."""
    here, stands_for = _with_stand_ins(plan)
    root = build_model(plan)
    tensors = _NoValues(root)
    application = Application(prepare(plan, root, tensors, here), tensors)
    application.swap()
    with FakeTensorMode(allow_non_fake_inputs=True), _indexing():
        model = application.load()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("batched_mm")  # transformers' eager experts choose by value, and fakes have none
        with _one_device(model, stands_for), torch.no_grad():
            _generate_one(model)


def _with_stand_ins(plan: Plan) -> tuple[Plan, dict[str, str]]:
    """The plan with a spare CUDA device in place of each one that fake tensors don't know (npu, xpu), and what each stands for."""
    strange = [device for device in plan.devices if device_kind(device) not in ("cpu", "cuda")]
    names = {device: f"cuda:{FIRST_STAND_IN + index}" for index, device in enumerate(strange)}

    def named(device: str) -> str:
        return names.get(device, device)

    steps = tuple(
        step._replace(
            generate_device=named(step.generate_device),
            prefill_device=named(step.prefill_device),
            replicas=tuple(map(named, step.replicas)),
            elsewhere={named(device): count for device, count in step.elsewhere.items()},
            kwargs={key: named(value) if isinstance(value, str) else value for key, value in step.kwargs.items()},
        )
        for step in plan.steps
    )
    transfers = tuple(replace(t, source=named(t.source), target=named(t.target)) for t in plan.transfers)
    return replace(plan, steps=steps, transfers=transfers), {stand_in: device for device, stand_in in names.items()}


def _indexing() -> AbstractContextManager[Any]:
    return nullcontext() if torch.version.cuda else IndexWithoutGuard()


def _generate_one(model: Any) -> None:
    from transformers import DynamicCache

    home = model.get_input_embeddings().weight.device
    cache = DynamicCache(config=model.config)
    cache_name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    for length, count in ((PREFILL_TOKENS, PREFILL_TOKENS), (PREFILL_TOKENS + 1, 1)):
        model(
            input_ids=torch.zeros(1, count, dtype=torch.long, device=home),
            attention_mask=torch.ones(1, length, dtype=torch.long, device=home),
            use_cache=True,
            **{cache_name: cache},
        )


@dataclass
class _NoValues:
    """A weight source that has every tensor of a model and the values of none."""

    root: nn.Module
    path: Path = Path("fake weights")

    def __post_init__(self) -> None:
        self._shapes = {n: tuple(t.shape) for n, t in self.root.named_parameters(remove_duplicate=False)}
        self._shapes |= {n: tuple(t.shape) for n, t in self.root.named_buffers(remove_duplicate=False)}

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor(name, (name,), self._shapes[name], ("F32",), 0, self.path)

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        return torch.empty(self._shapes[name], dtype=dtype, device=device)


@contextmanager
def _one_device(model: nn.Module, stands_for: dict[str, str]) -> Iterator[None]:
    """Within, an operation on tensors of two devices is an error that names the module running it."""
    running: list[str] = []

    def left(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, a, path=path: running.append(path), prepend=True)
        module.register_forward_hook(left)
    try:
        with _DeviceCheck():
            yield
    except RuntimeError as error:
        if not isinstance(error, _TwoDevices) and not _is_about_devices(error):
            raise
        where = (running[-1] if running else "") or type(model).__name__
        what = _in_the_plans_names(str(error).strip().partition("\n")[0].rstrip("."), stands_for)
        raise KtoptError(f"{where}: {what}: the plan lacks a transfer") from error


def _is_about_devices(error: RuntimeError) -> bool:
    """Whether an error is torch's own of tensors on several devices: fake tensors, and the decompositions of some operations, look
    before an operation is dispatched. They have no class of their own."""
    return "device" in str(error).lower()


def _in_the_plans_names(text: str, stands_for: dict[str, str]) -> str:
    """A message with the devices that stand for others called by those others' names."""
    return re.sub(r"\bcuda:\d+\b", lambda found: stands_for.get(found.group(), found.group()), text)


class _TwoDevices(RuntimeError):
    """Tensors of two devices met in one operation."""

    def __init__(self, operation: str, devices: set[str]) -> None:
        super().__init__(f"{operation} gets tensors on {' and '.join(sorted(devices))}")


class _DeviceCheck(TorchDispatchMode):
    """Checks every operation, the few that fake tensors let through too. Copies may cross devices, and so may a CPU scalar."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ not in ("_to_copy", "copy_", "_to_copy_"):
            tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            devices = {str(t.device) for t in tensors if t.dim() or t.device.type != "cpu"}
            if len(devices) > 1:
                raise _TwoDevices(str(func), devices)
        return func(*args, **(kwargs or {}))
