"""Objects that users name as `path.py:object`: the file is run, and what is called `object` in it is theirs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .errors import InputError


def load_object(path: Path, attribute: str, *, what: str, expected: str) -> Any:
    """The object; InputError, which begins with `what`, for a file that is absent or fails, or lacks the object."""
    if not path.is_file():
        raise InputError(f"{what}: {path}: no such file, expected path.py:object")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        return getattr(module, attribute)
    except AttributeError:
        raise InputError(f"{what}: {path} has no {attribute!r}, expected {expected}") from None
    except Exception as error:
        raise InputError(f"{what}: {path} cannot be loaded: {type(error).__name__}: {error}") from None
