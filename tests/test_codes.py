"""Every code has a page, and every code that the source reports is one of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rulefiles import validated

from ktopt.codes import CODES, page, render_codes

PACKAGE = Path(__file__).resolve().parents[1] / "ktopt"
PINNED = {
    "KT301", "KT302", "KT303", "KT304", "KT305", "KT306", "KT307", "KT308", "KT309", "KT401", "KT402", "KT403", "KT404", "KT405",
    "KT406", "KT407", "KT408", "KT409", "KT410", "KT501", "KT502", "KT503", "KT504", "KT505", "KT601", "KT602", "KT603", "KT604",
    "KT209", "KT311", "KT312", "KT701", "KT702", "KT703",
}  # fmt: skip


def test_every_code_that_the_source_names_has_a_page() -> None:
    named = {code for path in PACKAGE.rglob("*.py") for code in re.findall(r'"(KT\d{3})"', path.read_text(encoding="utf-8"))}
    assert len(named) > 25
    assert named | PINNED <= CODES.keys()


def test_codes_stand_in_order_and_once() -> None:
    text = (PACKAGE / "codes.md").read_text(encoding="utf-8")
    codes = re.findall(r"^# (KT\d{3})", text, flags=re.MULTILINE)
    assert codes == sorted(set(codes)) == list(CODES)


def test_a_page_says_what_why_and_what_to_write() -> None:
    text = page("kt308")
    assert text.startswith("KT308: literal backslash (error)\n")
    assert "Why it is bad: No path has one" in text or "Why it is bad: no path has one" in text
    assert r"    name: '^model\\.layers\\.'" in text
    assert r"    name: '^model\.layers\.'" in text
    for code in CODES.values():
        assert all((code.title, code.what, code.why, code.example, code.instead)), code.code


def test_an_unknown_code_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        page("KT999")


def test_the_document_holds_every_page() -> None:
    text = render_codes()
    assert all(f"### {code.code}: {code.title}\n" in text for code in CODES.values())


@pytest.mark.parametrize("code", ["KT102", "KT107", "KT201"])
def test_an_example_that_is_a_whole_file_gets_the_code_that_it_is_an_example_of(code: str) -> None:
    assert code in {d.code for d in validated(CODES[code].example)[1]}
    assert code not in {d.code for d in validated(CODES[code].instead)[1]}
