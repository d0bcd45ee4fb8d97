"""How `diffcheck run` measures: with or without a run directory, and what an interrupt does meanwhile."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from ..capturing.run import TextRun
from ..run import Outcome, Plan, execute, kept, plan
from ..rundir import open_run
from .output import Steps, say


def measure(todo: Plan, text: TextRun | None, run_dir: Path | None, *, resume: bool) -> tuple[Plan, Outcome]:
    """Run a plan, its text first if there is one; the plan that was run and what it measured, perhaps partial."""
    with ExitStack() as stack:
        journal = None
        if run_dir is not None:
            journal = stack.enter_context(
                open_run(run_dir, todo, resume=resume, text=None if text is None else text.digest)
            )
        if text is not None:
            try:
                todo = plan(text.capture(run_dir, resume=resume))
            except KeyboardInterrupt:
                if run_dir is not None and text.inputs.kind == "model":
                    say(f"finished layers are kept in {run_dir}: the same command with --resume goes on from there")
                raise
        cases = len(todo.layers) * len(todo.cases)
        done = 0 if journal is None else kept(todo, journal)
        if done:
            say(f"{done} of {cases} cases are done, found in {run_dir}")
        stack.enter_context(_interrupted_once())
        outcome = execute(todo, stack.enter_context(Steps(cases - done)), journal)
    if outcome.partial:
        where = "" if run_dir is None else f"; the same command with --resume goes on from {run_dir}"
        say(f"interrupted: {len(outcome.cases)} of {cases} cases are finished{where}")
    return todo, outcome


@contextmanager
def _interrupted_once() -> Iterator[None]:
    """The first SIGINT is a KeyboardInterrupt; from then on one ends the process at once, as if it had no handler."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before != signal.default_int_handler:
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, first)
    yield
    if signal.getsignal(signal.SIGINT) is first:
        signal.signal(signal.SIGINT, before)
