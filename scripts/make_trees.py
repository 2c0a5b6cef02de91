"""Writes the module trees that ship with ktopt (ktopt/models/*.json.gz), or with --check says whether they are current.

    python -P scripts/make_trees.py                  builds each tree anew from the config in its own file
    python -P scripts/make_trees.py --import FILE    takes configs from a JSON file first: {name: {"config": ..., "hf_repo": ...}}
    python -P scripts/make_trees.py --check          exit 1 where a committed tree isn't what transformers builds

Trees are built on the meta device by the transformers version that the committed files name; with another one --check passes over
them with a message.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ktopt.models import shipped, treefile
from ktopt.models.treefile import FORMAT
from ktopt.trees import build_meta_model, rows_of, ties_of
from ktopt.versions import installed


def build(name: str, entry: dict[str, Any]) -> bytes:
    """The packed file of one model. `entry` has its config and its repository on the hub."""
    model = build_meta_model(entry["config"], name)
    head = {key: entry[key] for key in ("hf_repo", "config")}
    tree = treefile.encode(rows_of(model))
    made_by = {"name": name, "transformers": installed("transformers")}
    return treefile.pack({"format": FORMAT, **made_by, "tied": ties_of(model), **head, **tree})


def imported(file: Path) -> dict[str, dict[str, Any]]:
    """The models of a JSON file whose config transformers can build."""
    entries = json.loads(file.read_text(encoding="utf-8"))
    return {name: entry for name, entry in entries.items() if "model_type" in entry["config"]}


def committed() -> dict[str, dict[str, Any]]:
    return {name: shipped.read(name) for name in shipped.known_models() if name not in shipped.ALSO_CALLED}


def stale(entries: dict[str, dict[str, Any]]) -> list[str]:
    """The models whose committed file isn't what would be written now."""
    return [name for name, entry in entries.items() if treefile.unpack(build(name, entry)) != entry]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the module trees that ship with ktopt.")
    parser.add_argument("--import", dest="file", type=Path, help="a JSON file of configs by model name")
    parser.add_argument("--check", action="store_true", help="compare only")
    args = parser.parse_args()
    if args.check:
        entries = committed()
        others = {entry["transformers"] for entry in entries.values()} - {installed("transformers")}
        if others:
            print(f"trees not checked: they were built by transformers {', '.join(others)}, here is {installed('transformers')}")
            return 0
        wrong = stale(entries)
        print(f"out of date: {', '.join(wrong)}; run scripts/make_trees.py" if wrong else f"{len(entries)} trees are current")
        return 1 if wrong else 0
    for name, entry in (imported(args.file) if args.file else committed()).items():
        packed = build(name, entry)
        (shipped.FOLDER / f"{name}{shipped.SUFFIX}").write_bytes(packed)
        print(f"{name}: {len(packed):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
