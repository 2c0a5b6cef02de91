"""Modules that keep all of an original (children, parameter names, class) and change how it computes: a class of both is made of a
mixin, whose forward runs, and the original's class, whose forward stays at hand as `origin.forward`."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


class Mixed:
    """What such mixins share. State whose name is in `OWN` is of this process, and left out of copies and pickles."""

    origin: type[nn.Module]
    OWN: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self.OWN}

    def __reduce_ex__(self, protocol: Any) -> Any:
        mixin = next(base for base in type(self).__mro__ if issubclass(base, Mixed) and base is not type(self))
        return _blank, (mixin, self.origin), self.__getstate__()


def mix(mixin: Any, original: nn.Module) -> Any:
    """A module of `mixin` and the original's class, with the original's children and state."""
    made = _blank(mixin, type(original))
    made.__dict__.update(original.__dict__)
    made._modules = dict(original._modules)
    return made


@cache
def _mixed_class(mixin: Any, origin: Any) -> Any:
    name = f"K{origin.__name__}"
    return type(name, (mixin, origin), {"origin": origin, "__module__": mixin.__module__})


def _blank(mixin: Any, origin: Any) -> Any:
    made = _mixed_class(mixin, origin)
    module: Any = made.__new__(made)
    nn.Module.__init__(module)
    return module
