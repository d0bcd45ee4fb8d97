"""The command line: all commands in one app, and what their errors become.

Exit codes: 0 passed, 1 a gate or a case failed or a fault was found, 2 bad usage or input, 3 the environment lacks what
was asked for, 130 interrupted. Errors are one line on stderr; a traceback means a bug in diffcheck.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .commands.comparison import diagnose, marginal, run
from .commands.reports import compare, render, schema
from .commands.sweeping import sweep
from .commands.text import capture, convert, needle
from .commands.tools import backends, bench, fixture, inspect, memory
from .errors import EnvironmentMissing, InputError
from .version import __version__

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
INTERRUPTED = 130


def main() -> None:
    """Entry point: runs the app and turns user errors into one line and an exit code."""
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:  # newer versions of click turn the interrupt into an exit code
            raise KeyboardInterrupt
        raise SystemExit(code)
    except InputError as error:
        _fail(str(error), 2)
    except EnvironmentMissing as error:
        _fail(str(error), 3)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", INTERRUPTED)
    except Exception as error:
        # typer may carry its own copy of click, so its usage errors are known by what they can do
        if not hasattr(error, "format_message"):
            raise
        _fail(error.format_message(), error.exit_code)  # type: ignore[attr-defined]


def _fail(message: str, code: int) -> None:
    print(f"diffcheck: {message}", file=sys.stderr)
    raise SystemExit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"diffcheck {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run DeepSeek's reference sparse-attention indexer beside a deployment's numbers."""


for command in (
    run, compare, capture, convert, needle, marginal, sweep, memory, diagnose, inspect, backends, bench, fixture,
    render, schema,
):  # fmt: skip
    app.command()(command)
