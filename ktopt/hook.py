"""The one thing that `import ktopt` does: have ktopt's quantizer registered with transformers, whenever that is loaded.

Importing transformers takes seconds, so it isn't done here. A finder on sys.meta_path waits for transformers' quantizer module
and registers once that has run; where it is loaded already, registration happens at once. Either order works, and so does doing
it twice.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

AWAITED = "transformers.quantizers.auto"


class QuantizerHook:
    """A meta-path finder that finds nothing itself: it wraps the loader that others find for the awaited module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != AWAITED:
            return None
        for finder in list(sys.meta_path):
            if finder is self:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: Any) -> None:
        run = loader.exec_module

        def run_and_register(module: Any) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            register()

        loader.exec_module = run_and_register


def install() -> None:
    """Register now if transformers' quantizers are loaded, otherwise when they are."""
    if AWAITED in sys.modules:
        register()
    elif not any(isinstance(finder, QuantizerHook) for finder in sys.meta_path):
        sys.meta_path.insert(0, QuantizerHook())


def register() -> None:
    """Tell transformers of quant_method "ktopt"."""
    import_module("ktopt.quantizer").register()
