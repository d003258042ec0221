"""Text of others on the terminal of a person: no letter of it does anything there but show itself."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["printable"]

# Control characters but tab and newline, those that turn the direction of text, and halves of characters, which no terminal takes.
_ACTS: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with ``\x1b`` written out where a terminal would begin to obey it."""
    return _ACTS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
