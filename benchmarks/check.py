"""How long `ktopt check` takes, as a whole process, beside a Python that does nothing.

    python benchmarks/check.py [--runs N] [--json FILE] [RULE_FILES...]

Without files it checks KTransformers' own rule files if they lie beside the checkout, otherwise the shipped ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

from common import PYTHON, ROOT, UPSTREAM_RULES, arguments, show, time_processes


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
        command = [*ktopt, "check", "--model", "deepseek-v3", one]
        rows.append(time_processes("ktopt check --model deepseek-v3", command, runs, target=150, note=Path(one).name))
    show("ktopt check", rows, options.json)


def rule_files() -> list[Path]:
    return sorted(UPSTREAM_RULES.glob("**/*.yaml")) or sorted((ROOT / "rules").glob("**/*.yaml"))


if __name__ == "__main__":
    main()
