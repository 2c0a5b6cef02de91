"""The page's own Markdown: what it makes, that it keeps what hasn't changed, and that no text takes long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi")

from page_browser import Page
from server_fixtures import running

SHOW = "const box = document.createElement('div'); showMarkdown(box, arguments[0]); return box.innerHTML"
A = '<a href="https://a.b/c" title="https://a.b/c" target="_blank" rel="noopener noreferrer nofollow">{}</a>'
CASES = [
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("# A #\n### B", "<h4>A</h4><h6>B</h6>"),
    ("#hash", "<p>#hash</p>"),
    ("*a* _b_ **c** __d__ ~~e~~", "<p><em>a</em> <em>b</em> <strong>c</strong> <strong>d</strong> <del>e</del></p>"),
    ("***both***", "<p><strong><em>both</em></strong></p>"),
    ("snake_case_name and 2 * 3 * 4 and **open", "<p>snake_case_name and 2 * 3 * 4 and **open</p>"),
    ("`a*b*` ``c`d``", "<p><code>a*b*</code> <code>c`d</code></p>"),
    (r"\*no\* a\b", r"<p>*no* a\b</p>"),
    ("- a\n- b\n  - c\n- d", "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("1. a\n\n   more\n\n2. b", "<ol><li>a<p>more</p></li><li>b</li></ol>"),
    ("- a\n\ntext", "<ul><li>a</li></ul><p>text</p>"),
    ("text\n- a", "<p>text</p><ul><li>a</li></ul>"),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
    ("[x](https://a.b/c)", f"<p>{A.format('x')}</p>"),
    ("![x](https://a.b/c)", f"<p>{A.format('x')}</p>"),
    ("(https://a.b/c).", f"<p>({A.format('https://a.b/c')}).</p>"),
    ("<https://a.b/c>", f"<p>{A.format('https://a.b/c')}</p>"),
    ("[x](/local) [y](javascript:alert(1))", "<p>[x](/local) [y](javascript:alert(1))</p>"),
    ("<b>&amp;</b>", "<p>&lt;b&gt;&amp;amp;&lt;/b&gt;</p>"),
    ("a | b\nno table", "<p>a | b<br>no table</p>"),
]
HOSTILE = {
    "stars": "*a **b " * 8000,
    "stars alone": "*" * 60000,
    "underscores": "_a " * 20000,
    "brackets": "[" * 60000,
    "links": "[a](b " * 10000,
    "ticks": "".join("`" * (n % 90 + 1) + " " for n in range(1500)),
    "blanks": "a" + " " * 60000 + "b",
    "hashes": "# " + "#" * 60000 + "x",
    "quotes": ">" * 60000,
    "lists": "\n".join(" " * (n % 40) + "- a" for n in range(4000)),
    "fence": "```" + " " * 60000 + "`",
    "rule": "- " * 30000 + "x",
    "dots": "https://a.b/" + "." * 60000 + "x",
    "tables": "|a" * 20000 + "\n" + "|-" * 20000,
    "lines": "a|b\n" * 10000,
}


@pytest.fixture(scope="module")
def page(browser: Page) -> Iterator[Page]:
    with running() as made:
        browser.open(made.url)
        yield browser


def test_markdown_becomes_elements(page: Page) -> None:
    made = [page.run(SHOW, text) for text, _ in CASES]
    assert made == [html for _, html in CASES]


def test_code_has_its_language_and_a_button(page: Page) -> None:
    for text in ("```py\na\n\n<b>\n```\nafter", "~~~py\na\n\n<b>\n~~~\nafter"):
        html = page.run(SHOW, text)
        assert '<pre tabindex="0"><code>a\n\n&lt;b&gt;</code></pre></figure><p>after</p>' in html
        assert "<span>py</span><button" in html
    assert "<code>still\nopen</code>" in page.run(SHOW, "```\nstill\nopen")


def test_a_table_has_its_sides(page: Page) -> None:
    html = page.run(SHOW, "| a | b |\n|:-:|--:|\n| 1 | `2` |")
    assert '<th class="centre">a</th><th class="right">b</th>' in html
    assert '<td class="centre">1</td><td class="right"><code>2</code></td>' in html


def test_a_text_that_grows_keeps_the_nodes_that_are_done(page: Page) -> None:
    script = """
    const text = arguments[0];
    const box = document.createElement("div");
    let first = null;
    for (let end = 1; end <= text.length; end += 1) {
      showMarkdown(box, text.slice(0, end));
      if (text.slice(0, end).endsWith("second")) first = box.firstChild;
    }
    return [box.firstChild === first, box.innerHTML];
    """
    text = "first **one**\n\nsecond\n\n```c\nint x;\n```\n\n- a\n- b"
    assert page.run(script, text) == [True, page.run(SHOW, text)]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_takes_long(page: Page, name: str) -> None:
    show = (
        "const from = performance.now(); showMarkdown(document.createElement('div'), arguments[0]); return performance.now() - from"
    )
    assert page.run(show, HOSTILE[name]) < 3000
