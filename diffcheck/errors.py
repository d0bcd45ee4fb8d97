"""Exceptions that the command line turns into exit codes: InputError into 2, EnvironmentMissing into 3."""

from .refimpl import InputError

__all__ = ["EnvironmentMissing", "InputError"]


class EnvironmentMissing(RuntimeError):
    """Something that was asked for is not on this machine; the message says what and how to get it."""
