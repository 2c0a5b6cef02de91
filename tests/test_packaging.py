"""The folders at the root install as ktopt's subpackages: map, links and disk agree, and importing ktopt stays light."""

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
MAPPED = ("operators", "kernels", "rules", "schemas")


def on_disk() -> set[str]:
    packages = {"ktopt"}
    for init in (ROOT / "ktopt").rglob("__init__.py"):
        relative = init.parent.relative_to(ROOT)
        if not any((ROOT / Path(*relative.parts[:n])).is_symlink() for n in range(1, len(relative.parts) + 1)):
            packages.add(".".join(relative.parts))
    for folder in MAPPED:
        for init in (ROOT / folder).rglob("__init__.py"):
            packages.add(".".join(("ktopt", *init.parent.relative_to(ROOT).parts)))
    return packages


def test_the_package_list_is_what_is_on_disk() -> None:
    assert set(SETUP["packages"]) == on_disk()


@pytest.mark.parametrize("folder", MAPPED)
def test_each_mapped_folder_has_its_link_and_its_entry(folder: str) -> None:
    link = ROOT / "ktopt" / folder
    assert link.is_symlink()
    assert link.resolve() == ROOT / folder
    assert SETUP["package-dir"][f"ktopt.{folder}"] == folder


def test_the_extension_names_every_file_of_the_cpu_kernels() -> None:
    pytest.importorskip("setuptools")
    setup = runpy.run_path(str(ROOT / "setup.py"))
    named = {f"{name}.cpp" for name in (*setup["BINDINGS"], *setup["SOURCES"])} | set(setup["ALSO_READ"])
    assert named == {path.name for path in (ROOT / "kernels" / "cpu").iterdir() if path.suffix in (".cpp", ".h")}


def run_python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-P", "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)


HEAVY = (
    "torch transformers numpy networkx lark jsonschema rich regex gguf safetensors prompt_toolkit fastapi uvicorn pydantic "
    "prometheus_client"
)


def test_importing_ktopt_imports_nothing_heavy(tmp_path: Path) -> None:
    done = run_python(f"import sys, ktopt; print([m for m in '{HEAVY}'.split() if m in sys.modules])", tmp_path)
    assert done.stdout.strip() == "[]", done.stderr


def test_checking_and_planning_a_known_model_imports_no_torch(tmp_path: Path) -> None:
    rules = ROOT / "rules" / "smollm2" / "cpu.yaml"
    code = (
        "import sys, ktopt\n"
        f"report = ktopt.check({str(rules)!r}, 'smollm2-135m')\n"
        f"plan = ktopt.compile({str(rules)!r}, 'smollm2-135m')\n"
        "assert len(plan.steps) > 300 and not report.errors\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = run_python(code, tmp_path)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_kernels_package_only_states_its_version(tmp_path: Path) -> None:
    done = run_python("import ktopt.kernels as k; print(k.__version__, bool(k.__doc__))", tmp_path)
    assert done.stdout.split() == ["0.1.0", "True"], done.stderr
