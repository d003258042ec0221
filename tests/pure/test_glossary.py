"""Docstrings are sentences with a subject, and words for what devices, ranks and tensors do are the field's own."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src" / "heterodyne"
STILL_TO_DO = (
    "cost/",
    "predictor/",
    "runtime/",
    "search/",
    "sim/",
)
"""Rooms that are not mended yet; but for `DONE` inside of them."""
DONE = (
    "runtime/data/",
    "runtime/exact/",
    "runtime/liveness/",
    "runtime/recapture/",
    "runtime/records/",
    "runtime/rendezvous/",
)
CLAUSES = frozenset({"How", "Of", "What", "When", "Where", "Whether", "Which", "Who", "Why"})
"""A docstring of a function that opens with one has no verb: write "Return whether ...", "Yield what ...", "Note where ..."."""
WORDS = {
    r"lies?|lying": "a tensor is laid out on devices; a sample is in a batch",
    r"meets": "ranks communicate, samples depend on each other, a matrix is multiplied",
    r"told": "reported, printed, known",
    r"anew": "again",
    r"for ever": "forever",
    r"answers? for": "owns, takes care of",
    r"gives? way": "is replaced",
    r"thereof": "of it",
}


ANY_WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b")


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Each file of the package by its path."""
    return {path.relative_to(SRC).as_posix(): ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}


def is_checked(name: str) -> bool:
    return name.startswith(DONE) or not name.startswith(STILL_TO_DO)


def without_verb(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0] in CLAUSES:
                yield f"{node.lineno} {node.name}: {' '.join(words[:8])}"


def unknown_words(tree: ast.Module) -> Iterator[str]:
    """What stands in docstrings and messages; a string without a space is a name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for found in ANY_WORD.finditer(node.value):
                instead = next(words for word, words in WORDS.items() if re.fullmatch(word, found[0]))
                yield f"{node.lineno} {found[0]!r} ({instead}): {node.value[max(0, found.start() - 30) : found.end() + 30]!r}"


@pytest.mark.parametrize("faults", [without_verb, unknown_words])
def test_docstrings_and_messages_keep_to_the_glossary(faults: Callable[[ast.Module], Iterator[str]]) -> None:
    assert [f"{name}:{fault}" for name, tree in trees().items() if is_checked(name) for fault in faults(tree)] == []


def test_what_is_not_kept_to_is_found() -> None:
    text = '''
def shares():
    """Of each rank, what it takes."""
    raise ValueError(f"{1} lies on two ranks")
'''
    assert [fault.partition(" ")[0] for fault in without_verb(ast.parse(text))] == ["2"]
    assert len(list(unknown_words(ast.parse(text)))) == 1


def test_rooms_that_are_done_leave_the_list() -> None:
    """A room that keeps to the glossary is checked from then on."""
    for room in STILL_TO_DO:
        left = [tree for name, tree in trees().items() if name.startswith(room) and not is_checked(name)]
        assert any(next(without_verb(tree), None) or next(unknown_words(tree), None) for tree in left), room
