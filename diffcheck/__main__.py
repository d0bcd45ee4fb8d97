"""`python -m diffcheck`."""

from .cli import main

main()
