"""Naming the cause of a difference: given a trace of a deployment, the first wrong stage and what is wrong there.

`evidence` reads a trace, `engine` works through one layer, `arms` and `hints` say what could be wrong and `search` what
explains the difference, `selection` and `pages` judge indices and cache pages, `verdict` tells faults from choices,
`report` prints, `answer` joins a server's returned selection with inputs. The method and its limits are described in
docs/diagnose.md.
"""

from .answer import InputsFrom, diagnose_answer
from .report import Diagnosis, diagnose, render

__all__ = ["Diagnosis", "InputsFrom", "diagnose", "diagnose_answer", "render"]
