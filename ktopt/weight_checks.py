"""Whether a weight file has what the model needs (KT7), from its headers alone: no tensor is read, and no torch is imported.

What is wrong with a tensor stands at the rule that decides its module, once for all layers that it is so in; what is wrong with the
file as a whole, at the start of the rule file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktopt.diagnostics import Report
from ktopt.graph import Module, Tensor
from ktopt.match import Matches
from ktopt.selection.families import template
from ktopt.source import FILE_START, Origin
from ktopt.weights.ggml_types import NOT_DEQUANTISED
from ktopt.weights.open import open_weights
from ktopt.weights.source import WHOLE_NUMBERS, MissingTensor, StoredTensor, WeightError, WeightSource

LAYERS = "num_hidden_layers"
COUNTS = {
    LAYERS: "layers",
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary",
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "num_experts": "experts",
    "n_routed_experts": "experts",
    "num_local_experts": "experts",
    "num_experts_per_tok": "experts a token",
    "kv_lora_rank": "latent size",
}
"""What only a weight file's tensors may tell of its config, and its name in messages; the rest weights/agreement.py compares."""
ONE_MODEL = "give the weights and the config of one model"


def check_weights(matches: Matches, weights: str | os.PathLike[str] | WeightSource, report: Report) -> None:
    """Add KT701, KT702 and KT703 for the weights of a model. WeightError where they can't be opened at all, or are damaged."""
    graph = matches.graph
    start = Origin(matches.ruleset.path, FILE_START)
    if not isinstance(weights, str | os.PathLike):
        _Check(matches, weights, start, report).run()
        return
    try:
        source = open_weights(Path(weights), graph.config)
    except WeightError as error:
        open_weights(Path(weights)).close()  # what is wrong with the file itself is no finding
        help = f"give the weights of {graph.name or 'this model'}, or the model that these are of"
        report.error("KT703", str(error), start, help=help)
        return
    try:
        _Check(matches, source, start, report).run()
    finally:
        source.close()


@dataclass
class _Fault:
    """What is wrong with the tensors of one family: the first of them in words, and how many."""

    code: str
    message: str
    help: str
    origin: Origin
    count: int = 0


@dataclass
class _Check:
    """One model on one source. `faults` by code, family, tensor and rule, in the tree's order."""

    matches: Matches
    source: WeightSource
    start: Origin
    report: Report
    faults: dict[tuple[Any, ...], _Fault] = field(default_factory=dict)

    def run(self) -> None:
        graph = self.matches.graph
        differing = _differing(graph.config, _own_config(self.source))
        compare = getattr(self.source, "contradictions", None)
        contradictions = compare(graph.config) if compare is not None else []
        said = {each.means for each in contradictions}
        listed = [str(each) for each in contradictions]
        listed += [f"{COUNTS[key]} {file} and not {model}" for key, (model, file) in differing.items() if key not in said]
        if listed:
            message = f"{self.source.path} is of another model than {graph.name or 'the one given'}: {'; '.join(listed)}"
            self.report.error("KT703", message, self.start, help=ONE_MODEL)
        layers = differing.get(LAYERS, (0, None))[1]
        others = bool((differing.keys() | said) - {LAYERS})
        for module in graph:
            if layers is None or module.layer is None or module.layer < layers:
                self.module(module, shapes=not others)
        for fault in self.faults.values():
            more = f" (and {fault.count - 1} more like it)" if fault.count > 1 else ""
            self.report.error(fault.code, fault.message + more, fault.origin, help=fault.help)

    def module(self, module: Module, shapes: bool) -> None:
        for tensor in _needed(module):
            name = f"{module.path}.{tensor.name}" if module.path else tensor.name
            try:
                stored = self.stored(name)
            except MissingTensor as error:
                help = f"{self.source.path} is incomplete, or of another model; `ktopt doctor` and `gguf-dump` list what a file has"
                self.fault("KT701", module, tensor, f"{error}", help)
                continue
            except WeightError as error:
                self.fault("KT703", module, tensor, str(error), "give the weights of this model, as their converter wrote them")
                continue
            if kinds := _unreadable(stored, tensor):
                self.unreadable(module, tensor, stored, kinds)
            if shapes and tuple(stored.shape) != tuple(tensor.shape):
                message = (
                    f"{stored.file}: {stored.stored[0]} makes {name} of shape {list(stored.shape)}, and the model wants "
                    f"{list(tensor.shape)}"
                )
                self.fault("KT703", module, tensor, message, ONE_MODEL)

    def stored(self, name: str) -> StoredTensor:
        """How a parameter is stored, under its own name or that of one that it is tied to."""
        try:
            return self.source.stored(name)
        except MissingTensor:
            tied = self.matches.graph.tied
            first = tied.get(name, name)
            for other in (first, *(n for n, f in tied.items() if f == first)):
                if other != name and other in self.source:
                    return self.source.stored(other)
            raise

    def unreadable(self, module: Module, tensor: Tensor, stored: StoredTensor, kinds: str) -> None:
        rule = self.rule(module)
        replace = None if rule is None else self.matches.ruleset.rules[rule].replace
        op = getattr(replace.config, "generate_op", "") if replace is not None else ""
        reader = op or (replace.operator.name if replace is not None else "the module")
        message = (
            f"{stored.file}: {stored.stored[0]} is stored as {kinds}, which {reader} can't read: there is no dequantiser for it"
        )
        self.fault("KT702", module, tensor, message, "give a file that stores it in another type, such as Q8_0, Q4_K or BF16")

    def fault(self, code: str, module: Module, tensor: Tensor, message: str, help: str) -> None:
        rule = self.rule(module)
        key = (code, template(module), tensor.name, rule)
        if key not in self.faults:
            origin = self.start if rule is None else self.matches.ruleset.rules[rule].replace.origin
            self.faults[key] = _Fault(code, message, help, origin)
        self.faults[key].count += 1

    def rule(self, module: Module) -> int | None:
        """The rule that decides the module, or that owns it with what is around it."""
        decision = self.matches.decisions[module.index]
        return decision.rule if decision.closed_by is None else self.matches.decisions[decision.closed_by].rule


def _needed(module: Module) -> Iterator[Tensor]:
    """What is loaded from a file: parameters, and a router's correction bias. Other buffers are made, not loaded."""
    return (t for t in module.tensors if not t.buffer or module.role == "router")


def _unreadable(stored: StoredTensor, tensor: Tensor) -> str:
    """The storage types that can't become the tensor's numbers, "" where all can."""
    whole = WHOLE_NUMBERS if "float" in tensor.dtype else frozenset()
    return ", ".join(dict.fromkeys(kind for kind in stored.types if kind in NOT_DEQUANTISED or kind in whole))


def _own_config(source: WeightSource) -> Mapping[str, Any]:
    """The config that the weights carry; empty where they carry none that can be read, which loading them doesn't need."""
    try:
        return source.config() or {}
    except WeightError:
        return {}


def _differing(model: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The counts on which two configs differ, as (the model's, the file's); what one leaves to its class isn't compared."""
    return {
        key: (model[key], file[key])
        for key in COUNTS
        if isinstance(model.get(key), int) and isinstance(file.get(key), int) and model[key] != file[key]
    }
