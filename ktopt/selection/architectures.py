"""Whether a file's `architectures:` name the model that it is checked on."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ktopt.diagnostics import Report
from ktopt.graph import ModuleGraph
from ktopt.match import Matches
from ktopt.models import runs_as
from ktopt.operator import nearest
from ktopt.source import FILE_START, Origin
from ktopt.treeindex import class_names

_TASK = re.compile(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def check_architectures(matches: Matches, report: Report) -> None:
    """KT311. A model whose architecture isn't known, such as a bare nn.Module, is not judged."""
    ruleset, graph = matches.ruleset, matches.graph
    if is_for(ruleset.architectures, graph):
        return
    names = {name.lower(): name for name in names_of(graph)}
    own = ", ".join(graph.architectures)
    message = f"the file is for {', '.join(ruleset.architectures)}, and {graph.name or 'this model'} is a {own}"
    origin = ruleset.architectures_origin or Origin(ruleset.path, FILE_START)
    by_case = (names.get(said.lower(), "") for said in ruleset.architectures)
    near = next(filter(None, (*by_case, *(nearest(said, graph.architectures) for said in ruleset.architectures))), "")
    help = f"did you mean {near}?" if near else f"add {graph.architectures[0]}, if the rules are meant for it too"
    report.error("KT311", message, origin, help=help)


def is_for(architectures: Sequence[str], graph: ModuleGraph) -> bool:
    """Whether a file of these `architectures` is for the model. Without any it is for all, as all are for a model without."""
    if not architectures or not graph.architectures:
        return True
    names, known = {name.lower(): name for name in names_of(graph)}, known_as(graph)
    return any(_plain(said) in known and names.get(said.lower(), said) == said for said in architectures)


def names_of(graph: ModuleGraph) -> list[str]:
    """What a model is called: its classes, today's and KTransformers', and its model_type."""
    root = graph.modules[0]
    classes = (name.rpartition(".")[2] for name in class_names(root.cls, root.alias_classes))
    models = (graph.model_type, str(graph.config.get("model_type", "")))
    return [name for name in (*classes, *models, *graph.architectures) if name]


def known_as(graph: ModuleGraph) -> set[str]:
    """What `architectures` may call it: any of these, in any spelling of the same model_type."""
    return {_plain(name) for name in names_of(graph)}


def _plain(name: str) -> str:
    """A model_type or a class's name without its task and spelling: that of the model_type whose code runs it."""
    words = _WORD.sub("_", _TASK.sub("", name)).lower()
    return runs_as(words).replace("_", "")
