"""The normal form of rule files: what it looks like, and that nothing is lost on the way to it."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ktopt.authoring.commented import read_commented
from ktopt.authoring.fmt import format_text
from ktopt.cli import main
from ktopt.diagnostics import CompileError, KtoptError, Report
from ktopt.parse.compose import Budget, compose
from ktopt.source import SourceFile, plain

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "cases"
REAL = sorted((SHARED / "upstream_rules").rglob("*.yaml"))

LIST = """\
# about the file
- replace:
    kwargs: {prefill_device: "cpu",  generate_device: 'cuda:1'}   # both
    class: "default"
  recursive: False # stays out of
  # which ones
  match:
      name: "^model\\\\.layers\\\\.(0|[1-9])\\\\.it's$"  # a regex
      class: torch.nn.Linear
# the next one
- match: {name: ^lm_head}
  replace: {class: default}

# the end
"""

NATIVE = """\
# yaml-language-server: $schema=ruleset.schema.json
# about the file

# the rules
rules:
- match: '@model.layers.*'   # which
  id: "first"
  replace: KTransformersLinear
- {replace: default, id: second, match: "class=Linear"}
version: 1
let: {a: "@x", # one
  b: '@y'}
place:
    "cuda:0": "layer in 0..29"


    # the rest
    cpu: '@model.embed_tokens'
"""


def formatted(text: str) -> str:
    return format_text(SourceFile("rules.yaml", text))


def values(text: str) -> object:
    report = Report()
    root = compose(SourceFile("rules.yaml", text), report, Budget())
    assert not report.errors
    return plain(root)


def test_a_list_form_file_in_normal_form() -> None:
    assert (
        formatted(LIST)
        == """\
# about the file
# which ones
- match:
    name: '^model\\.layers\\.(0|[1-9])\\.it''s$'  # a regex
    class: torch.nn.Linear
  replace:
    class: default
    kwargs: {prefill_device: cpu, generate_device: cuda:1}  # both
  recursive: false  # stays out of

# the next one
- match: {name: '^lm_head'}
  replace: {class: default}

# the end
"""
    )


def test_a_native_file_in_normal_form() -> None:
    assert (
        formatted(NATIVE)
        == """\
# yaml-language-server: $schema=ruleset.schema.json
# about the file

version: 1
let:
  a: "@x"  # one
  b: "@y"
place:
  "cuda:0": "layer in 0..29"

  # the rest
  cpu: "@model.embed_tokens"

# the rules
rules:
  - id: first
    match: "@model.layers.*"  # which
    replace: KTransformersLinear

  - {id: second, match: "class=Linear", replace: default}
"""
    )


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("'plain'", "plain"),
        ('"no"', '"no"'),
        ('"1e3"', '"1e3"'),
        ('"a b"', '"a b"'),
        ("'a: b'", '"a: b"'),
        ("a b", "a b"),
        ('"a\\tb"', '"a\\tb"'),
        ("'say \"x\"'", "'say \"x\"'"),
        ("Yes", "true"),
        ("~", "null"),
        ("010", "010"),
        ('"cuda:0"', "cuda:0"),
        ('"\\\\d"', "'\\d'"),
        ("|-\n        one\n        two", "|-\n        one\n        two"),
        ('"line\\nbreak"', '"line\\nbreak"'),
    ],
)
def test_a_value_is_written_in_one_way(written: str, normal: str) -> None:
    text = formatted(f"- match: {{class: X}}\n  replace:\n    class: default\n    kwargs:\n      key: {written}\n")
    assert text.partition("key: ")[2] == f"{normal}\n"


@pytest.mark.parametrize("path", REAL, ids=lambda p: str(p.relative_to(SHARED / "upstream_rules")))
def test_a_real_file_keeps_its_meaning_and_its_comments(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    made = formatted(text)
    assert values(made) == values(text)
    assert read_commented(SourceFile("", made)).comments() == read_commented(SourceFile("", text)).comments()
    assert formatted(made) == made


def test_real_files_are_there() -> None:
    if not REAL:
        pytest.skip("the files that KTransformers shipped are not in this checkout")
    assert len(REAL) == 26


@pytest.mark.parametrize("path", sorted((ROOT / "rules").rglob("*.yaml")), ids=lambda p: p.stem)
def test_rule_sets_that_ship_are_in_normal_form(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert formatted(text) == text


def test_lines_end_as_they_did() -> None:
    made = formatted(LIST.replace("\n", "\r\n"))
    assert made == formatted(LIST).replace("\n", "\r\n")


def test_keys_stay_where_an_anchor_is_used_after_it_is_set() -> None:
    text = "- replace: &r\n    class: default\n  match: *r\n"
    assert formatted(text) == text


def test_several_brackets_are_broken_where_a_comment_stands_in_them() -> None:
    made = formatted("- match: {name: x, # why\n    class: Y}\n  replace: {class: default}\n")
    assert made.startswith("- match:\n    name: 'x'  # why\n    class: Y\n")


@pytest.mark.parametrize("text", ["- match: {name: [\n", "a: 1\na: 2\n", "- match: !!python/object:os.system {}\n"])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(CompileError):
        formatted(text)


@pytest.mark.parametrize("text", ["hello\n", "- a\n- b\n", "name: my workstation\nram: 128GiB\n"])
def test_other_yaml_is_left_alone(text: str) -> None:
    with pytest.raises(KtoptError, match="not a rule file"):
        formatted(text)


SNIPPETS = [
    "# note",
    "\n",
    "  ",
    "- ",
    "{",
    "}",
    "'",
    '"',
    ": ",
    "&a ",
    "*a",
    "|\n",
    "\t",
    "\r\n",
    "a: b\n",
    "---\n",
    "no",
    "~",
    "é",
    "\\",
]
SOURCES = [LIST, NATIVE, *(p.read_text(encoding="utf-8")[:1500] for p in REAL[::6])]


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_whatever_is_written_into_a_file_its_normal_form_says_the_same_once_and_for_all(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(SOURCES))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        if data.draw(st.booleans()):
            at = text.find("\n", at) + 1
            text = text[:at] + " " * data.draw(st.integers(0, 7)) + f"# c{data.draw(st.integers(0, 99))}\n" + text[at:]
        else:
            text = text[:at] + data.draw(st.sampled_from(SNIPPETS)) + text[at + data.draw(st.integers(0, 3)) :]
    try:
        made = formatted(text)
    except KtoptError:
        return
    assert values(made) == values(text)
    assert read_commented(SourceFile("", made)).comments() == read_commented(SourceFile("", text)).comments()
    assert formatted(made) == made


class TestCommand:
    def test_it_rewrites_a_file_and_then_leaves_it(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "rules.yaml"
        path.write_text(LIST, encoding="utf-8")
        assert main(["fmt", str(path)]) == 0
        assert path.read_text(encoding="utf-8") == formatted(LIST)
        capsys.readouterr()
        assert main(["fmt", str(path)]) == 0
        assert "0 files changed, 1 file in normal form already" in capsys.readouterr().err

    def test_check_names_the_file_and_writes_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "rules.yaml"
        path.write_text(LIST, encoding="utf-8")
        assert main(["fmt", "--check", str(path)]) == 1
        assert path.read_text(encoding="utf-8") == LIST
        assert "is not in normal form" in capsys.readouterr().out

    def test_diff_shows_what_would_change(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "rules.yaml"
        path.write_text(LIST, encoding="utf-8")
        assert main(["fmt", "--diff", str(path)]) == 1
        assert re.search(r"^\+  recursive: false", capsys.readouterr().out, re.MULTILINE)
        assert path.read_text(encoding="utf-8") == LIST

    def test_standard_input_goes_to_standard_output(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(NATIVE.encode())))
        assert main(["fmt", "-"]) == 0
        assert capsys.readouterr().out == formatted(NATIVE)

    def test_a_file_that_cannot_be_read_stays_as_it_is(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "bad.yaml"
        path.write_text("- match: {\n", encoding="utf-8")
        assert main(["fmt", str(path)]) == 1
        captured = capsys.readouterr()
        assert "KT101" in captured.err
        assert path.read_text(encoding="utf-8") == "- match: {\n"
