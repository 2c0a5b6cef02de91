"""Parsing: PyYAML's values with their places kept, helpful syntax errors, imports, and hostile text answered fast."""

from __future__ import annotations

import io
import random
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rulefiles import CASES, lines, needs_cases, only, parsed

from ktopt.diagnostics import CompileError, Report
from ktopt.parse import MAX_BYTES, parse, read_source
from ktopt.parse.compose import MAX_NODES
from ktopt.source import Mapping, Scalar, Sequence, Span, plain

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise(LETTERS))


@pytest.mark.parametrize("text", [
    "yes", "No", "on", "OFF", "true", "~", "null", "", "010", "0x1F", "0b101", "1_000", "1:30", "12e3", "1.5", ".inf", "-.5",
    "'yes'", '"010"', "2024-01-31", "=", "a b", "!!str 12", "! 12", "!!int '12'", "|\n  x\n  y", ">\n  x\n  y",
])  # fmt: skip
def test_a_scalar_has_the_value_that_pyyaml_gives_it(text: str) -> None:
    document, report = parsed(f"key: {text}\n")
    expected = yaml.safe_load(f"key: {text}\n") if text != "=" else {"key": "="}
    assert plain(document.root) == expected
    assert not report.items


@needs_cases
def test_every_shared_file_parses_to_what_pyyaml_makes_of_it() -> None:
    seen = 0
    for path in sorted(CASES.rglob("*.yaml")):
        report = Report()
        document = parse(read_source(path), report)
        if not report.items:
            assert plain(document.root) == yaml.safe_load(path.read_text(encoding="utf-8")), path
            seen += 1
    assert seen > 40


@settings(max_examples=150, deadline=None)
@given(st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text("ab:#'\"\\ é-0*&!\n", max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1, max_size=3), inner, max_size=3),
    max_leaves=12,
))  # fmt: skip
def test_what_pyyaml_writes_is_read_back(value: object) -> None:
    document, report = parsed(yaml.safe_dump(value, allow_unicode=True))
    assert not report.items
    assert plain(document.root) == value


def test_nodes_keep_their_places() -> None:
    document, _ = parsed("- match:\n    name: 'a.b'   # why\n  list: [1, {x: y}]\n- z\n")
    root = document.root
    assert isinstance(root, Sequence)
    first = root.items[0]
    assert isinstance(first, Mapping)
    match, listed = first.get("match"), first.get("list")
    assert isinstance(match, Mapping)
    assert isinstance(listed, Sequence)
    name = match.get("name")
    assert isinstance(name, Scalar)
    assert (name.span, name.style, name.raw) == (Span.at(2, 11, 5), "'", "'a.b'")
    assert (match.span.start.line, match.span.end.line) == (2, 2)
    assert listed.span == Span.at(3, 9, 11)
    assert first.span.end == listed.span.end


@pytest.mark.parametrize(
    ("written", "offset", "column"), [("a.b", 2, 3), ("'a''b'", 2, 5), (r'"\\.b"', 1, 4), (r'"\x41b"', 1, 6), ("'ab'", 0, 2)]
)
def test_a_part_of_a_scalar_is_found_behind_quotes_and_escapes(written: str, offset: int, column: int) -> None:
    document, _ = parsed(written)
    assert isinstance(document.root, Scalar)
    assert document.root.part(offset).start.column == column


@pytest.mark.parametrize(("text", "place", "said"), [
    ('- match:\n    name: "^model\\.x"\n', (2, 18), 'unknown escape "\\." in a double-quoted scalar; write "\\\\."'),
    ("a:\n\t- b\n", (2, 1), "a tab can't indent"),
    ("a: b: c\n", (1, 5), "a second `: ` on one line"),
    ("a: @x\n", (1, 4), "can't begin with @"),
    ("match: *.mlp\n", (1, 8), "`*` begins a reference"),
    ("- a: 1\n  b: 2\n c: 3\n", (3, 2), "indented to column 2; the block that began at line 1 stands at column 1"),
    ("- match:\n    name: x\n   class: y\n", (3, 4), "indented to column 4; the block that began at line 1 stands at column 3"),
    ('a: "xyz\n\nb: 1\n', (1, 4), "the quote that opens here is never closed"),
    ("a: [1, 2\nb: 3\n", (2, 2), "`]` is missing"),
    ("a: 'x'y\n", (1, 7), "text after the end of a value"),
    ("a: - b\n", (1, 4), "a list item (`- `) can't begin on this line"),
    ("a:b\nc: d\n", (2, 2), "a `key:` can't stand here"),
    ("- a\nb: c\n", (2, 1), "a key where an item (`- `)"),
    ("version: 1\n- match: {name: x}\n", (2, 1), "a list where a key of the mapping was expected"),
    ("a:\n  op:\"X\"\n  b: c\n", (2, 5), "no space after the colon"),
    ('a: "x\nb: c\nd: "y"\n', (1, 4), "the quote that opens here is closed only in line 3"),
    ("a: \x01\n", (1, 4), "U+0001"),
])  # fmt: skip
def test_a_syntax_error_has_a_place_and_a_remedy(text: str, place: tuple[int, int], said: str) -> None:
    document, report = parsed(text)
    finding = only(report)
    assert document.root is None
    assert finding.code == "KT101"
    assert (finding.span.start.line, finding.span.start.column) == place
    assert said in finding.message


@pytest.mark.parametrize(("text", "code", "line"), [
    ("a: 1\nb: 2\na: 3\n", "KT102", 3),
    ("a: 1\n---\nb: 2\n", "KT107", 2),
    ("a: !!python/object/apply:os.system ['true']\n", "KT105", 1),
    ("match: !class=Linear\n", "KT105", 1),
    ("x: 1\na: *nowhere\n", "KT106", 2),
    ("a: &a [1, *a]\n", "KT106", 1),
    ("a: {<<: 3}\n", "KT106", 1),
    ("{{rules}}: x\n", "KT108", 1),
    ("a: 0b_\n", "KT101", 1),
    ("a: 2024-99-99\n", "KT101", 1),
])  # fmt: skip
def test_what_yaml_allows_and_a_rule_file_must_not_have_is_refused(text: str, code: str, line: int) -> None:
    _, report = parsed(text)
    finding = only(report)
    assert (finding.code, finding.span.start.line) == (code, line)


def test_a_rule_without_its_dash_is_told_where_to_put_one() -> None:
    _, report = parsed("- match: {name: a}\n  replace: {class: default}\n  match: {name: b}\n")
    assert (only(report).code, only(report).help) == ("KT102", "begin the rule with `- `")


def test_of_a_duplicate_key_the_first_is_kept() -> None:
    document, report = parsed("a: 1\na: 2\n")
    assert plain(document.root) == {"a": 1}
    assert "first at line 1" in only(report).message


def test_aliases_and_merge_keys_mean_what_pyyaml_says() -> None:
    text = "base: &b {x: 1, y: 2}\nmore: &m {y: 3, z: 4}\none: {<<: *b, x: 9}\ntwo: {<<: [*b, *m], w: 0}\nlist: [*b, *b]\n"
    document, report = parsed(text)
    assert not report.items
    assert plain(document.root) == yaml.safe_load(text)


HOSTILE = {
    "an alias bomb": (BOMB, "KT104"),
    "a bomb of merge keys": (
        "a: &a {" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}\nb: [" + "{<<: *a}, " * 3000 + "]\n",
        "KT104",
    ),
    "deep flow nesting": ("[" * 400_000, "KT101"),
    "deep block nesting": ("- " * 400_000, "KT104"),
    "deep, all closed": ("[" * 200 + "]" * 200, "KT104"),
    "very many nodes": ("[" + "a," * 400_000 + "]", "KT104"),
    "very many mappings": ("[" + "{a: b}," * 130_000 + "]", "KT104"),
    "a base-60 number of 400,000 parts": ("a: " + "1:" * 400_000 + "1", None),
    "a number of 900,000 digits": ("a: " + "9" * 900_000, None),
    "a scalar of 900,000 characters": ("a: '" + "x" * 900_000 + "'", None),
    "a tag of 900,000 characters": ("!" * 900_000, "KT105"),
    "over a megabyte": ("#" * (MAX_BYTES + 1), "KT104"),
    "a NUL": ("a: b\0c", "KT103"),
    "half a surrogate pair": ("a: \ud800", "KT103"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_answered_within_a_second(name: str) -> None:
    text, code = HOSTILE[name]
    start = time.process_time()
    _, report = parsed(text)
    assert time.process_time() - start < 1.0
    assert [d.code for d in report] == ([code] if code else [])


def test_random_text_never_raises() -> None:
    rng = random.Random(7)
    for _ in range(3000):
        text = "".join(rng.choices("ab:- \n'\"[]{},&*!|>%@\\#?<~01.\t", k=rng.randint(1, 30)))
        parsed(text)


def test_the_limit_of_nodes_counts_each_use_of_an_alias() -> None:
    text = "a: &a [" + "x, " * 999 + "]\nb: [" + "*a, " * (MAX_NODES // 1000 + 1) + "]\n"
    assert only(parsed(text)[1]).code == "KT104"
    assert not parsed(text.replace("*a", "x"))[1].items


def test_a_byte_order_mark_is_tolerated(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: b\n")
    report = Report()
    assert plain(parse(read_source(file), report).root) == {"a": "b"}
    assert not report.items


@pytest.mark.parametrize(("data", "line", "column", "said"), [
    (b"a: b\nc: \xff\xff\n", 2, 4, "isn't UTF-8 text: byte 0xFF"),
    ("a: b".encode("utf-16"), 1, 1, "is UTF-16"),
    (b"a: b\nc\0d: e\n", 2, 2, "NUL"),
    (b" " * (MAX_BYTES + 1), 1, 1, "is over 1000 kB"),
])  # fmt: skip
def test_a_file_that_is_no_text_is_an_error_with_a_place(tmp_path: Path, data: bytes, line: int, column: int, said: str) -> None:
    file = tmp_path / "rules.yaml"
    file.write_bytes(data)
    with pytest.raises(CompileError) as raised:
        read_source(file)
    finding = only(raised.value.report)
    assert (finding.span.start.line, finding.span.start.column) == (line, column)
    assert said in finding.message
    assert finding.file == str(file)


def test_a_file_that_is_not_there_or_a_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "none.yaml", "none.yaml can't be read: No such file"),
        (tmp_path, "can't be read: Is a directory"),
    ):
        with pytest.raises(CompileError, match=said):
            read_source(path)
    with pytest.raises(CompileError, match="can't be read"):
        read_source("a\0b")


def test_a_huge_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    file = tmp_path / "huge.yaml"
    with open(file, "wb") as out:
        out.truncate(1 << 40)
    start = time.process_time()
    with pytest.raises(CompileError, match="is over 1000 kB"):
        read_source(file)
    assert time.process_time() - start < 1


def test_standard_input_is_read_for_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a: b\n")))
    source = read_source("-")
    assert (source.path, source.text) == ("-", "a: b\n")


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / "top.yaml"


def imported(path: Path) -> tuple[list[str], Report]:
    report = Report()
    document = parse(read_source(path), report)
    return [Path(d.source.path).name for d in document.imports], report


def test_imports_are_read_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    write(inner, b="import: [../c.yaml]\nrules: []\n")
    top = write(tmp_path, top="import: [inner/b.yaml, c.yaml]\nrules: []\n", c="rules: []\n")
    report = Report()
    document = parse(read_source(top), report)
    assert not report.items
    assert [d.source.path for d in document.imports] == [str(tmp_path / "inner/b.yaml"), str(tmp_path / "c.yaml")]
    assert document.imports[0].imports[0] is document.imports[1]


@pytest.mark.parametrize(("entry", "said"), [
    ("/etc/passwd", "it is outside the folder"),
    ("../outside.yaml", "it is outside the folder"),
    ("link.yaml", "it is outside the folder"),
    ("none.yaml", "there is no such file"),
    ("folder", "it isn't a file"),
    ("top.yaml", "makes a cycle: top.yaml -> top.yaml"),
    ("a.yaml", "makes a cycle: top.yaml -> a.yaml -> top.yaml"),
    ("list.yaml", "it is in the list form"),
    ("binary.yaml", "isn't UTF-8"),
    ("[1]", "each entry of `import` is the path"),
    ("''", "each entry of `import` is the path"),
])  # fmt: skip
def test_an_import_that_must_not_be_followed_is_an_error_at_its_entry(tmp_path: Path, entry: str, said: str) -> None:
    home = tmp_path / "home"
    (home / "folder").mkdir(parents=True)
    (tmp_path / "outside.yaml").write_text("rules: []\n")
    (home / "link.yaml").symlink_to(tmp_path / "outside.yaml")
    (home / "binary.yaml").write_bytes(b"a: \xff")
    top = write(home, top=f"version: 1\nimport:\n  - {entry}\n", a="import: [top.yaml]\n", list="- match: {name: a}\n")
    names, report = imported(top)
    finding = only(report)
    assert said in finding.message
    assert finding.code == ("KT103" if "UTF-8" in said else "KT109")
    assert finding.span.start.line == (1 if entry == "a.yaml" else 3)
    assert names == (["a.yaml"] if entry == "a.yaml" else [])


def test_imports_share_one_budget(tmp_path: Path) -> None:
    many = ", ".join(f"f{i}.yaml" for i in range(80))
    top = write(tmp_path, top=f"import: [{many}]\n", **{f"f{i}": "rules: []\n" for i in range(80)})
    assert {d.code for d in imported(top)[1]} == {"KT104"}
    big = "# " + "x" * 400_000 + "\n"
    top = write(tmp_path, top="import: [f0.yaml, f1.yaml, f2.yaml]\n", f0=big, f1=big, f2=big)
    assert "over 1000 kB together" in only(imported(top)[1]).message


def test_an_error_at_the_end_of_a_last_line_without_a_line_end_stands_in_the_file() -> None:
    document, report = parsed("a: 1\nb")
    assert document.root is None
    assert lines(report) == [("KT101", 2)]
