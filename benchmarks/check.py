"""How long `ktopt check` takes, as a whole process, beside a Python that does nothing and beside its like: check-jsonschema with
ktopt's own schema on the same files, and ruff on Python files of the same sizes.

    pip install check-jsonschema      # ruff is there; a tool that isn't is left out
    python benchmarks/check.py [--runs N] [--json FILE] [RULE_FILES...]

Without files it checks KTransformers' own rule files if they lie beside the checkout, otherwise the shipped ones.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from common import PYTHON, ROOT, UPSTREAM_RULES, Row, arguments, show, time_processes

PYTHON_TEXT = (ROOT / "ktopt" / "graph.py").read_text(encoding="utf-8")
"""Real code, cut to the sizes of the rule files for ruff to check."""


def main() -> None:
    parser = arguments("How long `ktopt check` takes.", runs=11)
    parser.add_argument("files", nargs="*", type=Path, help="rule files to check together")
    options = parser.parse_args()
    files = [path.resolve() for path in options.files] or rule_files()
    names = [str(path) for path in files]
    one = next((name for name in names if Path(name).name == "DeepSeek-V3-Chat.yaml"), names[0])
    ktopt = [str(Path(sys.executable).parent / "ktopt")]
    runs = options.runs
    rows = [
        time_processes("python -c pass", [*PYTHON, "-c", "pass"], runs),
        time_processes("import yaml", [*PYTHON, "-c", "import yaml"], runs),
        time_processes("import ktopt", [*PYTHON, "-c", "import ktopt"], runs, note="target: 50 more than Python itself"),
        time_processes("ktopt check, 1 file", [*ktopt, "check", one], runs, target=150, note=Path(one).name),
        time_processes(f"ktopt check, {len(files)} files", [*ktopt, "check", *names], runs, target=400),
    ]
    if "DeepSeek-V3" in Path(one).name:
        command = [*ktopt, "check", "--model", "deepseek-v3"]
        rows.append(time_processes("ktopt check --model deepseek-v3, 1 file", [*command, one], runs, note=Path(one).name))
        rows.append(time_processes(f"ktopt check --model deepseek-v3, {len(files)} files", [*command, *names], runs, target=700))
    with tempfile.TemporaryDirectory() as folder:
        rows += peers(one, names, Path(folder), runs)
    show("ktopt check", rows, options.json)


def peers(one: str, names: list[str], folder: Path, runs: int) -> list[Row]:
    """The same with check-jsonschema and ruff, as far as they are installed. They may find something: only their time counts."""
    rows = []
    if tool := installed("check-jsonschema"):
        command = [tool, "--schemafile", str(ROOT / "schemas" / "ruleset.schema.json")]
        rows.append(time_processes("check-jsonschema, 1 file", [*command, one], runs))
        rows.append(time_processes(f"check-jsonschema, {len(names)} files", [*command, *names], runs))
    if tool := installed("ruff"):
        command = [tool, "check", "--no-cache", "--isolated", "--exit-zero"]
        python = [str(python_of_size(Path(name).stat().st_size, folder / f"{i}.py")) for i, name in enumerate(names)]
        rows.append(time_processes("ruff check, 1 file of that size", [*command, python[names.index(one)]], runs))
        rows.append(time_processes(f"ruff check, {len(names)} files of those sizes", [*command, *python], runs))
    return rows


def installed(tool: str) -> str | None:
    """The tool's path, from this interpreter's folder first."""
    return shutil.which(tool, path=str(Path(sys.executable).parent)) or shutil.which(tool)


def python_of_size(size: int, path: Path) -> Path:
    """Write about `size` bytes of Python, whole lines."""
    text = (PYTHON_TEXT * (size // len(PYTHON_TEXT) + 1))[:size]
    path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
    return path


def rule_files() -> list[Path]:
    return sorted(UPSTREAM_RULES.glob("**/*.yaml")) or sorted((ROOT / "rules").glob("**/*.yaml"))


if __name__ == "__main__":
    main()
