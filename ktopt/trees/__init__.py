"""A model's module tree, from whatever names the model: a shipped name, a folder, a config.json, a GGUF file, an nn.Module.

Trees of well-known models ship as data. Any other config is built once by transformers on the meta device, without weights and
without code from the model's folder, and kept in the user's cache. torch and transformers are imported for that alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktopt.diagnostics import KtoptError, UsageError
from ktopt.graph import Module, ModuleClass, ModuleGraph, Tensor
from ktopt.models import IN_EVERY_MODEL, family_of_class, runs_as, shipped, treefile
from ktopt.models.config_checks import NOT_BUILT_FROM, check_config, plain_config, read_config
from ktopt.models.family import Family, Was
from ktopt.models.shipped import known_models, model_config
from ktopt.models.treefile import MODULES_MAX, Row
from ktopt.trees import cache as tree_cache
from ktopt.versions import installed

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

__all__ = ["build_meta_model", "graph_from_module", "known_models", "load_tree", "model_config", "rows_of", "ties_of"]


def load_tree(model: str | Path | Mapping[str, Any] | PreTrainedConfig | nn.Module) -> ModuleGraph:
    """The module tree of a model, with KTransformers' old paths and classes as aliases.

    model   a shipped name (known_models()), a folder with a config.json, a config.json, a GGUF file, a config as a mapping,
            or as transformers' object, or an nn.Module in hand

    UsageError for an unknown name and for what can name no model; KtoptError for an unreadable file, or a config that transformers
    can't build.
    """
    if hasattr(model, "to_dict") and not isinstance(model, type) and not hasattr(model, "_modules"):
        model = model.to_dict()
    if isinstance(model, Mapping):
        name = model.get("_name_or_path") or model.get("model_type")
        return _from_config(model, str(name or ""), "config")
    if hasattr(model, "_modules"):
        return graph_from_module(model)
    if isinstance(model, str) and model in known_models():
        data = shipped.read(model)
        return _assemble((treefile.decode(data), data["tied"]), model, data["config"], runs_as(data["config"]["model_type"]))
    if not isinstance(model, str | os.PathLike):
        raise UsageError(f"a model is a name, a path, a config or an nn.Module, not {type(model).__name__}")
    return _from_config(*_find_config(os.fspath(model)))


def graph_from_module(model: nn.Module, *, name: str = "") -> ModuleGraph:
    """The tree of a module in hand, in the order of its children. A module that hangs under two names appears twice.

    name   what the graph is called; by default what the model's config says, or its class
    """
    config = _config_of(model)
    model_type = config.get("model_type", "")
    name = name or config.get("_name_or_path", "") or type(model).__name__
    return replace(_assemble((rows_of(model), ties_of(model)), name, config, model_type), in_hand=True)


def build_meta_model(config: Mapping[str, Any] | PreTrainedConfig, where: str = "config") -> nn.Module:
    """The transformers model of a config, on the meta device: shapes and dtypes without memory, and without code from the hub.

    where   what messages call the config

    Floating-point weights have the config's dtype (float32 by default), except those that the model itself keeps in float32.
    KtoptError where transformers can't build it.
    """
    plain = plain_config(config if isinstance(config, Mapping) else config.to_dict(), where)
    model_type = check_config(plain, where)
    fields = {key: value for key, value in plain.items() if key not in NOT_BUILT_FROM and value != "auto"}
    import warnings

    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            made = CONFIG_MAPPING[model_type].from_dict({**fields, "model_type": model_type})
            model: nn.Module = AutoModelForCausalLM.from_config(made)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise KtoptError(f"{where}: transformers can't build a {model_type}: {type(error).__name__}: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)
    return model


def _find_config(path: str) -> tuple[Mapping[str, Any], str, str]:
    """The config that a path leads to, the model's name, and the file that messages name."""
    if not path:
        raise UsageError("which model? Its name is empty")
    try:
        is_file, is_folder = os.path.isfile(path), os.path.isdir(path)
    except ValueError:
        is_file = is_folder = False
    where = Path(path)
    if is_folder:
        where = where / "config.json"
        if not where.is_file():
            ggufs = sorted(Path(path).glob("*.gguf"))
            if not ggufs:
                raise KtoptError(f"{path}: the folder has neither a config.json nor a GGUF file")
            where = ggufs[0]
    elif not is_file:
        if path.lower().endswith((".json", ".gguf")) or path.startswith((".", "/", "~")):
            raise UsageError(f"{path}: there is no such file or folder")
        raise shipped.unknown_model(path)
    if _is_gguf(where):
        from ktopt.weights.gguf_config import config_from_gguf

        return config_from_gguf(where), path, str(where)
    if where.suffix.lower() == ".gguf":
        why = "does not begin with GGUF" if where.stat().st_size else "is empty"
        raise KtoptError(f"{where}: not a GGUF file: it {why}")
    config = read_config(where)
    stored = config.get("quantization_config")
    if isinstance(stored, Mapping) and stored.get("quant_method") == "ktopt":
        raise UsageError(
            f"{path} is what `ktopt apply` wrote: a model with its plan. `ktopt run` takes it in a rule file's place, and "
            "`ktopt plan` its plan.json; as a model, name the one that it was made from"
        )
    return config, path, str(where)


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise KtoptError(f"{path}: can't be read: {error.strerror or error}") from error


def _from_config(config: Mapping[str, Any], name: str, where: str) -> ModuleGraph:
    config = plain_config(config, where)
    model_type = check_config(config, where)
    version = installed("transformers")
    same = shipped.find_same(config, version)
    if same:
        data = shipped.read(same)
        return _assemble((treefile.decode(data), data["tied"]), name, config, model_type)
    key = tree_cache.key_of({k: v for k, v in config.items() if k not in NOT_BUILT_FROM}, version)
    tree = tree_cache.load(key)
    if tree is None:
        model = build_meta_model(config, where)
        tree = rows_of(model), ties_of(model)
        tree_cache.store(key, tree)
    return _assemble(tree, name, config, model_type)


def _config_of(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        config = config.to_dict()
    return plain_config(config, type(model).__name__) if isinstance(config, Mapping) else {}


def rows_of(model: nn.Module) -> list[Row]:
    """A module's tree in pre-order. torch is touched through the object only."""
    classes: dict[type, ModuleClass] = {}
    owned: dict[tuple[Tensor, ...], tuple[Tensor, ...]] = {}
    rows: list[Row] = []
    pending: list[tuple[str, Any, int, frozenset[int]]] = [("", model, -1, frozenset())]
    while pending:
        name, module, parent, above = pending.pop()
        if id(module) in above or len(rows) >= MODULES_MAX:
            raise KtoptError(f"{type(model).__name__}: a module contains itself, or there are more than {MODULES_MAX:,} modules")
        kind = type(module)
        if kind not in classes:
            mro = tuple(_dotted(base) for base in kind.__mro__ if base is not object)
            classes[kind] = ModuleClass(mro[0], mro)
        tensors = tuple(_tensors(module))
        index = len(rows)
        rows.append(Row(name, classes[kind], owned.setdefault(tensors, tensors), parent))
        children = [(key, child) for key, child in module._modules.items() if child is not None]
        if children:
            inside = above | {id(module)}
            pending.extend((key, child, index, inside) for key, child in reversed(children))
    return rows


def ties_of(model: nn.Module) -> dict[str, str]:
    """Parameters that are one tensor with an earlier one, as models tie the head to the embedding: name -> name of the first."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[name] = known
    return tied


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _tensors(module: Any) -> Iterable[Tensor]:
    for group, buffer in ((module._parameters, False), (module._buffers, True)):
        for name, tensor in group.items():
            if tensor is None:
                continue
            try:
                shape = tuple(int(size) for size in tensor.shape)
            except RuntimeError as error:
                raise KtoptError(f"{type(module).__name__}.{name} has no shape before the model first runs: {error}") from error
            yield Tensor(name, shape, str(tensor.dtype).removeprefix("torch."), buffer)


def _assemble(tree: tree_cache.Tree, name: str, config: Mapping[str, Any], model_type: str) -> ModuleGraph:
    """The graph of a tree's rows: paths, subtrees, layers, experts, and the aliases that KTransformers' models give."""
    rows, tied = tree
    ends = list(range(1, len(rows) + 1))
    for index in range(len(rows) - 1, 0, -1):
        ends[rows[index].parent] = max(ends[rows[index].parent], ends[index])
    old = _OldNames(config)
    modules: list[Module] = []
    old_paths: list[str] = []
    per_layer: list[tuple[int, str]] = []
    for index, (own, cls, tensors, up) in enumerate(rows):
        was, old_classes = old.of(cls)
        if up < 0:
            modules.append(Module("", cls, tensors, index, up, ends[index], None, None, (), old_classes))
            old_paths.append("")
            continue
        parent = modules[up]
        prefix = f"{parent.path}." if up else ""
        layer, expert = parent.layer, parent.expert
        if own.isdigit():
            above = rows[up].name
            if above == "layers" and layer is None:
                layer = int(own)
            elif above == "experts":
                expert = int(own)
        old_path = f"{old_paths[up]}.{own}" if old_paths[up] else ""
        if was is not None:
            if was.name and was.name != own:
                old_path = f"{prefix}{was.name}"
            if was.per_layer:
                per_layer.append((index, was.per_layer))
        old_paths.append(old_path)
        aliases = (old_path,) if old_path else ()
        modules.append(Module(f"{prefix}{own}", cls, tensors, index, up, ends[index], layer, expert, aliases, old_classes))
    if per_layer:
        _alias_per_layer(modules, per_layer)
    architectures = config.get("architectures") or ([modules[0].cls.simple_name] if model_type else [])
    return ModuleGraph(tuple(modules), name, model_type, tuple(architectures), config, tied)


def _alias_per_layer(modules: list[Module], per_layer: list[tuple[int, str]]) -> None:
    """Gives a module that every layer once had for itself (the rotary embedding) its path in each of its siblings' layers."""
    paths = {module.path for module in modules}
    for index, inner in per_layer:
        owner = modules[modules[index].parent]
        layers = f"{owner.path}.layers" if owner.path else "layers"
        found = [
            f"{module.path}.{inner}"
            for module in modules[owner.index : owner.end]
            if module.layer is not None and module.path == f"{layers}.{module.layer}"
        ]
        holder = inner.rpartition(".")[0]
        cut = len(inner) - len(holder)
        aliases = tuple(alias for alias in found if alias not in paths and alias[:-cut] in paths)
        modules[index] = replace(modules[index], alias_paths=aliases)


class _OldNames:
    """KTransformers' names for classes, looked up once a class."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.known: dict[str, tuple[Was | None, tuple[str, ...]]] = {}

    def of(self, cls: ModuleClass) -> tuple[Was | None, tuple[str, ...]]:
        """What the class replaced, and its alias classes. A subclass of a transformers class has those of its base."""
        found = self.known.get(cls.name)
        if found is None:
            found = self.known[cls.name] = self._look_up(cls)
        return found

    def _look_up(self, cls: ModuleClass) -> tuple[Was | None, tuple[str, ...]]:
        if cls.name in IN_EVERY_MODEL:
            return None, IN_EVERY_MODEL[cls.name]
        for dotted in cls.mro:
            family: Family | None = family_of_class(dotted)
            simple = dotted.rpartition(".")[2]
            if family is not None and simple in family.was:
                return family.was[simple], family.old_classes(simple, self.config)
        return None, ()
