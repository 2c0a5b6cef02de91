"""Tensors go from their source to their modules, one at a time: memory peaks at the plan's bytes and the largest tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ktopt.applying.buffers import initialise_buffers
from ktopt.applying.checks import Prepared
from ktopt.diagnostics import KtoptError
from ktopt.implementation import Loads
from ktopt.plan import Step
from ktopt.weights import StoredTensor, WeightError


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """A tensor has been read. Bytes are those of the model's tensors in the plan's dtypes."""

    tensor: str
    done_bytes: int
    total_bytes: int


class TensorFeed:
    """The weights as operators see them (the Tensors protocol): resolves tied names, shares tied tensors that want one dtype on one
    device, and keeps account of what has been read."""

    def __init__(
        self,
        prepared: Prepared,
        tensors: Any,
        progress: Callable[[ProgressEvent], None] | None,
        committed: Callable[[], None],
    ) -> None:
        self.current = ""
        self.placed = False
        self._prepared = prepared
        self._needs = prepared.needs
        self._tensors = tensors
        self._progress = progress
        self._committed = committed
        self._read: set[str] = set()
        self._done_bytes = 0
        self._total_bytes = sum(need.nbytes for need in prepared.needs.values())
        self._shared: dict[tuple[str, torch.dtype, torch.device], nn.Parameter] = {}
        self._handed_out = False

    def __contains__(self, name: str) -> bool:
        return name in self._needs or name in self._tensors

    def stored(self, name: str) -> StoredTensor:
        stored: StoredTensor = self._tensors.stored(self._source_name(name))
        return stored

    def raw(self, name: str) -> Any:
        """The stored parts, for an operator that computes on them. WeightError where the source is no file, or has it otherwise."""
        if not hasattr(self._tensors, "raw"):
            raise WeightError(f"{self._tensors.path}: {name} is no file's")
        self._start(name)
        parts = self._tensors.raw(self._source_name(name))
        self.count(name)
        return parts

    def pieces(self, name: str) -> Any:
        """The stored pieces, for an operator that computes on them in another form. WeightError where the source has no such."""
        if not hasattr(self._tensors, "pieces"):
            raise WeightError(f"{self._tensors.path}: {name} is not in pieces")
        self._start(name)
        pieces = self._tensors.pieces(self._source_name(name))
        self.count(name)
        return pieces

    def read(self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
        """The parameter in `dtype` on `device`; a tied one that is there already is shared."""
        need = self._needs.get(name)
        key = (need.tie, dtype, torch.device(device)) if need and need.tie else None
        if key is not None and key in self._shared:
            self.count(name)
            return self._shared[key]
        self._start(name)
        tensor: torch.Tensor = self._tensors.read(self._source_name(name), dtype, device)
        if need and tuple(tensor.shape) != need.shape:
            raise KtoptError(f"its source gave shape {list(tensor.shape)}, not {list(need.shape)}")
        if key is not None:
            self._shared[key] = nn.Parameter(tensor, requires_grad=False)
            tensor = self._shared[key]
        self.count(name)
        return tensor

    def _start(self, name: str) -> None:
        if self._handed_out:  # what an operator has been given counts as placed when it asks for more
            self.commit()
        self.current = name

    def commit(self) -> None:
        """Note that a tensor has been placed: from here there is no way back."""
        if not self.placed:
            self.placed = True
            self._committed()

    def count(self, name: str) -> None:
        """Note that a tensor has been dealt with."""
        self._handed_out = True
        if name in self._read or name not in self._needs:
            return
        self._read.add(name)
        self._done_bytes += self._needs[name].nbytes
        if self._progress:
            self._progress(ProgressEvent(name, self._done_bytes, self._total_bytes))

    def release(self, name: str) -> None:
        """Let a model in hand drop its old tensor."""
        release = getattr(self._tensors, "release", None)
        if release is not None and not self._needs[name].tie:
            release(self._source_name(name))

    def where(self) -> str:
        """The rule behind the tensor being read, for a message."""
        need = self._needs.get(self.current)
        return self._prepared.plan.blame(need.step) if need else self._prepared.plan.rule_file

    def _source_name(self, name: str) -> str:
        need = self._needs.get(name)
        return need.read_as if need else name


class Loader:
    """Fills a swapped model from a feed, module by module in the plan's order."""

    def __init__(self, prepared: Prepared, feed: TensorFeed, root: nn.Module, replaced: set[str]) -> None:
        self._plan = prepared.plan
        self._contexts = {r.path: replace(r.context, tensors=feed) for r in prepared.replacements}
        self._feed = feed
        self._root = root
        self._needs = prepared.needs
        self._replaced = replaced

    @torch.no_grad()
    def run(self) -> None:
        modules = dict(self._root.named_modules(remove_duplicate=False))
        initialise_buffers(self._root, self._plan)
        for step in self._plan.steps:
            module = modules.get(step.path)
            if module is None:
                continue  # an operator above has taken it into itself, and loads what it needs
            context = self._contexts.get(step.path)
            if context is not None and isinstance(module, Loads):
                module.load_tensors(context)
            else:
                self._load_own(module, step)
        self._check_complete()

    def _load_own(self, module: nn.Module, step: Step) -> None:
        """Load a module's own tensors by name: an operator's in the dtype that it has on meta, others in the plan's."""
        device = torch.device(step.generate_device)
        prefix = f"{step.path}." if step.path else ""
        as_built = step.path in self._replaced
        for name, parameter in module._parameters.items():
            if parameter is not None:
                dtype = parameter.dtype if as_built else self._dtype(prefix + name)
                module._parameters[name] = self._parameter(prefix + name, dtype, device)
                self._feed.commit()
        for name, buffer in module._buffers.items():
            if buffer is not None and name in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(device)
            elif buffer is not None:
                dtype = buffer.dtype if as_built else self._dtype(prefix + name)
                module._buffers[name] = self._feed.read(prefix + name, dtype, device)
                self._feed.commit()

    def _parameter(self, name: str, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        tensor = self._feed.read(name, dtype, device)
        self._feed.release(name)
        return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)

    def _dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._needs[name].dtype)
        return dtype

    def _check_complete(self) -> None:
        for kind in (self._root.named_parameters, self._root.named_buffers):
            for name, tensor in kind():
                if tensor.is_meta:
                    raise KtoptError(f"{name} was left without a value by the operator that holds it")
