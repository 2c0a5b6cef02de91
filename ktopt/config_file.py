"""Reading a long-context config file (config.yaml): a Config, or findings with place and remedy for everything that can't be."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from ktopt.config import SECTIONS, UPSTREAMS, CacheSettings, Config, ModelSettings, long_settings, memory_problem
from ktopt.diagnostics import CompileError, Report
from ktopt.parse import parse, read_source
from ktopt.source import Document, Mapping, SourceFile
from ktopt.validate.settings import SectionReader, check_together, owners, say_unread
from ktopt.validate.shape import Shape, kind_of

log = logging.getLogger(__name__)

_OF_RULES = ("rules", "version", "place", "let", "import", "architectures")
_SECTION = re.compile(r"(?m)^[\"']?(?:model|long_context|kvc2)[\"']?[ \t]*:")
"""Sections of KTransformers' own config.yaml for its server and its command line."""


def read_config(path: str | Path) -> Config:
    """The config in a file. CompileError, whose report has every finding, where it can't be used; what else was found, such as a
    length that is rounded up to whole blocks, is logged."""
    source = read_source(path)
    report = Report()
    document = parse(source, report)
    config = check_config(document, report)
    if config is None or report.errors:
        raise CompileError(report)
    for finding in report.sorted():
        log.warning("%s", finding)
    return config


def may_be_config(source: SourceFile) -> bool:
    """Whether a text may be a config file, by a look at it."""
    return _SECTION.search(source.text) is not None


def is_config(document: Document) -> bool:
    """Whether a parsed file is a config and no rule file: it has a section of one, and no key that only a rule file has."""
    root = document.root
    if not isinstance(root, Mapping):
        return False
    keys = {key.value for key, _ in root}
    return bool(keys & SECTIONS.keys()) and not keys & set(_OF_RULES)


def check_config(document: Document, report: Report) -> Config | None:
    """The config of a parsed file, and findings for everything in it that can't be or isn't as written. None with an error."""
    shape = Shape(document.source.path, report)
    root = document.root
    before = len(report.errors)
    if not isinstance(root, Mapping):
        if root is not None:
            shape.error("KT206", f"a config is a mapping with `model`, not {kind_of(root)}", root, help="write `model:` ...")
        return None
    shape.keys(root, (*SECTIONS, *UPSTREAMS[""]), owners())
    say_unread(shape, root, "")
    if root.get("model") is None:
        shape.error(
            "KT203", "`model` is missing", root.entries[0][0] if root.entries else root, help="write `model:`, with `name_or_path`"
        )
    given: dict[str, dict[str, Any]] = {}
    for name in SECTIONS:
        node = root.get(name)
        section = shape.mapping(node, name, "its keys") if node is not None else None
        values = SectionReader(shape, name, section).read() if section is not None else None
        if values is not None:
            given[name] = values
    if len(report.errors) > before or "model" not in given:
        return None
    written, long = given.get("long_context", {}), root.get("long_context")
    settings = long_settings(written)
    settled = check_together(shape.inside("long_context"), long if isinstance(long, Mapping) else root, settings, written)
    kvc2, memory = CacheSettings(**given.get("kvc2", {})), root.get("kvc2")
    if (problem := memory_problem(kvc2)) and isinstance(memory, Mapping):
        shape.inside("kvc2").error("KT210", problem[0], memory.key(problem[2]) or memory, help=problem[1])
    return None if len(report.errors) > before else Config(ModelSettings(**given["model"]), settled, kvc2, given)
