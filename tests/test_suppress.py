"""`# ktopt: ignore[...]`: what counts as a comment, what an ignore silences, and what is said of one that doesn't."""

from __future__ import annotations

import random
import time
from textwrap import dedent

import pytest
import yaml

from ktopt.comments import comments
from ktopt.diagnostics import Diagnostic, Severity
from ktopt.source import SourceFile, Span
from ktopt.suppress import Suppressions, add_ignores, read_suppressions


def finding(line: int, code: str = "KT305", file: str = "r.yaml") -> Diagnostic:
    return Diagnostic(code, Severity.WARNING, "m", file, Span.at(line, 1))


def read(text: str) -> Suppressions:
    return read_suppressions(SourceFile("r.yaml", dedent(text)))


def applied(text: str, found: Diagnostic) -> str:
    """A text with its one finding's fix applied."""
    assert found.fix is not None
    (edit,) = found.fix.edits
    source = SourceFile("r.yaml", text)
    return text[: source.offset(edit.span.start)] + edit.text + text[source.offset(edit.span.end) :]


class TestComments:
    @pytest.mark.parametrize(
        "text",
        [
            'a: "x # ktopt: no"',
            "a: 'x # ktopt: no'",
            'a: "x\n  # ktopt: no\n  y"',
            "a: |\n  # ktopt: no\n  x\n",
            "a: >-\n  x\n  # ktopt: no\nb: 1",
            "a: x#ktopt:no",
            "? |\n  # ktopt: no\n: x",
        ],
    )
    def test_what_stands_in_a_scalar_is_none(self, text: str) -> None:
        yaml.compose(text)
        assert comments(SourceFile("r", text), "ktopt") == []

    @pytest.mark.parametrize(
        ("text", "line", "column", "alone"),
        [
            ("# ktopt: yes", 1, 1, True),
            ("a: x # ktopt: yes", 1, 6, False),
            ('a: "x # y" # ktopt: yes', 1, 12, False),
            ("a: | # ktopt: yes\n  x\n", 1, 6, False),
            ("a: |\n  x\n# ktopt: yes\nb: 1\n", 3, 1, True),
            ("a: [1, # ktopt: yes\n 2]", 1, 8, False),
            ("a: !!str # ktopt: yes\n  x", 1, 10, False),
            ("a:\r\n  # ktopt: yes\r\n  b", 2, 3, True),
            ("a: 日本 # ktopt: yes", 1, 7, False),
            ("a: 1 # b # ktopt: yes", 1, 6, False),
            ("--- # ktopt: yes\na: 1", 1, 5, False),
        ],
    )
    def test_each_other_hash_after_a_blank_begins_one(self, text: str, line: int, column: int, alone: bool) -> None:
        (found,) = comments(SourceFile("r", text), "ktopt")
        assert (found.line, found.column, found.alone) == (line, column, alone)
        assert found.text.endswith("ktopt: yes")

    def test_taking_every_comment_out_changes_nothing_that_a_yaml_reader_sees(self) -> None:
        """PyYAML itself is the judge: over texts put together at random, what is found is never part of a value."""
        dice = random.Random(5)
        parts = [
            "a: 1",
            "b: 'x # k'",
            'c: "y # k"',
            "d: |\n    # k\n    z",
            "e: [1, 2]",
            "f: >\n    w # k",
            "g: u#k",
            "h: 'o\n    # k'",
        ]
        seen = 0
        for _ in range(200):
            chosen = [part + dice.choice(["", " # k", "\n# k", "\n  # k"]) for part in dice.sample(parts, 4)]
            text = "\n".join(chosen) + "\n"
            source = SourceFile("r", text)
            found = comments(source, "k")
            seen += len(found)
            lines = text.split("\n")
            for comment in found:
                lines[comment.line - 1] = lines[comment.line - 1][: comment.column - 1]
            assert yaml.safe_load("\n".join(lines)) == yaml.safe_load(text), text
        assert seen > 200


class TestIgnores:
    def test_one_at_the_end_of_a_line_silences_that_code_on_that_line_only(self) -> None:
        found = read("a: 1\nb: 2  # ktopt: ignore[KT305] on purpose\n")
        assert found.silences(finding(2))
        assert not found.silences(finding(1))
        assert not found.silences(finding(2, "KT302"))

    def test_one_on_its_own_line_silences_the_next_line_that_holds_something(self) -> None:
        found = read("# ktopt: ignore[KT305]\n\n# a remark\na: 1\nb: 2\n")
        assert found.silences(finding(4))
        assert not found.silences(finding(1))
        assert not found.silences(finding(5))

    def test_several_codes_in_any_case_with_or_without_blanks(self) -> None:
        found = read("a: 1  #ktopt:ignore[ kt302,KT305 ]")
        assert found.silences(finding(1, "KT302"))
        assert found.silences(finding(1, "KT305"))
        assert found.problems == []

    def test_after_another_remark_in_the_same_comment(self) -> None:
        assert read("a: 1  # see above # ktopt: ignore[KT305]").silences(finding(1))

    def test_one_in_a_string_silences_nothing(self) -> None:
        found = read('a: "x # ktopt: ignore[KT305]"')
        assert not found.silences(finding(1))
        assert found.unused(lambda code: True) == []


class TestUnused:
    def test_one_that_silenced_something_is_not_reported(self) -> None:
        found = read("a: 1  # ktopt: ignore[KT305]")
        assert found.silences(finding(1))
        assert found.unused(lambda code: True) == []

    def test_one_whose_check_did_not_run_is_not_reported(self) -> None:
        found = read("a: 1  # ktopt: ignore[KT305, KT401]")
        assert [d.message for d in found.unused(lambda code: code == "KT401")] == [
            "ignore[KT401] silences nothing: line 1 has no such finding"
        ]

    @pytest.mark.parametrize(
        ("text", "mended"),
        [
            ("a: 1  # ktopt: ignore[KT305] why\nb: 2\n", "a: 1\nb: 2\n"),
            ("a: 1\r\n  # ktopt: ignore[KT305]\r\nb: 2\r\n", "a: 1\r\nb: 2\r\n"),
            ("a: 1 # x # ktopt: ignore[KT305]\n", "a: 1 # x\n"),
            ("a: 1\n# ktopt: ignore[KT305]", "a: 1\n"),
        ],
    )
    def test_its_fix_takes_the_comment_out(self, text: str, mended: str) -> None:
        (unused,) = read(text).unused(lambda code: True)
        assert unused.code == "KT111"
        assert unused.fix is not None
        assert unused.fix.safe
        assert applied(text, unused) == mended

    def test_its_fix_leaves_the_codes_that_are_used(self) -> None:
        text = "a: 1  # ktopt: ignore[KT302, KT305, KT401] why\n"
        found = read(text)
        found.silences(finding(1, "KT305"))
        (unused,) = found.unused(lambda code: True)
        assert "ignore[KT302, KT401]" in unused.message
        assert applied(text, unused) == "a: 1  # ktopt: ignore[KT305] why\n"


class TestMalformed:
    @pytest.mark.parametrize(
        ("comment", "message"),
        [
            ("# ktopt: ignore", "an ignore needs the codes that it silences, in brackets"),
            ("# ktopt: ignore KT305", "an ignore needs the codes that it silences, in brackets"),
            ("# ktopt: ignore[]", "an ignore needs the codes that it silences"),
            ("# ktopt: ignore[KT305", "an ignore needs the codes that it silences, in brackets"),
            ("# ktopt: ignore[KT3O5]", "KT3O5 is no code of a finding"),
            ("# ktopt: ignore[KT999]", "KT999 is no code of a finding"),
            ("# ktopt: ignore[KT3055]", "KT3055 is no code of a finding; did you mean KT305?"),
            ("# ktopt: ignroe[KT305]", "`ignroe` is no comment that ktopt knows"),
            ("# ktopt ignore[KT305]", "`ignore` is no comment that ktopt knows"),
            ("# ktopt: noqa(KT305)", "`noqa` is no comment that ktopt knows"),
        ],
    )
    def test_it_is_said(self, comment: str, message: str) -> None:
        (problem,) = read(f"a: 1  {comment}\n").problems
        assert (problem.code, problem.message, problem.span.start.line) == ("KT112", message, 1)

    @pytest.mark.parametrize("comment", ["# ktopt: rules for DeepSeek-V3", "# see ktopt", "# made with ktopt [1]", "# ktoptimizer"])
    def test_an_ordinary_remark_is_left_alone(self, comment: str) -> None:
        found = read(f"a: 1  {comment}\n")
        assert (found.problems, found.ignores) == ([], [])

    def test_the_good_codes_beside_a_bad_one_count(self) -> None:
        found = read("a: 1  # ktopt: ignore[KT999, KT305]")
        assert len(found.problems) == 1
        assert found.silences(finding(1))


class TestAdd:
    @staticmethod
    def add(text: str, *found: Diagnostic) -> tuple[str, int]:
        def same(changed: str) -> bool:
            try:
                return bool(yaml.safe_load(changed) == yaml.safe_load(text))
            except yaml.YAMLError:
                return False

        return add_ignores(SourceFile("r.yaml", text), found, same)

    def test_each_line_gets_one_comment_with_all_its_codes(self) -> None:
        text, count = self.add("a: 1\nb: 2\n", finding(2), finding(2, "KT302"), finding(1, file="other.yaml"))
        assert (text, count) == ("a: 1\nb: 2  # ktopt: ignore[KT302, KT305]\n", 2)

    def test_one_that_is_there_is_added_to_and_keeps_its_reason(self) -> None:
        assert self.add("a: 1 # ktopt: ignore[KT305] why\n", finding(1, "KT302"))[0] == "a: 1 # ktopt: ignore[KT302, KT305] why\n"
        assert self.add("# ktopt: ignore[KT305]\na: 1\n", finding(2, "KT302"))[0] == "# ktopt: ignore[KT302, KT305]\na: 1\n"

    def test_where_the_lines_end_lies_in_a_string_it_goes_above(self) -> None:
        assert self.add('- a: "x\n    y"\n', finding(1))[0] == '# ktopt: ignore[KT305]\n- a: "x\n    y"\n'
        assert self.add("a:\r\n  b: x\r\n    y\r\n", finding(2))[0] == "a:\r\n  # ktopt: ignore[KT305]\r\n  b: x\r\n    y\r\n"

    def test_within_a_string_there_is_no_place_for_it(self) -> None:
        text = 'a: "x\n\n  y\n  z"\n'
        assert self.add(text, finding(3)) == (text, 0)

    def test_what_it_adds_silences_what_it_was_added_for(self) -> None:
        found = [finding(1), finding(3, "KT302"), finding(3, "KT307")]
        text, count = self.add("- a: 1\n  b: |\n- c: 'd\n    e'\n", *found)
        after = read_suppressions(SourceFile("r.yaml", text))
        assert count == 3
        assert {code.code for codes in after.by_line.values() for code in codes} == {"KT302", "KT305", "KT307"}


@pytest.mark.parametrize(
    "text",
    [
        "# ktopt: ignore[" * 60_000,
        "# ktopt: ignore[KT302]\n" * 40_000,
        "a: 1 # ktopt: ignore[" + "KT999," * 150_000 + "]",
        "a: '" + "# ktopt " * 100_000 + "'",
        "#" + " " * 900_000 + "ktopt",
        "a: 1 # ktopt: ignore[KT" + "1" * 900_000 + "]",
        "# ktopt" * 100_000,
    ],
)
def test_a_hostile_text_is_answered_within_a_second(text: str) -> None:
    start = time.process_time()
    found = read_suppressions(SourceFile("r.yaml", text))
    assert time.process_time() - start < 1
    assert len(found.problems) <= 60
    assert all(len(d.message) < 200 for d in found.problems)
