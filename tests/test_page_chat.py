"""The chat of the web page, in a real browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterable, Iterator

import pytest

pytest.importorskip("fastapi")

from fake_engine import FakeEngine
from page_browser import Page
from server_fixtures import Running, running

from ktopt.engine.events import Failed
from ktopt.engine.request import Refused, Request
from ktopt.server.settings import Settings

ANSWER = "It is **bold** and\n\n```python\nprint('<b>')\n```\n\n- one\n- two"
GOES_ON = threading.Event()
HOSTILE = (
    '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2"> [a](javascript:window.hacked=3) '
    "[b](data:text/html,x) ![c](https://example.invalid/secret.png) <a href='javascript:1'>d</a> **<svg onload=alert(1)>**\n\n"
    '```"><img src=x onerror=window.hacked=4>\n</code><script>window.hacked = 5</script>\n```\n\n'
    "| <script>window.hacked = 6</script> |\n|---|\n| <iframe src=javascript:window.hacked=7> |"
)


def prompt_of(request: Request) -> str:
    return "".join(map(chr, request.prompt_ids))


def in_two_parts(text: str, place: int) -> Iterator[str]:
    yield from text[:place]
    GOES_ON.wait(20)
    yield from text[place:]


def says(request: Request, choice: int) -> Iterable[str]:
    """What the fake engine answers: hostile things where it was asked so, a long text, or a fixed one."""
    asked = prompt_of(request).rpartition("<user>")[2]
    if asked.startswith("hostile"):
        return HOSTILE
    if asked.startswith("long"):
        return "word " * 400
    if asked.startswith("in two parts"):
        return in_two_parts(ANSWER, ANSWER.index(" and"))
    if asked.startswith("think"):
        return "<think>\nfirst this\n</think>\n\nthen that"
    return ANSWER


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(FakeEngine(says)) as made:
        yield made


@pytest.fixture
def page(browser: Page, server: Running) -> Page:
    server.engine.refuse = server.engine.fail = None
    server.engine.token_s = 0.0
    browser.open(server.url)
    return browser


def test_the_page_allows_its_own_scripts_and_styles_and_asks_for_no_other_address(server: Running) -> None:
    got = server.http.get("/")
    assert got.status_code == 200
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    assert got.headers["x-content-type-options"] == "nosniff"
    assert got.headers["referrer-policy"] == "no-referrer"
    policy = dict(part.split(" ", 1) for part in got.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", got.text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert texts
        assert policy[f"{tag}-src"].split() == [f"'sha256-{digest}'" for digest in digests]
    assert not re.search(r"""(src|href)=["'](?!#|data:)|url\(|@import|\son\w+=|\sstyle=|innerHTML|outerHTML|eval\(""", got.text)
    assert server.http.head("/").status_code == 200


def test_an_answer_streams_in_as_markdown(page: Page) -> None:
    GOES_ON.clear()
    page.ask("in two parts")
    page.wait(lambda: page.text(".answer > .text") == "It is bold")  # a part of it is seen before the rest is there
    assert page.one("#log").get_attribute("aria-busy") == "true"
    GOES_ON.set()
    page.wait_for_text(".answer footer", "tokens")
    assert page.text(".answer .text strong") == "bold"
    assert page.text(".answer .text pre code") == "print('<b>')"
    assert [item.text for item in page.all(".answer .text li")] == ["one", "two"]
    assert f"{len(ANSWER)} tokens" in page.text(".answer footer")
    assert page.one("#log").get_attribute("aria-busy") == "false"
    assert page.text("#said") == "Answer complete"
    assert page.one("#question").get_property("value") == ""
    assert page.complaints() == []


def test_what_is_sent_has_the_settings_and_the_turns_before(page: Page, server: Running) -> None:
    page.one("#system").send_keys("Be brief")
    page.one("#temperature").send_keys("0.25")
    page.one("#max-tokens").send_keys("900")
    page.asked("first")
    page.one("#question").send_keys("two", "\ue008\n\ue008", "lines")  # shift and enter begin a line
    page.one("#send").click()
    page.wait_for_text(".turn:nth-child(2) footer", "tokens")
    sent = server.engine.requests[-1]
    assert prompt_of(sent) == f"<system>Be brief\n<user>first\n<assistant>{ANSWER}\n<user>two\nlines\n<assistant>"
    assert (sent.sampling.temperature, sent.max_tokens) == (0.25, 900)
    page.driver.refresh()  # a tab keeps its chat and its settings
    assert page.text(".said") == "first\ntwo\nlines"
    assert page.one("#system").get_property("value") == "Be brief"
    page.one("#new-chat").click()
    assert page.all(".turn") == []
    page.asked("anew")
    assert prompt_of(server.engine.requests[-1]) == "<system>Be brief\n<user>anew\n<assistant>"


@pytest.mark.parametrize("by", ["button", "key"])
def test_an_answer_can_be_stopped_and_is_cancelled_at_the_engine(page: Page, server: Running, by: str) -> None:
    server.engine.token_s = 0.01
    page.ask("long please")
    page.wait_for_text(".answer > .text", "word word")
    if by == "button":
        page.one("#stop").click()
    else:
        page.one("#question").send_keys("\ue00c")
    page.wait_for_text(".answer footer", "Stopped.")
    page.wait(server.engine.tickets[-1].cancelled.is_set)
    assert "word word" in page.text(".answer > .text")
    assert not page.one("#stop").is_displayed()
    assert page.one("#send").is_displayed()
    server.engine.token_s = 0.0
    page.asked("more")
    assert "<assistant>word word" in prompt_of(server.engine.requests[-1])


def test_a_refusal_is_shown_and_can_be_tried_again(page: Page, server: Running) -> None:
    server.engine.refuse = Refused("no_room", "needs 90 pages, and this server has 64")
    page.asked("Say it")
    assert "needs 90 pages, and this server has 64" in page.one(".problem[role=alert]:not([hidden])").text
    page.asked("Another")
    server.engine.refuse = None
    page.all(".turn")[-1].find_element("xpath", ".//button[text()='Retry']").click()
    page.wait_for_text(".turn:nth-child(2) .text", "bold")
    assert prompt_of(server.engine.requests[-1]) == "<user>Another\n<assistant>"  # what had no answer isn't sent
    assert not page.all(".turn:nth-child(2) .problem")[0].is_displayed()


def test_an_answer_that_fails_midway_keeps_its_text_and_says_why(page: Page, server: Running) -> None:
    server.engine.fail = Failed("no memory left")
    page.asked("Say it")
    assert page.text(".answer > .text").startswith("It")
    assert "the model failed on this request" in page.one(".answer .problem").text
    server.engine.fail = None
    page.one("#max-tokens").send_keys("0")
    page.ask("not sent")
    assert len(page.all(".turn")) == 1
    assert page.one("#question").get_property("value") == "not sent"


def test_a_server_that_is_gone_is_said(browser: Page) -> None:
    with running(FakeEngine("x")) as made:
        browser.open(made.url)
    browser.asked("Say it")
    assert browser.one(".answer .problem").text == "The server can't be reached."


def test_hostile_text_stays_text(page: Page) -> None:
    page.asked("hostile " + HOSTILE.replace("\n", " "))
    page.wait_for_text(".answer footer", "tokens")
    assert page.run("return window.hacked") is None
    inside = page.run("return [...new Set([...document.querySelectorAll('#log *')].map((e) => e.tagName.toLowerCase()))].sort()")
    assert not {"script", "img", "svg", "iframe", "object", "style", "link", "form"} & set(inside)
    assert [link.get_attribute("href") for link in page.all("#log a")] == ["https://example.invalid/secret.png"]
    attributes = page.run("return [...document.querySelectorAll('#log *')].flatMap((e) => e.getAttributeNames())")
    assert not [name for name in attributes if name.startswith("on") or name in ("style", "src", "srcdoc")]
    assert "<script>window.hacked = 1</script>" in page.text(".answer > .text")
    assert page.complaints() == []  # nothing was so much as tried: the policy had nothing to block
    page.driver.refresh()  # nor when it comes back from what the tab keeps
    assert page.run("return window.hacked") is None
    assert len(page.all(".turn")) == 1


def test_the_policy_blocks_what_would_be_written_by_a_script(page: Page) -> None:
    tried = "try { document.body.innerHTML = '<img src=x onerror=window.hacked=1>'; return 'done' } catch (e) { return e.name }"
    assert page.run(f"{tried}") == "TypeError"
    blocked = (
        "const s = document.createElement('script'); s.append('window.hacked = 1'); document.body.append(s); return window.hacked"
    )
    assert page.run(blocked) is None


def test_thoughts_are_folded_away(page: Page) -> None:
    page.asked("think")
    assert page.text(".answer > .text") == "then that"
    assert page.one("details.thinking").get_attribute("open") is None
    assert page.text("details.thinking .text") == "first this"


def test_a_key_is_asked_for_sent_and_kept_in_the_session_alone(browser: Page) -> None:
    with running(FakeEngine("Hello"), Settings(api_key="secret-7")) as made:
        assert made.http.get("/").status_code == 200
        assert made.http.get("/api/status").status_code == 401
        browser.open(made.url, "#status")
        browser.wait_for_text("#key-note", "This server asks for a key.")
        browser.wait_for_text("#status-problem", "You didn't provide an API key")
        browser.one("#key").send_keys("wrong", "\t")
        browser.wait_for_text("#key-note", "doesn't take this key")
        assert browser.one("#key").get_attribute("aria-invalid") == "true"
        browser.one("#key").clear()
        browser.one("#key").send_keys("secret-7", "\t")
        browser.wait_for_text("#model", "fake")
        browser.wait_for_text("#status-about", "balance_serve")
        assert browser.seen("#status-problem") == []
        browser.one("#tab-chat").click()
        browser.asked("hi")
        assert browser.text(".answer > .text") == "Hello"
        kept = browser.run("return [JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie, location.href]")
        assert json.loads(kept[0])["ktopt.key"] == "secret-7"
        assert not [place for place in kept[1:] if "secret-7" in place]
        assert browser.one("#key").get_attribute("type") == "password"
