"""The page's plan and status, and what all of its views owe to eyes, screen readers, keyboards and small screens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from fake_engine import FakeEngine
from page_browser import SCHEMES, Page
from server_fixtures import Running, running

import ktopt
from ktopt.server.settings import Served

RULES = Path(__file__).resolve().parent.parent / "rules" / "smollm2" / "cpu.yaml"
VIEWS = ("chat", "plan", "status")
ROW = "#plan-rows .row"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    plan = ktopt.compile(RULES, "smollm2-135m")
    served = Served(names=("smollm2-135m",), plan=plan, weight_bytes={"cpu": 3 << 20})
    with running(FakeEngine("word " * 400), served=served) as made:
        yield made


@pytest.fixture
def page(browser: Page, server: Running) -> Iterator[Page]:
    server.engine.token_s = 0.0
    browser.open(server.url)
    yield browser
    browser.prefer()


def rows(page: Page) -> list[str]:
    return page.seen(ROW)


def test_the_plan_shows_equal_layers_once(page: Page, server: Running) -> None:
    page.one("#tab-plan").click()
    page.wait(lambda: page.all(ROW))
    shown = rows(page)
    assert [row.split()[0] for row in shown[:4]] == ["model", "embed_tokens", "layers", "{0..29}"]
    assert "×30" in shown[3]
    page.all(ROW)[3].click()
    inside = [row for row in rows(page) if row not in shown]
    assert any(row.startswith("self_attn") for row in inside)
    plan = server.http.get("/api/plan").json()
    assert len(page.all(".column")) == 30
    about = f"by smollm2/cpu.yaml · {len(plan['rules'])} rules · float32 · {mb(plan['weight_bytes'])} of weights"
    assert page.text("#plan-about") == about
    assert mb(sum(step["bytes"] for step in plan["steps"] if step["path"].startswith("model."))) in shown[0]
    assert page.complaints() == []


def mb(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def test_modules_are_found_by_words(page: Page, server: Running) -> None:
    page.open(server.url, "#plan")
    page.wait(lambda: page.all(ROW))
    page.one("#plan-search").send_keys("DOWN_proj linear")
    page.wait_for_text("#plan-found", "30 of")
    assert len(rows(page)) == 1
    assert rows(page)[0].startswith("model.layers.{0..29}.mlp.down_proj ×30")
    page.all(ROW)[0].click()
    assert "model.layers.{0..29}.mlp.down_proj" in page.text(".details")
    page.one("#plan-search").clear()
    page.one("#plan-search").send_keys("layers.7.")
    page.wait(lambda: rows(page) and all("layers.7." in row for row in rows(page)))
    page.one("#plan-search").clear()
    page.one("#plan-search").send_keys("<img src=x>")
    page.wait_for_text("#plan-found", "0 of")
    assert rows(page) == []


def test_arrows_move_in_the_plan_and_open_it(page: Page, server: Running) -> None:
    page.open(server.url, "#plan")
    page.wait(lambda: page.all(ROW))
    page.run("document.querySelector('#plan-rows .row').focus()")
    focused = lambda: page.driver.switch_to.active_element  # noqa: E731
    focused().send_keys("\ue015\ue015\ue015")  # down, three times
    assert focused().text.startswith("{0..29}")
    before = len(rows(page))
    focused().send_keys("\ue014")  # right
    assert len(rows(page)) > before
    focused().send_keys("\ue012")  # left
    assert len(rows(page)) == before
    focused().send_keys("\ue012")
    assert focused().text.startswith("layers")


def test_a_plan_of_60_000_modules_stays_fluent(page: Page) -> None:
    script = """
    const steps = [];
    const step = (path, bytes, rule) => steps.push({ path, class: "Linear", operator: "KLinear", device: rule ? "cpu" : "cuda:0",
      prefill_device: "cuda:0", dtype: "bfloat16", stored: [], bytes, rule: rule ? "experts" : null, runs: {} });
    for (let layer = 0; layer < 40; layer += 1) {
      for (let expert = 0; expert < 512; expert += 1)
        for (const name of ["gate_proj", "up_proj", "down_proj"])
          step(`model.layers.${layer}.mlp.experts.${expert}.${name}`, 1000, true);
      step(`model.layers.${layer}.norm`, layer, false);
    }
    const began = performance.now();
    showPlan({ steps, rules: [], devices: { cpu: 1, "cuda:0": 1 }, rule_file: null, left_out: 0 });
    const shown = performance.now();
    find("up_proj cpu");
    const found = performance.now();
    const rows = document.querySelectorAll("#plan-rows .row").length;
    find("norm");
    return [steps.length, shown - began, found - shown, rows, document.querySelectorAll("#plan-rows .row").length];
    """
    count, shown_ms, found_ms, found, norms = page.run(script)
    assert count == 40 * (512 * 3 + 1)
    assert shown_ms < 5000
    assert found_ms < 3000
    assert (found, norms) == (1, 40)  # the norms differ in their bytes
    assert page.text(".row .path").startswith("model.layers.0.norm")


def test_the_status_has_bars_requests_and_totals(page: Page, server: Running) -> None:
    server.engine.token_s = 0.05
    page.ask("long")
    page.one("#tab-status").click()
    page.wait_for_text("#requests", "writing")
    assert "1 of 20" in page.text("#requests")
    widths = page.run("return [...document.querySelectorAll('#pages .bar span')].map((e) => e.style.width)")
    assert widths == ["1%", "2%", "97%"]
    assert page.one("#pages .bar").accessible_name == "100 pages of 32 tokens: 1 in use · 2 kept for reuse · 97 free"
    memory = page.text("#memory")
    assert "Weights on cpu" in memory
    assert "3.1 MB" in memory
    assert "1.0 MB" in memory
    assert "queue full" in page.text("#totals")
    page.one("#tab-chat").click()
    page.one("#stop").click()
    page.one("#tab-status").click()
    page.wait_for_text("#requests", "Nothing runs, nothing waits.")
    assert page.complaints() == []


def test_the_status_is_asked_for_while_it_is_seen_and_not_else(page: Page) -> None:
    asked = lambda: page.run("return performance.getEntriesByName(location.origin + '/api/status').length")  # noqa: E731
    assert asked() == 0
    page.one("#tab-status").click()
    page.wait(lambda: asked() >= 2)
    page.one("#tab-chat").click()
    before = asked()
    time.sleep(1.3)
    assert asked() <= before + 1


def test_what_the_server_says_against_it_is_shown_in_both(page: Page, server: Running) -> None:
    page.run("request = async () => { throw new ApiProblem('Out of order.') }")
    for view in ("plan", "status"):
        page.one(f"#tab-{view}").click()
        page.wait_for_text(f"#{view}-problem", "Out of order.")
        assert page.one(f"#{view}-problem").get_attribute("role") == "alert"


CONTRAST = """
const [text, ground] = [...arguments].map((name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim());
const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const light = (hex) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) =>
  sum + part * linear(parseInt(hex.slice(2 * i + 1, 2 * i + 3), 16) / 255), 0);
const [a, b] = [light(text), light(ground)];
return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
"""


@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_colour_schemes_can_be_read(page: Page, scheme: str) -> None:
    page.prefer(prefers_color_scheme=scheme)
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in ground.removeprefix("rgb(").removesuffix(")").split(","))
    assert (brightness > 600) if scheme == "light" else (brightness < 120)
    pairs = [(text, below) for text in ("--ink", "--soft", "--green") for below in ("--ground", "--sheet", "--faint")]
    for text, below in (*pairs, ("--on-green", "--green"), ("--ink", "--red-tint")):
        assert page.run(CONTRAST, text, below) >= 4.5, (text, below)


def test_every_view_fits_every_screen(page: Page) -> None:
    page.asked("a question " + "w" * 300)
    page.asked("another")
    widths = (
        "return Math.max(...[document.documentElement, document.querySelector('section:not([hidden])')].map((e) => e.scrollWidth))"
    )
    for view in VIEWS:
        page.one(f"#tab-{view}").click()
        page.wait(lambda view=view: page.seen({"chat": ".turn", "plan": ROW, "status": ".bar"}[view]))
        for pixels in (320, 700, 1600):
            with page.width(pixels):
                assert page.run(widths) <= pixels, (view, pixels)
                assert page.run("return document.documentElement.scrollHeight <= innerHeight"), (view, pixels)


def test_every_control_has_a_name_and_every_reference_its_target(page: Page) -> None:
    page.asked("hi")
    for view in VIEWS:
        page.one(f"#tab-{view}").click()
        page.wait(lambda view=view: view != "plan" or page.all(ROW))
        controls = [(role, name) for role, name in page.controls() if role not in ("RootWebArea", "tabpanel")]
        assert {("tab", "Chat"), ("tab", "Plan"), ("tab", "Status"), ("textbox", "API key")} <= set(controls)
        assert len(controls) > 8
        assert [role for role, name in controls if not name] == []
    ids = page.run("return [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    for name in ("for", "aria-controls", "aria-labelledby", "aria-describedby"):
        targets = page.run(f"return [...document.querySelectorAll('[{name}]')].map((e) => e.getAttribute('{name}'))")
        assert set(targets) <= set(ids)
    assert page.one("html").get_attribute("lang") == "en"
    assert [page.one("#log").get_attribute(name) for name in ("role", "aria-live")] == ["log", "polite"]
    levels = page.run("return [...document.querySelectorAll('h1,h2,h3')].map((e) => +e.tagName[1])")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_views_are_chosen_by_keyboard_and_by_address(page: Page, server: Running) -> None:
    page.run("document.querySelector('#tab-chat').focus()")
    page.driver.switch_to.active_element.send_keys("\ue015")  # down
    assert page.one("#plan").is_displayed()
    assert page.driver.switch_to.active_element.get_attribute("id") == "tab-plan"
    page.driver.switch_to.active_element.send_keys("\ue010")  # end
    assert page.one("#status").is_displayed()
    assert page.one("#tab-status").get_attribute("aria-selected") == "true"
    assert page.driver.current_url.endswith("#status")
    page.driver.switch_to.active_element.send_keys("\ue015")  # round to the first
    assert page.one("#question").is_displayed()


def test_nothing_moves_for_who_wants_less_motion(page: Page, server: Running) -> None:
    server.engine.token_s = 5
    page.ask("hi")
    waiting = "return getComputedStyle(document.querySelector('.answer.empty .text:last-of-type'), '::after').animationName"
    page.wait(lambda: page.all(".answer.empty"))
    assert page.run(waiting) == "wait"
    page.prefer(prefers_reduced_motion="reduce")
    assert page.run(waiting) == "none"
    page.one("#stop").click()
