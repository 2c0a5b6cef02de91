"""docs/serve.md: its examples run, and it lists what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from fake_engine import FakeEngine
from server_fixtures import running

from ktopt.server.flags import ALIASES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "serve.md"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "{% endfor %}"
)


def first_column(heading: str) -> set[str]:
    """The code names in the first column of the table with this heading cell."""
    text = PAGE.read_text(encoding="utf-8")
    rows = text[text.index(f"\n| {heading} |") :].split("\n\n")[0].strip().splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}


def test_the_page_s_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    engine = FakeEngine(
        lambda request, choice: call if "weather" in "".join(map(chr, request.prompt_ids)) else "a compiler", template=TEMPLATE
    )
    blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    with running(engine) as server:
        for block in blocks:
            exec(compile(block.replace("http://127.0.0.1:10002", server.url), PAGE.name, "exec"), names)
        names["client"].close()
    assert capsys.readouterr().out.split("\n") == ["a compiler 0", 'a compilerweather {"city": "Oslo"}', ""]


def test_the_page_lists_every_path_and_metric_and_flag() -> None:
    with running() as server:
        paths = server.paths()
        metrics = set(re.findall(r"^# TYPE (ktopt_\w+) ", server.http.get("/metrics").text, flags=re.MULTILINE))
    listed = {name.split(" ")[1] for name in first_column("endpoint")} - {"/"}
    assert listed | {"/v1/models/{name}"} == paths | {"/openapi.json"}
    assert first_column("metric") == {name for name in metrics if not name.endswith("_created")}
    flags = {name.removeprefix("--").split(" ")[0] for name in first_column("KTransformers' flag")}
    assert flags == {*ALIASES, "model_dir", "architectures", "web_cross_domain"}
