"""The language server's reading of texts: columns in UTF-16, edits, and where a cursor stands in a file that doesn't parse."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("pygls", reason="the language server needs pygls")

from lsprotocol import types

from ktopt.checking.settings import read_settings
from ktopt.lsp.analysis import looks_like_rules, may_become_rules
from ktopt.lsp.complete import Around, Choice, complete
from ktopt.lsp.cursor import Cursor, cursor_at
from ktopt.lsp.project import Project
from ktopt.lsp.rules import Moved
from ktopt.lsp.text import Shown, Text
from ktopt.source import SourceFile, Span
from ktopt.trees import load_tree

CHARACTERS = st.sampled_from("ab: -'\"\n\r\t\u00e9\u4e2d\U0001f600\u0085\u2028\f")
TEXTS = st.text(CHARACTERS, max_size=60)


def utf16_lines(text: str) -> list[bytes]:
    """The lines of a text with their ends, in UTF-16: what an editor counts columns in."""
    return [line.encode("utf-16-le") for line in re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+\Z|\Z", text)]


def edited(text: str, start: tuple[int, int], end: tuple[int, int], new: str) -> str:
    """An edit made by an editor that holds UTF-16 lines: what `Text.changed` must come to."""
    lines = utf16_lines(text)

    def at(line: int, unit: int) -> int:
        body = lines[line].decode("utf-16-le").rstrip("\r\n").encode("utf-16-le")
        return sum(len(other) for other in lines[:line]) + 2 * min(unit, len(body) // 2)

    whole = b"".join(lines)
    return (whole[: at(*start)] + new.encode("utf-16-le") + whole[at(*end) :]).decode("utf-16-le")


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.data())
def test_an_edit_changes_a_text_as_it_changes_the_editors(text: str, data: st.DataObject) -> None:
    lines = utf16_lines(text)

    def position() -> tuple[int, int]:
        line = data.draw(st.integers(0, len(lines) - 1))
        body = lines[line].decode("utf-16-le").rstrip("\r\n")
        characters = data.draw(st.integers(0, len(body)))
        return line, len(body[:characters].encode("utf-16-le")) // 2

    start, end = sorted((position(), position()))
    new = data.draw(TEXTS)
    change = types.TextDocumentContentChangePartial(types.Range(types.Position(*start), types.Position(*end)), new)
    assert Text(text).changed(change).text == edited(text, start, end, new)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from(["utf-16", "utf-8", "utf-32"]))
def test_positions_and_offsets_agree(text: str, encoding: str) -> None:
    shown = Text(text, encoding)
    for offset in range(len(text) + 1):
        back = shown.offset(shown.position(offset))
        inside_a_line_end = text[offset - 1 : offset + 1] == "\r\n"
        assert back == (offset - 1 if inside_a_line_end else offset)


def test_columns_are_utf16_code_units_unless_agreed_otherwise() -> None:
    line = "# \U0001f600\u4e2d x"
    assert [Text(line, e).position(5).character for e in ("utf-16", "utf-8", "utf-32")] == [6, 10, 5]


def test_a_position_past_a_line_is_its_end_and_past_the_text_the_texts() -> None:
    text = Text("ab\r\ncd")
    assert [text.offset(types.Position(*p)) for p in ((0, 99), (1, 99), (7, 0))] == [2, 6, 6]


def test_a_change_without_a_range_replaces_everything() -> None:
    assert Text("old").changed(types.TextDocumentContentChangeWholeDocument("new")).text == "new"


def test_spans_of_yaml_lines_become_editor_ranges_across_separators_and_a_byte_order_mark() -> None:
    text = Text("\ufeffa: 1 # \u2028\r\n\U0001f600: x\r\n")
    shown = Shown.of(text, "r.yaml")
    assert shown.source == SourceFile("r.yaml", text.text[1:])
    assert shown.range(Span.at(1, 1, 1)) == text.range(1, 2)
    assert shown.range(Span.at(3, 4, 1)) == types.Range(types.Position(1, 4), types.Position(1, 5))


def test_lines_move_with_what_is_inserted_before_them() -> None:
    moved = Moved.between(Text("a\nb\nc\nd"), Text("a\nx\ny\nc\nd"))
    assert [moved.to_new(n) for n in range(4)] == [0, None, 3, 4]
    assert [moved.to_old(n) for n in range(5)] == [0, None, None, 2, 3]


@pytest.mark.parametrize(
    "text",
    [
        "- match:\n",
        "\ufeff- match:\r\n",
        "# note\n---\n- replace:\n    class: default\n",
        "version: 1\nlet:\n  a: b\n",
        "rules:\n- match: x\n",
    ],
)
def test_rule_files_are_known_by_their_look(text: str) -> None:
    assert looks_like_rules(text)


@pytest.mark.parametrize(
    "text",
    [
        "name: ci\non: push\njobs: {}\n",
        "version: '3'\nservices:\n  a: {}\n",
        "- hosts: all\n  tasks:\n    - replace:\n        path: /etc\n",
        "route:\n  routes:\n  - match:\n      severity: page\n",
        "apiVersion: v1\nrules:\n- apiGroups: ['']\n",
    ],
)
def test_other_yaml_files_are_left_alone(text: str) -> None:
    assert not looks_like_rules(text)
    assert not may_become_rules(text)


@pytest.mark.parametrize("text", ["", "- ma", "version: 1\nru", "# a comment\n"])
def test_the_beginning_of_a_rule_file_is_helped_with(text: str) -> None:
    assert may_become_rules(text)


def cursor(text: str) -> Cursor | None:
    """The cursor at the last | of a text."""
    at = text.rindex("|")
    return cursor_at(Text(text[:at] + text[at + 1 :]), at)


LIST = "- match:\n    name: x\n  replace:\n    class: KTransformersLinear\n    kwargs:\n      generate_op: KLinearTorch\n"


@pytest.mark.parametrize(
    ("text", "path", "key", "typed"),
    [
        ("- ma|", ("-",), None, "ma"),
        ("- match:\n    na|\n  replace: [", ("-", "match"), None, "na"),
        (LIST + "      ge|", ("-", "replace", "kwargs"), None, "ge"),
        (LIST + "      prefill_op: KLi|", ("-", "replace", "kwargs"), "prefill_op", "KLi"),
        (LIST + "  rec|", ("-",), None, "rec"),
        (LIST + "|", (), None, ""),
        (LIST.replace("\n", "\r\n") + "      ge|\r\n", ("-", "replace", "kwargs"), None, "ge"),
        ("rules:\n- id: a\n  match: '@mod|", ("rules", "-"), "match", "@mod"),
        ("rules:\n  - match:\n      '@mod|", ("rules", "-"), "match", "@mod"),
        ("rules:\n  - kwargs: {a: 1, gen|", ("rules", "-", "kwargs"), None, "gen"),
        ("rules:\n  - kwargs: {a: b,\n      c: d|", ("rules", "-", "kwargs"), "c", "d"),
        ("rules:\n  - match: {name: 'x|', class: y}\n", ("rules", "-", "match"), "name", "x"),
        ('let:\n  a: "$b|"\n', ("let",), "a", "$b"),
        ("import: [a.yaml, b|]\n", ("import", "-"), None, "b"),
        ('place:\n  "cu|": x\n', ("place",), None, "cu"),
    ],
)
def test_a_cursor_knows_its_place_from_the_lines_around(text: str, path: tuple[str, ...], key: str | None, typed: str) -> None:
    found = cursor(text)
    assert found is not None
    assert (found.path, found.key, found.typed) == (path, key, typed)


@pytest.mark.parametrize("text", ["a: b # c|", "a: 'b' |", "- match:|"])
def test_there_is_no_cursor_in_comments_and_behind_what_is_finished(text: str) -> None:
    assert cursor(text) is None


@settings(max_examples=400, deadline=None)
@given(st.text(st.sampled_from("a:- {}[]'\"#,\n\t@$|\\\r"), max_size=80), st.data())
def test_no_text_is_too_odd_for_a_cursor(text: str, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, len(text)))
    found = cursor_at(Text(text), offset)
    if found is not None:
        assert found.start <= offset <= found.end
        assert not {"\n", "\r"} & set(text[found.start : found.end])
        assert text[found.start : offset].startswith(found.typed)
    complete(Text(text), offset, Around({}, {}, Path("/nonexistent")))


GRAPHS = {"deepseek-v3": load_tree("deepseek-v3")}


def choices(text: str) -> list[Choice]:
    at = text.rindex("|")
    return complete(Text(text[:at] + text[at + 1 :]), at, Around(GRAPHS, {"imported": "@lm_head"}, Path("/nonexistent")))


def labels(text: str) -> list[str]:
    return [choice.label for choice in choices(text)]


def native(selector: str) -> str:
    return f'version: 1\nlet:\n  gpu: layer in 0..3\nrules:\n  - match: "{selector}"\n    replace: default\n'


def test_keys_that_are_there_already_are_not_offered() -> None:
    assert labels("- match:\n    name: x\n  |\n  recursive: false\n") == ["replace"]
    assert labels(native("x") + "    |") == ["id", "kwargs", "when", "expect", "recursive"]
    assert labels(LIST + "      |")[:2] == ["generate_device", "prefill_device"]
    assert "generate_op" not in labels(LIST + "      |")


def test_operators_are_offered_by_both_their_names() -> None:
    found = labels("- match:\n    name: x\n  replace:\n    class: |")
    assert found[0] == "default"
    assert {"KTransformersLinear", "ktransformers.operators.linear.KTransformersLinear"} <= set(found)


def test_a_kwargs_values_are_its_operators() -> None:
    assert "KLinearMarlin" in labels(LIST + "      prefill_op: |")
    assert labels("- replace:\n    class: KDeepseekV2Attention\n    kwargs:\n      absorb_for_prefill: |") == [
        "true",
        "false",
        "auto",
    ]
    assert "cuda:0" in labels(LIST + "      generate_device: |")
    assert next(c.insert for c in choices(LIST + "      generate_device: |") if c.label == "cuda:0") == '"cuda:0"'


def test_globs_go_down_the_tree_segment_by_segment() -> None:
    assert labels(native("@|"))[:2] == ["model", "lm_head"]
    assert labels(native("@model.layers.|")) == ["*", "{0..60}", "**"]
    assert set(labels(native("@model.layers.{3..9}.mlp.|"))) == {"experts", "gate", "shared_experts", "**"}
    assert "q_a_proj" in labels(native("$gpu & @**.self_attn.|"))


def test_a_selectors_other_words_are_offered_where_they_fit() -> None:
    assert {"class=", "layer", "under(", "@", "$gpu", "$imported"} <= set(labels(native("|")))
    assert set(labels(native("class=|"))) >= {"Linear", "DeepseekV3MoE"}
    assert labels(native("layer in 0..3 & $|")) == ["$imported", "$gpu"]
    assert "num_hidden_layers" in labels(native("config.|"))
    assert labels(native("x") + "    when: '|'") == ["hw.", "config."]


@pytest.mark.parametrize(("quote", "dot"), [('"', r"\\."), ("'", r"\.")])
def test_regexes_over_paths_go_on_where_they_match(quote: str, dot: str) -> None:
    def after(pattern: str) -> list[str]:
        return labels(f"- match:\n    name: {quote}{pattern.replace('.', dot)}|")

    assert after("^") == ["model", "lm_head"]
    assert set(after("^model.")) == {"embed_tokens", "layers", "norm", "rotary_emb"}
    assert after("^model.layers.")[0] == ("\\\\d+" if quote == '"' else "\\d+")
    assert "kv_b_proj" in after("^model.layers.([0-9]|1[0-4]).self_attn.")
    assert after("^model.layers.(") != []


def test_class_names_are_offered_as_rule_files_write_them() -> None:
    found = labels("- match:\n    class: |")
    assert "torch.nn.Linear" in found
    assert "ktransformers.models.modeling_deepseek_v3.MoEGate" in found


def test_a_choice_takes_the_place_of_the_whole_word() -> None:
    text = "- replace:\n    class: KTransfo|rmersFoo # why\n"
    choice = next(c for c in choices(text) if c.label == "KTransformersLinear")
    plain = text.replace("|", "")
    assert plain[: choice.start] + choice.insert + plain[choice.end :] == "- replace:\n    class: KTransformersLinear # why\n"


def test_codes_and_models_are_offered_in_comments() -> None:
    assert "KT305" in labels("- match: # ktopt: ignore[KT301, |")
    assert "deepseek-v3" in labels("# ktopt: model=|")
    assert labels("# nothing of ours |") == []


def wanted(project: Project, folder: Path, text: str = "") -> tuple[tuple[str, ...], list[str]]:
    path = str(folder / "rules.yaml")
    found = project.wanted(SourceFile(path, text), path)
    return found.models, [problem.message for problem in found.problems]


def test_a_comment_goes_before_the_editor_and_the_editor_before_the_project(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.ktopt]\nmodels = ["mixtral-8x7b"]\n')
    project = Project(tmp_path)
    assert wanted(project, tmp_path) == (("mixtral-8x7b",), [])
    project.configure({"ktopt": {"models": ["deepseek-v2"]}})
    assert wanted(project, tmp_path) == (("deepseek-v2",), [])
    assert wanted(project, tmp_path, "# ktopt: model=deepseek-v3, kimi-k2\n") == (("deepseek-v3", "kimi-k2"), [])


def test_a_comment_cannot_have_files_read_outside_the_project(tmp_path: Path) -> None:
    inside = tmp_path / "work"
    inside.mkdir()
    (tmp_path / "config.json").write_text("{}")
    models, problems = wanted(Project(inside), inside, "# ktopt: model=../config.json\n")
    assert models == ()
    assert "../config.json is no shipped model" in problems[0]


@pytest.mark.parametrize("value", [{"models": 3}, {"hardware": []}, {"ignore": ["XY9"]}])
def test_editor_settings_that_cannot_be_meant_are_a_problem_of_each_file(value: object, tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.configure(value)
    assert [m for m in wanted(project, tmp_path)[1] if "the editor's setting ktopt." in m]


def test_a_broken_pyproject_is_a_problem_of_each_file(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.ktopt]\nmodles = []\n")
    assert "no key modles" in wanted(Project(tmp_path), tmp_path)[1][0]


DOCS = Path(__file__).parent.parent / "docs" / "editors.md"


def blocks(language: str) -> list[str]:
    """The code blocks of docs/editors.md in a language."""
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


def test_the_settings_that_the_docs_show_are_what_they_say() -> None:
    (table,) = [tomllib.loads(text)["tool"]["ktopt"] for text in blocks("toml") if "tool.ktopt" in text]
    assert read_settings(table, Path("pyproject.toml")).models == ("deepseek-v3", "models/ours/config.json")
    server, schemas = [json.loads(text) for text in blocks("json")]
    assert (server["glspc.server.command"], *server["glspc.server.commandArguments"]) == ("ktopt", "lsp")
    assert list(schemas["yaml.schemas"].values()) == [["rules/**/*.yaml"]]
    (modeline,) = [text for text in blocks("yaml") if "model=" in text]
    assert wanted(Project(), Path("/nonexistent"), modeline)[0] == ("deepseek-v3", "kimi-k2")


@pytest.mark.parametrize(("text", "offered", "left_out"), [
    ("version: 1\nlong_context:\n  block_size: 64\n  |", {"max_seq_len", "anchor_type"}, {"block_size", "disk_path"}),
    ("version: 1\nkvc2:\n  d|", {"disk_path", "cpu_memory_size_GB"}, {"block_size"}),
    ("version: 1\nlong_context:\n  anchor_type: |", {"QUEST", "KEY_INT4"}, {"FP16"}),
    ("version: 1\nkvc2: {gpu_only: |", {"true", "false"}, set()),
])  # fmt: skip
def test_settings_of_long_contexts_are_completed(text: str, offered: set[str], left_out: set[str]) -> None:
    labels = {choice.label for choice in complete(Text(text.replace("|", "")), text.index("|"), Around({}, {}, Path()))}
    assert offered <= labels
    assert not left_out & labels
