"""The JSON Schema (draft 2020-12) of what each command writes with --json.

The schemas are files of this package; a field that a schema does not name is an error, so a report cannot grow without
its schema.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from ..errors import InputError

SCHEMA_VERSION = 1
COMMANDS = ("run", "compare", "diagnose", "marginal", "needle", "sweep", "memory", "inspect", "bench")


def load_schema(command: str) -> dict[str, Any]:
    """The schema of a command's JSON; InputError for a command without one."""
    if command not in COMMANDS:
        raise InputError(f"schema: {command!r}, expected one of {', '.join(COMMANDS)}")
    text = files("diffcheck").joinpath("schemas", f"{command}.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
