"""One table says what may be passed to a public function."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from heterodyne.arguments import checked_arguments, described
from heterodyne.errors import HeterodyneError

Where = Literal["all", "rank0"]


@checked_arguments
def call(directory: Path | str | None = None, *, seed: int = 0, where: Where = "all", other: object = None) -> str:
    return f"{directory} {seed} {where} {other}"


def test_what_is_right_is_passed_on() -> None:
    assert call("here", seed=-1, where="rank0", other=object) == f"here -1 rank0 {object}"
    assert call(None) == "None 0 all None"
    with pytest.raises(TypeError, match="unexpected"):
        call(wrong=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"directory": 3}, "directory is 3; it is the path of a file or directory, or None"),
        ({"directory": "\0"}, "the path of a file"),
        ({"directory": b"x"}, "the path of a file"),
        ({"seed": None}, "seed is None; it is a whole number"),
        ({"seed": True}, "seed is True"),
        ({"seed": 10**5000}, "seed is a number of 16,610 bits"),
        ({"where": "rank1"}, "where is 'rank1', not one of all, rank0"),
        ({"where": ["all"]}, "where is "),
        ({"seed": 2.5, "where": 3}, r"seed is 2.5.*where is 3"),
    ],
    ids=range(9),
)
def test_what_is_wrong_is_told_by_name(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(HeterodyneError, match=f"(?s)^call cannot take these arguments:.*{told}"):
        call(**arguments)


def test_a_message_has_no_letter_that_a_terminal_obeys() -> None:
    with pytest.raises(HeterodyneError) as caught:
        call(where="\x1b[31m\x9b\u202e")  # type: ignore[arg-type]
    assert not {"\x1b", "\x9b", "\u202e"} & set(str(caught.value))
    assert str(HeterodyneError("a\x1b[31m\x9b\u202eb\n\tc")) == "a\\x1b[31m\\x9b\\u202eb\n\tc"
    assert described(int) == "the class int"
