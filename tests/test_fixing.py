"""Fixes: chosen so that they don't overlap, applied until nothing is left, written whole or not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from rulefiles import CASES, needs_cases

from ktopt.checking.fixing import apply_edits, choose, fix_source, unified_diff, write_atomically
from ktopt.compiler import run_stages
from ktopt.diagnostics import Diagnostic, Edit, Fix, KtoptError, Severity
from ktopt.source import Position, SourceFile, Span


def at(line: int, start: int, end: int) -> Span:
    return Span(Position(line, start), Position(line, end))


def finding(*edits: tuple[Span, str], safe: bool = True, file: str = "r") -> Diagnostic:
    made = tuple(Edit(file, span, text) for span, text in edits)
    return Diagnostic("KT202", Severity.ERROR, "m", "r", made[0].span, fix=Fix("mend", made, safe))


def words(**mend: str) -> object:
    """A check that finds each of some words once, with a fix that writes another."""

    def check(source: SourceFile) -> list[Diagnostic]:
        found = []
        for wrong, right in mend.items():
            where = source.text.find(wrong)
            if where >= 0:
                span = Span(source.position(where), source.position(where + len(wrong)))
                found.append(finding((span, right)))
        return found

    return check


class TestChoose:
    def test_of_two_that_overlap_the_first_is_taken(self) -> None:
        source = SourceFile("r", "abcdef\n")
        first, second, third = finding((at(1, 1, 4), "x")), finding((at(1, 3, 5), "y")), finding((at(1, 5, 6), "z"))
        assert choose(source, [second, third, first]) == [first, third]

    def test_neighbours_do_not_overlap_but_an_insertion_between_them_does(self) -> None:
        source = SourceFile("r", "abcdef\n")
        left, right, between = finding((at(1, 1, 3), "x")), finding((at(1, 3, 5), "y")), finding((at(1, 3, 3), "z"))
        assert choose(source, [left, right]) == [left, right]
        assert choose(source, [left, between]) == [left]

    def test_a_fix_of_several_edits_is_taken_whole_or_not(self) -> None:
        source = SourceFile("r", "abcdef\nghi\n")
        single, double = finding((at(1, 1, 2), "x")), finding((at(1, 4, 5), "y"), (at(1, 1, 3), "z"))
        assert choose(source, [double, single]) == [single]

    def test_unsafe_ones_and_those_of_another_file_are_left_out(self) -> None:
        source = SourceFile("r", "abcdef\n")
        unsafe, elsewhere = finding((at(1, 1, 2), "x"), safe=False), finding((at(1, 3, 4), "y"), file="other")
        assert choose(source, [unsafe, elsewhere]) == []
        assert choose(source, [unsafe, elsewhere], unsafe=True) == [unsafe]


class TestApply:
    def test_edits_are_made_at_their_places_whatever_their_order(self) -> None:
        source = SourceFile("r", "one\ntwo\nthree\n")
        edits = [Edit("r", at(1, 1, 4), "1"), Edit("r", at(3, 1, 6), "3"), Edit("r", at(2, 4, 4), "!")]
        assert apply_edits(source, edits) == apply_edits(source, edits[::-1]) == "1\ntwo!\n3\n"

    def test_new_lines_end_as_the_files_own(self) -> None:
        assert apply_edits(SourceFile("r", "a\r\nb\r\n"), [Edit("r", at(2, 1, 1), "x\n")]) == "a\r\nx\r\nb\r\n"

    def test_columns_count_characters_not_bytes(self) -> None:
        assert apply_edits(SourceFile("r", "日本: a\n"), [Edit("r", at(1, 5, 6), "b")]) == "日本: b\n"


class TestLoop:
    def test_what_a_fix_brings_to_light_is_mended_in_the_next_round(self) -> None:
        fixed = fix_source(SourceFile("r", "a: one\n"), words(one="two", two="three"))  # type: ignore[arg-type]
        assert (fixed.source.text, len(fixed.applied), fixed.left, fixed.settled) == ("a: three\n", 2, (), True)

    def test_fixes_that_undo_each_other_leave_the_text_as_it_was(self) -> None:
        fixed = fix_source(SourceFile("r", "a: one\n"), words(one="two", two="one"))  # type: ignore[arg-type]
        assert not fixed.settled
        assert (fixed.source.text, fixed.applied, len(fixed.left)) == ("a: one\n", (), 1)

    def test_a_fix_that_grows_without_end_is_stopped(self) -> None:
        fixed = fix_source(SourceFile("r", "a: x\n"), words(x="xx"))  # type: ignore[arg-type]
        assert not fixed.settled

    def test_a_fix_after_which_the_file_does_not_parse_is_dropped_and_the_others_are_not(self) -> None:
        source = SourceFile("r", "a: one\nb: two\n")
        fixed = fix_source(source, words(one='"unclosed', two="2"))  # type: ignore[arg-type]
        assert fixed.source.text == "a: one\nb: 2\n"
        assert [d.fix.edits[0].text for d in fixed.applied if d.fix] == ["2"]
        assert [d.fix.edits[0].text for d in fixed.left if d.fix] == ['"unclosed']

    def test_a_fix_that_would_make_a_key_twice_is_dropped(self) -> None:
        fixed = fix_source(SourceFile("r", "a: 1\nbb: 2\n"), words(bb="a"))  # type: ignore[arg-type]
        assert yaml.safe_load(fixed.source.text) == {"a": 1, "bb": 2}


class TestDiff:
    @pytest.mark.skipif(shutil.which("patch") is None, reason="there is no patch program here")
    @pytest.mark.parametrize(("before", "after"), [("a\nb\n", "a\nc\n"), ("a\nb", "a\nc"), ("a\r\nb\r\n", "a\r\nb\r\nc\r\n")])
    def test_patch_makes_of_the_old_file_the_new_one(self, tmp_path: Path, before: str, after: str) -> None:
        path = tmp_path / "r.yaml"
        path.write_bytes(before.encode())
        diff = unified_diff(SourceFile("r.yaml", before), after)
        subprocess.run(["patch", "--binary", "-p0"], input=diff.encode(), cwd=tmp_path, check=True, stdout=subprocess.PIPE)
        assert path.read_bytes() == after.encode()

    def test_no_change_is_no_text(self) -> None:
        assert unified_diff(SourceFile("r", "a\n"), "a\n") == ""


class TestWrite:
    def test_mode_byte_order_mark_and_link_are_kept(self, tmp_path: Path) -> None:
        path, link = tmp_path / "r.yaml", tmp_path / "link.yaml"
        path.write_bytes(b"\xef\xbb\xbfa: 1\n")
        path.chmod(0o640)
        link.symlink_to(path)
        write_atomically(SourceFile(str(link), "a: 1\n"), "a: 2\n")
        assert path.read_bytes() == b"\xef\xbb\xbfa: 2\n"
        assert (path.stat().st_mode & 0o777, link.is_symlink()) == (0o640, True)
        assert len(list(tmp_path.iterdir())) == 2

    def test_a_file_that_changed_meanwhile_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "r.yaml"
        path.write_text("a: 9\n")
        with pytest.raises(KtoptError, match="changed while it was checked"):
            write_atomically(SourceFile(str(path), "a: 1\n"), "a: 2\n")
        assert path.read_text() == "a: 9\n"

    def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "r.yaml"
        path.write_text("a: 1\n")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        with pytest.raises(KtoptError, match="No space left on device"):
            write_atomically(SourceFile(str(path), "a: 1\n"), "a: 2\n")
        assert [p.name for p in tmp_path.iterdir()] == ["r.yaml"]
        assert path.read_text() == "a: 1\n"


SAFE = {"01", "02", "03", "08", "12", "13"}
"""Shared cases that have one certain fix."""
GUESSED = {"05", "10", "11", "14", "15", "17", "20", "21"}
"""Those whose fix guesses what was meant."""


def mended(text: str, model: str | None = None, *, unsafe: bool = False) -> tuple[str, list[str]]:
    """A text after fixing, and the codes of what is left."""
    fixed = fix_source(SourceFile("r.yaml", text), lambda source: run_stages(source, model).report.sorted(), unsafe=unsafe)
    assert fixed.settled
    return fixed.source.text, [d.code for d in fixed.left if d.severity is not Severity.INFO]


class TestSharedCases:
    @needs_cases
    @pytest.mark.parametrize("number", sorted(SAFE | GUESSED))
    def test_a_case_with_a_fix_checks_clean_on_the_model_after_it(self, number: str) -> None:
        text = next(CASES.glob(f"bad_rules/{number}-*.yaml")).read_text(encoding="utf-8")
        model = "deepseek-v3"
        after, left = mended(text, model, unsafe=number in GUESSED)
        assert after != text
        report = run_stages(SourceFile("r.yaml", text), model).report
        before = {d.code for d in report.errors} or {d.code for d in report if d.severity == "warning"}
        assert before
        assert not before & set(left), left
        assert mended(after, model, unsafe=True)[0] == after

    @needs_cases
    @pytest.mark.parametrize("number", sorted(GUESSED))
    def test_a_guess_is_not_made_without_being_asked_for(self, number: str) -> None:
        text = next(CASES.glob(f"bad_rules/{number}-*.yaml")).read_text(encoding="utf-8")
        assert mended(text, "deepseek-v3")[0] == text

    @needs_cases
    @pytest.mark.parametrize("path", sorted(CASES.glob("upstream_rules/*.yaml")), ids=lambda path: path.name)
    def test_safe_fixes_never_touch_upstreams_files(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert mended(text)[0] == text


def rule(replace: str, match: str = "{name: '^lm_head$'}", rest: str = "") -> str:
    return f"- match: {match}\n  replace: {replace}\n{rest}"


class TestStages:
    @pytest.mark.parametrize(
        ("wrong", "right"),
        [
            (rule("{class: default, kwargs: {prefill_device: cpu, generate_device: CPU}}"), 'generate_device: "cpu"'),
            (rule("{class: default, kwargs: {generate_device: cpu}}", rest="  recursive: 0\n"), "recursive: false"),
            ("- match: {name: a}\n  replace:\n    class: KTransformersLinear\n    kwargs:\n", "class: KTransformersLinear\n"),
            ("rules:\n- match: class=Linear\n  replace: default\n  kwargs: {generate_device: cpu}\n", "version: 1\nrules:\n"),
        ],
    )
    def test_a_certain_mistake_is_mended_by_a_safe_fix(self, wrong: str, right: str) -> None:
        after, left = mended(wrong)
        assert right in after
        assert left == []

    @pytest.mark.parametrize(
        ("wrong", "right"),
        [
            (rule("{class: default, kwargs: {prefill_device: cuda}}"), "{generate_device: cuda, prefill_device: cuda}"),
            (rule("{class: default, kwargs: {generate_device: gpu}}"), 'generate_device: "cuda:0"'),
            (rule("{class: default, kwargs: {generate_device: cpu}}", "{name: '^layers\\.[10-19]\\.'}"), r"layers\.(1[0-9])\."),
            (rule("{clas: default, kwargs: {generate_device: cpu}}"), "{class: default"),
        ],
    )
    def test_a_likely_one_by_an_unsafe_fix_only(self, wrong: str, right: str) -> None:
        assert mended(wrong)[0] == wrong
        after, left = mended(wrong, unsafe=True)
        assert right in after
        assert left == []

    def test_every_wrong_escape_of_a_file_is_mended_though_yaml_stops_at_the_first(self) -> None:
        one = dedent("""\
            - match:
                name: "^model\\.layers\\.%d\\.mlp$"
              replace: {class: default, kwargs: {generate_device: cpu}}
            """)
        after, left = mended("".join(one % layer for layer in range(30)))
        assert left == []
        assert [r["match"]["name"] for r in yaml.safe_load(after)] == [rf"^model\.layers\.{layer}\.mlp$" for layer in range(30)]

    @pytest.mark.parametrize("name", [r'"a\.b\\.c"', r'"it\.\'s"', r'"\.\"x"'])
    def test_a_scalar_whose_backslashes_are_not_all_alike_is_left_to_the_author(self, name: str) -> None:
        text = f"- match: {{name: {name}}}\n  replace: {{class: default}}\n"
        assert mended(text, unsafe=True) == (text, ["KT101"])

    def test_an_open_layer_number_is_closed(self) -> None:
        linear = "{class: KTransformersLinear, kwargs: {generate_device: cpu, generate_op: KLinearTorch}}"
        text = rule(linear, "{name: '^model\\.layers\\.1.*_proj$', class: torch.nn.Linear}")
        after, left = mended(text, "smollm2-135m", unsafe=True)
        assert r"layers\.1\..*_proj$" in after
        assert "KT305" not in left

    def test_a_class_of_another_package_is_replaced_by_the_models_own(self) -> None:
        text = rule("{class: default, kwargs: {generate_device: cpu}}", "{class: modeling.LlamaAttentions}")
        after, _ = mended(text, "smollm2-135m", unsafe=True)
        assert "LlamaAttention}" in after
