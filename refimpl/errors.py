"""The one exception that means "your input is wrong", as opposed to "our code is wrong".

Everything that a user can get wrong (a config value, a tensor's shape, a file) raises `InputError` with one clear
line: what, where, and what was expected. The command line turns it into exit code 2; broken invariants stay asserts.
"""


class InputError(ValueError):
    """Bad input from the user; the message is one line saying what, where and what was expected."""
