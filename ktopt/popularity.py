"""How often a model's experts are chosen, by layer, as a file: `ktopt profile --experts` writes it, `--popularity` takes it.

A profile may come from a stranger: it is read as data, checked against the model, and nothing in it is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktopt.diagnostics import KtoptError, UsageError
from ktopt.graph import Module, ModuleGraph
from ktopt.pattern.numbers import from_ranges

FORMAT = 1
MAX_BYTES = 64 << 20
MOST = 1 << 53
"""The highest count that JSON's numbers hold exactly everywhere."""
SHOWN = 3
"""How many names a message lists."""


@dataclass(frozen=True)
class Popularity:
    """How often each expert of each layer was chosen.

    source      the model that was counted on, and its model_type; `tree` is the digest of its module tree
    tokens      that were read
    layers      by the path of a layer's experts, a count for each expert, in order
    """

    source: str
    model_type: str
    tree: str
    tokens: int
    layers: Mapping[str, tuple[int, ...]]

    def to_json(self) -> str:
        """The file's text: a layer on each line."""
        rows = ",\n".join(f"    {json.dumps(path)}: {json.dumps(list(counts))}" for path, counts in self.layers.items())
        model = {"source": self.source, "model_type": self.model_type, "tree": self.tree}
        head = f'  "format": {FORMAT},\n  "model": {json.dumps(model)},\n  "tokens": {self.tokens}'
        return f'{{\n{head},\n  "layers": {{\n{rows}\n  }}\n}}\n'

    def shares(self, path: str) -> tuple[float, ...]:
        """The part of a layer's choices that each of its experts takes; they sum to 1."""
        counts = self.layers[path]
        total = sum(counts)
        return tuple(count / total for count in counts)


def load_popularity(path: str | Path) -> Popularity:
    """The profile in a file. UsageError where there is no such file, KtoptError where it is no profile."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise KtoptError(f"{path}: larger than {MAX_BYTES >> 20} MB; that is no profile of experts")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise KtoptError(f"{path}: not JSON: {str(error)[:100]}") from None
    return read_popularity(data, str(path))


def read_popularity(data: Any, where: str) -> Popularity:
    """A profile from JSON values. KtoptError says what isn't as it must be."""
    if not isinstance(data, dict) or not isinstance(data.get("layers"), dict) or not isinstance(data.get("model"), dict):
        raise KtoptError(f"{where}: not a profile of experts; `ktopt profile --experts` makes one")
    if data.get("format") != FORMAT:
        raise KtoptError(f"{where}: format {data.get('format')!r:.40} of profiles of experts; this ktopt reads {FORMAT}")
    model, layers = data["model"], data["layers"]
    for key in ("source", "model_type", "tree"):
        if not isinstance(model.get(key, ""), str):
            raise KtoptError(f"{where}: model.{key}: must be a text")
    if not _is_count(data.get("tokens", 0)):
        raise KtoptError(f"{where}: tokens: must be a whole number from 0 on")
    for path, counts in layers.items():
        if not isinstance(counts, list) or not counts or not all(map(_is_count, counts)):
            raise KtoptError(
                f"{where}: layers, {path!r:.80}: must be a list of counts, whole numbers from 0 on, one for each expert"
            )
        if not any(counts):
            raise KtoptError(f"{where}: layers, {path!r:.80}: no expert was ever chosen; count on a longer text")
    found = {path: tuple(counts) for path, counts in layers.items()}
    return Popularity(
        str(model.get("source", "")), str(model.get("model_type", "")), str(model.get("tree", "")), data.get("tokens", 0), found
    )


def check_popularity(profile: Popularity, graph: ModuleGraph, where: str = "the profile") -> None:
    """KtoptError where a profile isn't one of this model's experts: another model, other layers, other numbers of experts."""
    name = graph.name or "this model"
    layers = {module.path: experts_in(module) for module in layers_of(graph)}
    if not layers:
        raise KtoptError(f"{name} has no layers whose experts are one module, so there are none to split by popularity")
    if profile.model_type and graph.model_type and profile.model_type != graph.model_type:
        raise KtoptError(f"{where} is of {profile.source or 'a model'} ({profile.model_type}), and {name} is {graph.model_type}")
    for names, problem in (
        ([path for path in profile.layers if path not in layers], f"{where} counts experts that {name} doesn't have"),
        ([path for path in layers if path not in profile.layers], f"{where} has no counts of layers of {name}"),
    ):
        if names:
            raise KtoptError(f"{problem}: {_listed(names)}")
    for path, counts in profile.layers.items():
        if len(counts) != layers[path]:
            raise KtoptError(f"{where} has {len(counts)} counts for {path}, which has {layers[path]} experts")


def layers_of(graph: ModuleGraph) -> list[Module]:
    """The modules that are all experts of a layer as one."""
    return [module for module in graph.modules if module.role == "experts" and module.layer is not None and experts_in(module)]


def experts_in(module: Module) -> int:
    """How many experts a module has in its stacks of matrices, 0 where it has none."""
    return next((tensor.shape[0] for tensor in module.tensors if len(tensor.shape) == 3), 0)


def hot_ids(config: Any, layer: int | None) -> tuple[int, ...]:
    """The hot experts of a layer under an operator's config, in order; none where it names none for that layer. ValueError for text
    that is neither numbers nor ranges."""
    given = getattr(config, "hot_experts", None)
    text = given.get(layer, "") if isinstance(given, Mapping) else given
    return () if text is None else from_ranges(str(text))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(f"{name:.80}" for name in names[:SHOWN]) + more
