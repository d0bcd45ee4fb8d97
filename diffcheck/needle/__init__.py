"""Needle tests on text, through the whole model: is what a question needs still selected?"""

from .build import NeedleTest, NeedleText, build_text, make_test, read_test
from .grid import Cell, run_grid, summarise

__all__ = ["Cell", "NeedleTest", "NeedleText", "build_text", "make_test", "read_test", "run_grid", "summarise"]
