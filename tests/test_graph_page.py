"""The page that `ktopt graph --format html` writes, in a headless Chromium: DeepSeek-V3 with every expert a module, and a plan by a
stranger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from oracle.upstream_trees import as_graph, upstream_tree
from page_browser import SCHEMES, Page
from picture_fixtures import HOSTILE, HOT, QWEN, hostile_picture, picture

from ktopt.compiler import run_stages
from ktopt.picture.html import to_html
from ktopt.picture.picture import Picture, picture_of
from ktopt.source import SourceFile
from ktopt.trees import load_tree

RULES = """\
version: 1
place:
  cpu: "@model.layers.*.mlp.experts.**"
  "cuda:0": "@**"
rules:
  - id: experts
    match: "@model.layers.*.mlp.experts.*.* & class=Linear"
    replace: KTransformersLinear
    kwargs: {generate_op: KLinearCPUInfer}
    expect: 44544
"""
ROW = "#tree [role=treeitem]"
UP, DOWN, LEFT, RIGHT, SHIFT, END = "\ue013", "\ue015", "\ue012", "\ue014", "\ue008", "\ue010"
SLOW_MS = 8000
"""Far more than the page takes, for machines that do other things besides; benchmarks/graph.py measures it."""


@pytest.fixture(scope="module")
def every_expert() -> Picture:
    config = dict(load_tree("deepseek-v3").config)
    graph = as_graph(upstream_tree(config), config, "deepseek-v3")
    plan = run_stages(SourceFile("rules.yaml", RULES), graph).plan
    assert plan is not None
    return picture_of(plan, graph)


@pytest.fixture(scope="module")
def opened(browser: Page, every_expert: Picture, tmp_path_factory: pytest.TempPathFactory) -> Page:
    return open_page(browser, every_expert, tmp_path_factory.mktemp("page") / "deepseek.html")


@pytest.fixture
def page(opened: Page) -> Iterator[Page]:
    """The page of DeepSeek-V3 as it was when it was opened."""
    opened.run("plant(null); byId('search').value = ''; search(); byId('tree').focus(); activate(tree.rows[0])")
    yield opened
    opened.prefer()


def open_page(browser: Page, each: Picture, path: Path) -> Page:
    path.write_text(to_html(each), encoding="utf-8")
    browser.driver.get(path.as_uri())
    browser.driver.get_log("browser")
    browser.driver.get(path.as_uri())  # again, with nothing in the log but this page's
    browser.wait(lambda: browser.run("return document.documentElement.dataset.ready"))
    return browser


def names(page: Page) -> list[str]:
    return list(page.run(f"return [...document.querySelectorAll('{ROW} .path')].map((e) => e.textContent)"))


def look_for(page: Page, text: str) -> None:
    page.run("byId('search').value = arguments[0]; search()", text)


def press(page: Page, *keys: str) -> None:
    page.driver.switch_to.active_element.send_keys(*keys)


def active(page: Page) -> str:
    return str(
        page.run(
            "return document.getElementById(byId('tree').getAttribute('aria-activedescendant')).querySelector('.path').textContent"
        )
    )


def test_deepseek_with_every_expert_opens_at_once_and_asks_for_nothing(page: Page, every_expert: Picture) -> None:
    assert len(every_expert.plan.steps) == 75_457
    assert int(page.run("return document.documentElement.dataset.ready")) < SLOW_MS
    assert page.run("return plan.tree.modules") == 75_457
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.complaints() == []
    assert "75,457 modules" in page.text("#about")
    assert names(page)[:5] == ["(the model)", "model", "embed_tokens", "layers", "{0..2}"]


def test_a_search_finds_one_expert_in_all_layers_and_marks_it(page: Page) -> None:
    look_for(page, "layers.7.mlp.experts.217")
    assert page.text("#found").startswith("5 found, 88.1 MB")
    assert names(page)[-5:] == ["layers", "7", "mlp", "experts", "217"]
    assert page.run(f"return document.querySelector('{ROW}.hit mark').textContent") == "217"
    look_for(page, "EXPERTS.217.up cpu KTransformers")
    assert page.text("#found").startswith("58 found")
    assert names(page)[-6:] == ["layers", "{3..60}", "mlp", "experts", "217", "up_proj"]
    assert "model.layers.{3..60}.mlp.experts.217.up_proj" in page.text("#details")
    look_for(page, "no such thing")
    assert page.text("#found") == "0 found"
    assert names(page) == []


def test_groups_unfold_to_their_members_and_fold_again(page: Page) -> None:
    look_for(page, "")
    page.run("reveal('model.layers.30.mlp.experts.200.up_proj')")
    assert active(page) == "up_proj"
    press(page, LEFT)
    assert active(page) == "{0..255}"
    closed = int(page.run("return tree.rows.length"))
    press(page, SHIFT + RIGHT)
    assert int(page.run("return tree.rows.length")) == closed - 4 + 256
    press(page, DOWN)
    assert active(page) == "0"
    press(page, SHIFT + LEFT)
    assert active(page) == "{0..255}"
    page.one("#unfold-all").click()
    assert int(page.run("return tree.rows.length")) > 75_457
    assert len(page.all(ROW)) < 100
    page.run("byId('tree').focus()")
    press(page, END)
    assert active(page) == "lm_head"
    page.one("#unfold-all").click()
    page.one("#close-all").click()
    assert names(page) == ["(the model)", "model", "lm_head"]
    page.one("#open-all").click()
    assert 40 < int(page.run("return tree.rows.length")) < 200


def test_the_list_is_a_tree_for_screen_readers_and_the_keyboard(page: Page) -> None:
    first = page.all(ROW)[0]
    assert first.get_attribute("aria-level") == "1"
    assert first.get_attribute("aria-expanded") == "true"
    press(page, DOWN, DOWN, DOWN)
    assert active(page) == "layers"
    assert page.text("#details h3") == "model.layers"
    press(page, LEFT)
    press(page, RIGHT, RIGHT)
    assert active(page) == "{0..2}"
    press(page, "/")
    assert page.run("return document.activeElement.id") == "search"
    assert page.one("#search").accessible_name == "Find modules"
    assert all(name for role, name in page.controls() if role in ("button", "textbox", "searchbox", "tree"))


def test_details_have_operator_rule_bytes_and_kwargs(page: Page) -> None:
    page.run("reveal('model.layers.9.mlp.experts.3.down_proj')")
    said = page.text("#details")
    for text in (
        "KTransformersLinear",
        "experts, rules.yaml:6",
        'generate_op: "KLinearCPUInfer"',
        "torch.nn.modules.linear.Linear",
    ):
        assert text in said
    assert "436 GB" in said
    assert "29.4 MB each" in said
    page.driver.execute_script("byId('tree').dispatchEvent(new PointerEvent('pointerleave'))")
    assert "down_proj" in page.text("#details h3")


def test_bars_show_each_devices_weights_by_kind(page: Page, every_expert: Picture) -> None:
    bars = page.run("return [...document.querySelectorAll('#devices .bar')].map((e) => e.getAttribute('aria-label'))")
    assert len(bars) == 2
    assert bars[1].startswith("cpu: 1.3 TB held: experts 1.3 TB")
    widths = page.run("return [...document.querySelectorAll('#devices .bar')].map((bar) => bar.childElementCount)")
    assert widths[1] == 1
    assert widths[0] >= 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_stands_out_in_both_schemes(page: Page, scheme: str) -> None:
    page.prefer(prefers_color_scheme=scheme)
    light = page.run(
        "const rgb = getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).map(Number); return rgb[0] > 128"
    )
    assert light == (scheme == "light")
    contrasts = page.run(CONTRAST)
    assert min(contrasts.values()) >= 4.5, contrasts
    page.one("#scheme").click()  # light, whatever the system has
    assert page.run("return getComputedStyle(document.documentElement).colorScheme") == "light"
    page.one("#scheme").click()
    assert page.run("return getComputedStyle(document.documentElement).colorScheme") == "dark"
    page.one("#scheme").click()


CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgb = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const linear = (v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const ratio = (a, b) => {
  const [x, y] = [luminance(rgb(a)), luminance(rgb(b))].sort((p, q) => q - p);
  return (x + 0.05) / (y + 0.05);
};
const found = {};
const note = (what, text, ground) => { found[what] = Math.min(found[what] ?? 99, ratio(text, ground)); };
const sheet = getComputedStyle(document.querySelector("#drawing .scroll-x")).backgroundColor;
for (const text of document.querySelectorAll("#drawing text")) {
  const box = text.closest("g.module")?.querySelector("rect[class^=d]");
  const behind = box ? getComputedStyle(box).fill : sheet;
  note(`${text.className.baseVal} on ${box?.className.baseVal}`, getComputedStyle(text).fill, behind);
}
const ground = getComputedStyle(document.body).backgroundColor;
for (const element of document.querySelectorAll("h1, .note, button, #details dt, #details dd")) {
  note(element.className || element.tagName, getComputedStyle(element).color, element.closest("#details") ? sheet : ground);
}
return found;
"""


def test_narrow_screens_have_no_sideways_scroll(page: Page) -> None:
    for width in (360, 800):
        with page.width(width):
            page.wait(lambda: page.run("return document.documentElement.scrollWidth <= innerWidth"))
            assert page.run(
                "return [...document.querySelectorAll('#tree .row')].every((row) => row.scrollWidth <= row.clientWidth + 1)"
            )


def test_a_click_in_the_drawing_goes_to_the_module(page: Page) -> None:
    box = "document.querySelector('#drawing .module[data-path=lm_head] rect')"
    page.run(f"{box}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    assert active(page) == "lm_head"


def test_paper_gets_every_open_row(page: Page) -> None:
    page.run("openAll(true); dispatchEvent(new Event('beforeprint'))")
    assert len(page.all(ROW)) == page.run("return tree.rows.length")
    page.run("dispatchEvent(new Event('afterprint'))")


def test_nothing_of_a_strangers_plan_runs(browser: Page, tmp_path: Path) -> None:
    page = open_page(browser, hostile_picture(), tmp_path / "hostile.html")
    page.one("#open-all").click()
    page.run("for (const item of tree.rows) showDetails(item)")
    look_for(page, "onerror")
    assert page.run("return [typeof window.hit, document.images.length, document.querySelectorAll('b, mark script').length]") == [
        "undefined",
        0,
        0,
    ]
    assert HOSTILE in page.text("#errors")
    assert page.complaints() == []


def test_an_expert_of_a_split_layer_is_on_its_own_device(browser: Page, tmp_path: Path) -> None:
    page = open_page(browser, picture(HOT, "qwen3-30b-a3b"), tmp_path / "hot.html")
    look_for(page, "experts[ cuda:0")
    assert page.text("#found").startswith("44 found")
    ranges = page.run("return tree.rows.filter((item) => item.hit).map((item) => `${item.path} ${[...item.devices]}`)")
    assert ranges == [
        "model.layers.{0,2}.mlp.experts[{0..15}] cuda:0",
        "model.layers.1.mlp.experts[{3,17,90..99}] cuda:0",
    ]
    page.run("reveal('model.layers.1.mlp.experts')")
    assert "{0..15} or {3,17,90..99}, on cuda:0" in page.text("#details")
    assert page.complaints() == []


def test_transfers_are_listed_with_the_bytes_of_a_token(browser: Page, tmp_path: Path) -> None:
    page = open_page(browser, picture(QWEN, "qwen3-30b-a3b"), tmp_path / "qwen.html")
    rows = page.seen("#transfers tbody tr")
    assert [row.split("\t")[:2] for row in rows] == [["cuda:0", "cpu"], ["cpu", "cuda:0"]]
    assert "model.layers.{0..47}.mlp.experts" in rows[0]
    assert "201 kB" in rows[0]
    page.run("document.querySelector('#transfers button').click()")
    assert active(page) == "experts"
    look_for(page, "experts[17]")
    assert page.text("#found").startswith("48 found, 453 MB")
    assert names(page)[-3:] == ["mlp", "experts", "[17]"]
    assert json.loads(page.run("return JSON.stringify(plan.devices.map((d) => d.name))")) == ["cuda:0", "cpu"]
    assert page.complaints() == []
