"""Builds tests/sanitize_*.cpp and the CPU kernels under sanitizers and runs them: addresses, undefined behaviour, then races.

`python scripts/sanitize.py [--cxx g++] [--folder build/sanitize]`. Exits 1 with the sanitizer's report where one finds something.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = ("address,undefined", "thread")


def build(cxx: str, sanitizer: str, folder: Path, setup: dict[str, Any]) -> Path:
    """The program, built with setup.py's flags but little optimisation, so that it takes no minutes."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = [*setup["COMMON"], "-O1", "-g1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", f"-I{ROOT / setup['FOLDER']}"]
    files = [(name, f"{setup['FOLDER']}/{name}.cpp", []) for name in setup["SOURCES"] if not name.startswith("module")]
    files += [(name, f"{setup['FOLDER']}/{source}", more) for name, (source, more) in setup["instruction_sets"]().items()]
    files += [(name, f"tests/{name}.cpp", []) for name in ("sanitize_kernels", "sanitize_anchors")]
    objects = []
    for name, source, more in files:
        objects.append(str(folder / f"{name}.o"))
        subprocess.run([cxx, *flags, *more, "-c", str(ROOT / source), "-o", objects[-1]], check=True)
    program = folder / "sanitize_kernels"
    subprocess.run([cxx, f"-fsanitize={sanitizer}", *objects, "-pthread", "-o", str(program)], check=True)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cxx", default=os.environ.get("CXX", "g++"), help="the compiler")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "sanitize", help="where to build")
    arguments = parser.parse_args()
    setup = runpy.run_path(str(ROOT / "setup.py"))
    for sanitizer in SANITIZERS:
        print(f"-fsanitize={sanitizer}", flush=True)
        program = build(arguments.cxx, sanitizer, arguments.folder / sanitizer.replace(",", "-"), setup)
        if subprocess.run([str(program)], check=False).returncode:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
