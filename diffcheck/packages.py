"""Whether another package is here, without importing it."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def present(package: str) -> bool:
    """Whether a top-level package could be imported, as far as one can tell without doing it."""
    if package in sys.modules:
        return sys.modules[package] is not None
    return find_spec(package) is not None


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None where there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
