"""Token ids of a text: a JSON list of ids, or a text file through the checkpoint's own tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import EnvironmentMissing, InputError
from ..packages import present
from ..refimpl.config_json import load_json

TOKENISER_FILE = "tokenizer.json"


def read_tokens(path: Path) -> list[int]:
    """The ids in a JSON file that holds one list of integers; InputError otherwise."""
    ids = load_json(path, "a JSON list of token ids", ", expected a list of token ids")
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise InputError(f"{path}: expected a JSON list of token ids, at least one, all integers")
    return ids


def read_text(path: Path) -> str:
    """A text file's contents; InputError when it is absent, empty or not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, expected a text") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable as UTF-8 text ({error})") from None
    if not text:
        raise InputError(f"{path}: is empty, expected a text")
    return text


class Tokeniser:
    """A checkpoint's tokeniser. EnvironmentMissing without the tokenizers package, InputError without its file."""

    def __init__(self, directory: Path) -> None:
        if not present("tokenizers"):
            raise EnvironmentMissing(
                "a text needs the tokenizers package: pip install 'diffcheck[text]', or give token ids"
            )
        from tokenizers import Tokenizer

        path = directory / TOKENISER_FILE
        if not path.is_file():
            raise InputError(f"{path}: no such file, expected the checkpoint's tokeniser (or give token ids)")
        try:
            self._tokeniser: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise InputError(f"{path}: not readable as a tokeniser ({error})") from None

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that tokenizer.json adds by itself."""
        return list(self._tokeniser.encode(text).ids)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a piece of text, without any special token around it."""
        return list(self._tokeniser.encode(text, add_special_tokens=False).ids)
