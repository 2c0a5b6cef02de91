"""How long the page of `ktopt graph` takes to open for DeepSeek-V3 with every expert a module (75,457 modules), and to be written.

    python benchmarks/graph.py [--runs N] [--json FILE]

In a headless Chromium: from navigation to the second frame after the first rows are drawn; then, in the open page, a search for
one expert of every layer, and each module unfolded. Needs chromium, chromium-driver and selenium.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, Row, arguments, row, show, stopwatch

sys.path.insert(0, str(ROOT / "tests"))

from oracle.upstream_trees import as_graph, upstream_tree

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
"""
OPEN_MS = 2000
TIMED = """
const began = performance.now();
byId("search").value = "experts.217.up"; search();
const found = performance.now();
byId("search").value = ""; search(); unfoldAll();
return [found - began, performance.now() - found, tree.rows.length];
"""


def main() -> None:
    options = arguments("How long the page of ktopt graph takes to open.", runs=5).parse_args()
    from ktopt.picture.html import to_html
    from ktopt.picture.picture import picture_of

    plan, graph = every_expert()
    written: list[float] = []
    for _ in range(options.runs):
        with stopwatch(written):
            page = to_html(picture_of(plan, graph))
    rows = [row(f"written, {len(page) / 1e3:,.0f} kB", written), *measure(page, options.runs)]
    show(f"ktopt graph --format html, {len(graph):,} modules", rows, options.json)


def every_expert() -> tuple[Any, Any]:
    """A plan of DeepSeek-V3 as KTransformers' copy of it was, each expert three linears, and its tree."""
    from ktopt.compiler import run_stages
    from ktopt.source import SourceFile
    from ktopt.trees import load_tree

    config = dict(load_tree("deepseek-v3").config)
    graph = as_graph(upstream_tree(config), config, "deepseek-v3")
    return run_stages(SourceFile("rules.yaml", RULES), graph).plan, graph


def measure(page: str, runs: int) -> list[Row]:
    from page_browser import Page, started

    opened, found, unfolded = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page, encoding="utf-8")
        driver = started(Path(folder) / "chromium")
        try:
            view = Page(driver)
            for _ in range(runs + 1):
                driver.get("about:blank")
                driver.get(path.as_uri())
                opened.append(float(view.wait(lambda: view.run("return document.documentElement.dataset.ready"))))
                search_ms, unfold_ms, shown = view.run(TIMED)
                found.append(search_ms)
                unfolded.append(unfold_ms)
        finally:
            driver.quit()
    return [
        row("opened", opened[1:], target=OPEN_MS),
        row("one expert found in every layer", found[1:]),
        row(f"unfolded to {shown:,} rows", unfolded[1:]),
    ]


if __name__ == "__main__":
    main()
