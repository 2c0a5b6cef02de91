"""Writes the files that are made from declarations: the operator catalogue, the JSON Schemas, docs/operators.md, docs/codes.md and
docs/graph.svg.

`python scripts/generate.py` writes them; with `--check` it writes nothing, names those that are stale and exits 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() not in (ROOT, ROOT / "scripts")]

from ktopt.codes import render_codes  # noqa: E402
from ktopt.compiler import run_stages  # noqa: E402
from ktopt.operator import REGISTERED, Op, OperatorSpec, describe_type, field_types  # noqa: E402
from ktopt.operators import DECLARATIONS  # noqa: E402
from ktopt.picture.picture import picture_of  # noqa: E402
from ktopt.picture.svg import to_svg  # noqa: E402
from ktopt.schema import config_schema, operator_schema, plan_schema, ruleset_schema  # noqa: E402
from ktopt.source import SourceFile  # noqa: E402

DRAWN = ("deepseek-v3/24gb.yaml", "deepseek-v3", "1x24GB+2TB")
"""Rule set, model and machine of the drawing in the documentation."""


def catalogue() -> dict[str, str]:
    """Every operator name and alias, to the module that declares it. Modules declare on import, so this imports each, in order."""
    found: dict[str, str] = {}
    for module in DECLARATIONS:
        known = set(REGISTERED)
        importlib.import_module(module)
        found |= dict.fromkeys(set(REGISTERED) - known, module)
    return dict(sorted(found.items()))


def operators() -> list[OperatorSpec]:
    """Every operator once: `default` first, then in the order declared."""
    return list({spec.name: spec for spec in REGISTERED.values()}.values())


def operator_page(spec: OperatorSpec) -> str:
    """One operator's section of docs/operators.md."""
    facts = [
        ("Replaces", ", ".join(spec.roles) or "any module"),
        ("Also named", ", ".join(f"`{alias}`" for alias in spec.aliases)),
        ("In KTransformers", sentence(spec.upstream)),
        ("Forward", forward(spec)),
        ("Lost here", sentence(spec.lost)),
    ]
    lines = [f"## {spec.name}", "", sentence(spec.summary), ""]
    lines += [f"- {label}: {text}" for label, text in facts if text]
    if spec.ops:
        lines += ["", *table(("op", "devices", "what it is", "here"), [op_row(op) for op in spec.ops.values()])]
    return "\n".join([*lines, "", *table(("kwarg", "type", "default", "meaning"), option_rows(spec)), ""])


def forward(spec: OperatorSpec) -> str:
    """Whose forward runs, and why that is right where KTransformers' class had another."""
    if spec.implementation:
        return f"`{spec.implementation.rpartition('.')[2].replace(':', '.')}` of ktopt"
    if not spec.forward_changed:
        return "the module's own, as in KTransformers"
    return f"the module's own, though KTransformers changed it: {sentence(spec.reason)}"


def op_row(op: Op) -> tuple[str, ...]:
    here = f"no: {op.needs}; {op.counterpart} takes its place" if op.needs else "yes"
    return (f"`{op.name}`", ", ".join(op.devices), op.help, here)


def option_rows(spec: OperatorSpec) -> list[tuple[str, ...]]:
    config: Any = spec.config
    hints = field_types(config)
    rows: list[tuple[str, ...]] = []
    for f in dataclasses.fields(config):
        names = ", ".join(f"`{name}`" for name in (f.name, *f.metadata["aliases"]))
        meaning = f.metadata["help"]
        if f.metadata["ignored"]:
            meaning += f"; has no effect: {f.metadata['ignored']}"
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        rows.append((names, describe_type(hints[f.name]), "required" if required else yaml_value(f.default), meaning))
    return rows


def yaml_value(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def sentence(text: str) -> str:
    return text and text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """A Markdown table."""
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, ("---",) * len(head), *rows)]


def operators_page() -> str:
    intro = """# Operators

What a rule may put in a module's place. This page is generated from the declarations in operators/ by
`python scripts/generate.py`. Operators carry the names that KTransformers gave them: "In KTransformers" says what its class of that
name did, "Forward" whose forward runs here.

"""
    rows = [(f"[{s.name}](#{s.name.lower()})", ", ".join(s.roles) or "any module", sentence(s.summary)) for s in operators()]
    index = "\n".join(table(("operator", "replaces", "what it does here"), rows))
    return f"{intro}{index}\n\n" + "\n".join(operator_page(spec) for spec in operators())


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def drawing() -> str:
    """What `ktopt graph` draws of a shipped rule set, for the README and docs/graph.md."""
    rules = SourceFile(DRAWN[0], (ROOT / "rules" / DRAWN[0]).read_text(encoding="utf-8"))
    compilation = run_stages(rules, DRAWN[1], hardware=DRAWN[2])
    assert compilation.plan is not None
    steps = tuple(
        step._replace(runs={}) for step in compilation.plan.steps
    )  # what lacks a kernel here is drawn as it was asked for
    return to_svg(picture_of(dataclasses.replace(compilation.plan, steps=steps), compilation.graph))


def outputs() -> dict[str, str]:
    """Every generated file's path from the root, and its text."""
    names = catalogue()
    return {
        "schemas/catalogue.json": as_json(names),
        "schemas/ruleset.schema.json": as_json(ruleset_schema()),
        "schemas/config.schema.json": as_json(config_schema()),
        "schemas/plan.schema.json": as_json(plan_schema()),
        "schemas/operators.schema.json": as_json({spec.name: operator_schema(spec) for spec in operators()}),
        "docs/operators.md": operators_page(),
        "docs/codes.md": render_codes(),
        "docs/graph.svg": drawing(),
    }


def stale(root: Path, texts: dict[str, str]) -> list[str]:
    """The paths whose file is missing or differs."""
    return [
        path for path, text in texts.items() if not (root / path).is_file() or (root / path).read_text(encoding="utf-8") != text
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="where to write or check (the repository)")
    arguments = parser.parse_args()
    texts = outputs()
    old = stale(arguments.root, texts)
    if arguments.check:
        for path in old:
            print(f"{path} is stale: run python scripts/generate.py", file=sys.stderr)
        return 1 if old else 0
    for path in old:
        (arguments.root / path).parent.mkdir(parents=True, exist_ok=True)
        (arguments.root / path).write_text(texts[path], encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
