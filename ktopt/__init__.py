"""ktopt: a declarative model-optimization compiler.

    plan = ktopt.compile("rules.yaml", "deepseek-v3")        what each module becomes, and why
    report = ktopt.check("rules.yaml", "deepseek-v3")        what is wrong with a rule file
    memory = ktopt.memory(plan, 4096)                        what it takes on each device for a context
    model = ktopt.apply(plan, weights="model.gguf")          a transformers model, optimized
    model, tokenizer = ktopt.load_model("folder")            the same from a folder that `ktopt apply` wrote

Importing this package imports no torch and no transformers; it installs one import hook (hook.py), which registers the quantizer
with transformers once transformers is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ktopt.hook import install

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ktopt.api import apply, load_model, memory
    from ktopt.compiler import check, compile

__all__ = ["__version__", "apply", "check", "compile", "load_model", "memory"]

_HOMES = {
    "check": "ktopt.compiler", "compile": "ktopt.compiler", "apply": "ktopt.api", "load_model": "ktopt.api", "memory": "ktopt.api",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ktopt' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


install()
