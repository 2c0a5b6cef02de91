"""The first stage: a rule file's text to YAML nodes that keep their places, with the files that it imports.

`read_source` reads a file within limits; `parse` composes it (compose.py) and follows a native file's `import:` list. What a node
means is validate.py's business.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ktopt.diagnostics import CompileError, Report
from ktopt.parse.compose import Budget, compose
from ktopt.source import FILE_START, Document, Mapping, Node, Origin, Scalar, Sequence, SourceFile, Span

MAX_BYTES = 1_000_000
"""Of a rule file and all that it imports, together."""
MAX_FILES = 64
_UNREADABLE = re.compile("[\0\ud800-\udfff]")


def read_source(path: str | Path) -> SourceFile:
    """The text of a rule file ("-" is standard input). CompileError, with a KT103 or KT104 finding, for what can't be read as UTF-8
    text of at most MAX_BYTES."""
    name = str(path)
    try:
        data = _read_bytes(name, MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(name, f"can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise _unreadable(name, f"can't be read: {error}") from None
    return _decode(name, data)


def _read_bytes(name: str, limit: int) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read(limit)
    with open(name, "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISREG(status.st_mode) and status.st_size >= limit:
            return bytes(limit)
        return file.read(limit)


def _decode(name: str, data: bytes) -> SourceFile:
    if len(data) > MAX_BYTES:
        raise _unreadable(name, f"is over {MAX_BYTES // 1000} kB; a rule file is a few kB of YAML", code="KT104")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise _unreadable(name, "is UTF-16; save it as UTF-8")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        column = len(before.rpartition(b"\n")[2].decode("utf-8", "replace")) + 1
        span = Span.at(before.count(b"\n") + 1, column)
        raise _unreadable(name, f"isn't UTF-8 text: byte 0x{data[error.start]:02X} here", span) from None
    if "\0" in text:
        at = text.index("\0")
        span = Span.at(text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at))
        raise _unreadable(name, "holds a NUL character here; it isn't a text file", span)
    return SourceFile(name, text)


def _unreadable(name: str, what: str, span: Span = FILE_START, code: str = "KT103") -> CompileError:
    report = Report()
    shown = "standard input" if name == "-" else Path(name).name
    report.error(code, f"{shown} {what}", Origin(name, span))
    return CompileError(report)


def parse(source: SourceFile, report: Report) -> Document:
    """The document of a rule file, imports included. Never raises for what is wrong in the text: the report says it, and the root
    is None where nothing can be read."""
    folder = Path.cwd() if source.path == "-" else Path(source.path).parent
    return _Imports(folder.resolve(), report).document(source, _real(source.path))


def _real(path: str) -> Path:
    return Path(path) if path == "-" else Path(path).resolve()


class _Refused(Exception):
    """An import that isn't followed: the message and code of the finding at its entry."""

    def __init__(self, message: str, code: str = "KT109") -> None:
        super().__init__(message)
        self.code = code


@dataclass
class _Imports:
    """Reads a file and its imports, each once. `top` is the folder of the first file, which no import may leave."""

    top: Path
    report: Report
    budget: Budget = field(default_factory=Budget)
    bytes_left: int = MAX_BYTES
    done: dict[Path, Document] = field(default_factory=dict)
    chain: list[Path] = field(default_factory=list)

    def document(self, source: SourceFile, path: Path) -> Document:
        self.chain.append(path)
        self.bytes_left -= len(source.text)
        root = self.compose(source)
        imports = tuple(self.imports(source, root)) if isinstance(root, Mapping) else ()
        self.chain.pop()
        self.done[path] = Document(source, root, imports)
        return self.done[path]

    def compose(self, source: SourceFile) -> Node | None:
        start = Origin(source.path, FILE_START)
        if len(source.text) > MAX_BYTES:
            self.report.error("KT104", f"the file is over {MAX_BYTES // 1000} kB; a rule file is a few kB of YAML", start)
            return None
        if _UNREADABLE.search(source.text):
            self.report.error("KT103", "the text holds a NUL character or half of a surrogate pair; it isn't text", start)
            return None
        return compose(source, self.report, self.budget)

    def imports(self, source: SourceFile, root: Mapping) -> list[Document]:
        listed = root.get("import")
        if listed is None:
            return []
        found: list[Document] = []
        for entry in listed.items if isinstance(listed, Sequence) else (listed,):
            try:
                if entry is listed:
                    raise _Refused("`import` is a list of files, such as `import: [common.yaml]`")
                document = self.one(source, entry)
            except _Refused as refused:
                self.report.error(refused.code, str(refused), Origin(source.path, entry.span))
            else:
                if not any(document is other for other in found):
                    found.append(document)
        return found

    def one(self, source: SourceFile, entry: Node) -> Document:
        """The document that an entry of `import` names."""
        name = entry.value if isinstance(entry, Scalar) else None
        if not isinstance(name, str) or not name or "\0" in name:
            raise _Refused("each entry of `import` is the path of a rule file, relative to this one")
        try:
            path = Path(self.top if source.path == "-" else Path(source.path).parent, name).resolve()
        except (OSError, RuntimeError) as error:
            raise _Refused(f"can't import {name}: {error}") from None
        if os.path.isabs(name) or not path.is_relative_to(self.top):
            raise _Refused(f"can't import {name}: it is outside the folder of the file being compiled, {self.top}")
        if path in self.chain:
            cycle = " -> ".join(p.name for p in [*self.chain[self.chain.index(path) :], path])
            raise _Refused(f"importing {name} makes a cycle: {cycle}")
        if path not in self.done:
            shown = name if source.path == "-" else os.path.normpath(os.path.join(os.path.dirname(source.path), name))
            self.read(name, path, shown)
        if isinstance(self.done[path].root, Sequence):
            raise _Refused(
                f"can't import {name}: it is in the list form, and only native files (a mapping with `rules:`) are imported"
            )
        return self.done[path]

    def read(self, name: str, path: Path, shown: str) -> None:
        """Compose the imported file into `done`."""
        if len(self.done) + len(self.chain) >= MAX_FILES:
            raise _Refused(f"more than {MAX_FILES} files are imported", "KT104")
        if not path.is_file():
            what = "it isn't a file" if path.exists() else "there is no such file"
            raise _Refused(f"can't import {name}: {what} ({path})")
        try:
            imported = read_source(path)
        except CompileError as error:
            raise _Refused(f"can't import {name}: {error.report.items[0].message}", error.report.items[0].code) from None
        if len(imported.text) > self.bytes_left:
            raise _Refused(f"the files imported are over {MAX_BYTES // 1000} kB together", "KT104")
        self.document(SourceFile(shown, imported.text), path)
