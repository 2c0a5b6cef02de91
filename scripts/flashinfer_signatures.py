"""Compares the stand-ins for FlashInfer's wrappers (tests/flashinfer_stand_in.py) with the installed package, by inspect.

    python -P scripts/flashinfer_signatures.py

The package imports without a GPU. Every parameter of a stand-in must be there, by its name and with the same default, and no
parameter that the stand-in lacks may be without a default. Exits 1 where one isn't so, 2 where FlashInfer can't be imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

WRAPPERS = {"BatchMLAPagedAttentionWrapper": "flashinfer.mla", "BatchDecodeWithPagedKVCacheWrapper": "flashinfer.decode"}
STAND_IN = Path(__file__).resolve().parents[1] / "tests" / "flashinfer_stand_in.py"
METHODS = ("__init__", "plan", "run")
REQUIRED_AT_RUN = {"qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv", "head_dim_kpe", "page_size",
                   "causal", "sm_scale", "q_data_type", "kv_data_type", "q_nope", "q_pe", "ckv_cache", "kpe_cache"}  # fmt: skip
"""What newer versions give the default None, since there is a second way to call, and then ask for."""


def stand_ins() -> Any:
    spec = importlib.util.spec_from_file_location("flashinfer_stand_in", STAND_IN)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parameters(owner: Any, name: str) -> dict[str, inspect.Parameter]:
    """A method's parameters; those that it takes as **kwargs and hands on to a method of its own are that one's."""
    found = dict(inspect.signature(inspect.unwrap(getattr(owner, name))).parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values()):
        found |= inspect.signature(inspect.unwrap(getattr(owner, f"_{name}_impl"))).parameters
    return found


def differences(ours: Any, real: Any) -> Iterator[str]:
    """What the stand-in's signatures promise that the real ones don't hold."""
    for name in METHODS:
        have, found = parameters(ours, name), parameters(real, name)
        for parameter in have.values():
            other = found.get(parameter.name)
            if other is None:
                yield f"{name} has no {parameter.name}"
            elif other.default != parameter.default and parameter.name not in REQUIRED_AT_RUN:
                yield f"{name}: {parameter.name} is {other.default!r} by default, not {parameter.default!r}"
        for other in found.values():
            named = other.kind in (other.POSITIONAL_OR_KEYWORD, other.KEYWORD_ONLY)
            if named and other.default is other.empty and other.name not in have:
                yield f"{name} wants {other.name}, which the stand-in lacks"


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        real = {name: getattr(importlib.import_module(module), name) for name, module in WRAPPERS.items()}
    except ImportError as error:
        print(f"FlashInfer can't be imported: {error}")
        return 2
    ours = stand_ins()
    found = [f"{name}.{line}" for name in WRAPPERS for line in differences(getattr(ours, name), real[name])]
    print(f"flashinfer-python {version('flashinfer-python')}: {len(found)} differences")
    for line in found:
        print(f"  {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
