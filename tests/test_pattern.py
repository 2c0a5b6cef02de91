"""Patterns: right answers, errors with a column, and an end to those that would run for ever."""

import re
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktopt.pattern import BUDGET_S, PatternError, PatternTimeout, compile_pattern, parse_tree, steps_log2
from ktopt.pattern.mistakes import explain_regex_error
from ktopt.pattern.numbers import in_words, number_regex

UPSTREAM = (
    r"^model\.layers\.(0|[1-9]|[12][0-9])\.(?!self_attn\.kv_b_proj).*$",
    r"^model\.layers\.(?!.*mlp\.gate)(?!.*self_attn\.kv_b_proj)(?!.*mlp\.experts).*$",
    r"(^model\.layers\.([3456][0-9])\.)|(model.norm)",
    r"^model..*norm",
    r"^model\.layers\..*\.mlp\.experts$",
)
HOSTILE = (r"(a+)+$", r"(a|aa)+$", r"^(([a-z])+.)+[A-Z]([a-z])+$", r"(.*)*(.*)*(.*)*x", r"(a|a?)+$", r"(\w+\.?)*!", r".*.*.*.*.*=$")


def compile_error(text: str) -> re.error:
    with pytest.raises(re.error) as raised:
        re.compile(text)
    return raised.value


@pytest.mark.parametrize("text", UPSTREAM)
def test_patterns_of_real_files_run_in_re_without_a_clock(text):
    assert getattr(compile_pattern(text).finder, "__self__", None) == re.compile(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_pattern_that_backtracks_ends_soon(text):
    start = time.process_time()
    pattern = compile_pattern(text)
    with suppress(PatternTimeout):
        for path in ("a" * 200 + "!", "model.layers." + "aa." * 60, "a" * 5000):
            pattern.search(path)
    assert time.process_time() - start < 4


def test_the_budget_is_of_all_searches_together():
    pattern = compile_pattern(r"(\w*\.?\w*)*=")
    start = time.perf_counter()
    paths = (f"model.layers.{'self_attn.q_proj.' * 40}{i}" for i in range(1_000_000))
    with pytest.raises(PatternTimeout, match="took more than"):
        any(pattern.search(path) for path in paths)
    assert BUDGET_S * 0.5 < time.perf_counter() - start < 30


@pytest.mark.parametrize("text", [r"(?:a{60000}){60000}", "a{1,99999999999}", "(" * 1500 + ")" * 1500, "a" * 5000])
def test_a_pattern_that_would_eat_memory_is_refused(text):
    with pytest.raises(PatternError):
        compile_pattern(text)


@given(st.from_regex(r"[a-c.]{0,3}(\([ab]\|[bc]\))?[*+?]?(a\*){0,2}[ab]{0,2}\$?", fullmatch=True), st.text("abc.", max_size=12))
def test_search_and_fullmatch_are_those_of_re(text, subject):
    try:
        expected = re.compile(text)
    except re.error:
        with pytest.raises(PatternError):
            compile_pattern(text)
        return
    pattern = compile_pattern(text)
    assert pattern.search(subject) == bool(expected.search(subject))
    assert pattern.fullmatch(subject) == bool(expected.fullmatch(subject))


def test_more_overlap_counts_as_more_steps():
    texts = ["^abc$", "^a.*b", "^a.*b.*c", "^a.*b.*c.*d", "^(a.*b)*c"]
    steps = [steps_log2(parse_tree(text)) for text in texts]
    assert steps == sorted(steps)
    assert len(set(steps)) == len(steps)


def test_an_error_has_the_column_of_the_mistake():
    with pytest.raises(PatternError) as raised:
        compile_pattern(r"^model\.layers\.([4-10])\.mlp\.experts$")
    assert raised.value.column == 19
    assert str(raised.value) == 'invalid regex at column 19: bad character range "4-1"'


def test_a_range_written_as_a_class_is_explained_and_rewritten():
    text = r"^model\.layers\.([4-10])\.mlp\.experts$"
    message, help, rewrite = explain_regex_error(text, compile_error(text))
    assert message == 'bad character range "4-1"'
    assert help == "a class matches one character; for layers 4 to 10 write ([4-9]|10)"
    assert rewrite == r"^model\.layers\.([4-9]|10)\.mlp\.experts$"


@pytest.mark.parametrize(
    ("text", "rewrite"),
    [("*.mlp", ".*.mlp"), (r"^model\.layers\.**\.mlp$", r"^model\.layers\..*\.mlp$"), (r"\model", "model"), ("model\\", "model")],
)
def test_common_mistakes_are_rewritten_to_what_compiles(text, rewrite):
    _, help, found = explain_regex_error(text, compile_error(text))
    assert found == rewrite
    assert help
    re.compile(found)


@pytest.mark.parametrize("text", ["(ab", "ab)", "[ab", "(?<=a*)b", "a(?i)b", r"(?P=x)", "x{5,2}"])
def test_every_other_error_is_explained_too(text):
    message, help, _ = explain_regex_error(text, compile_error(text))
    assert message
    assert help


@given(st.sets(st.integers(0, 1200), min_size=1, max_size=5), st.integers(0, 150))
def test_a_number_regex_matches_its_numbers_and_no_others(starts, length):
    numbers = {n + i for n in starts for i in range(length)} or starts
    matcher = re.compile(number_regex(numbers))
    assert {n for n in range(1500) if matcher.fullmatch(str(n))} == numbers


def test_numbers_are_put_in_words():
    assert in_words([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert in_words(range(0, 40, 2), most=2) == "0, 2, and 18 more"
    assert number_regex(range(30)) == "([0-9]|[12][0-9])"


def test_a_doubtful_class_prints_no_warning_of_pythons(recwarn: pytest.WarningsRecorder) -> None:
    assert compile_pattern(r"layers\.[[0-9]").search("layers.3")
    assert [str(w.message) for w in recwarn.list] == []
