"""Which versions are installed, from package metadata: nothing is imported."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed(package: str) -> str:
    """A package's installed version, "" where it isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
