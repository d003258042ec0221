"""The tour shows each law of docs/design.md and each room of docs/layout.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "processes/": "it starts processes: tests/multiprocess/test_launch.py",
    "eager.py": "it needs compiled code, which takes seconds to make: tests/api/test_as_it_is.py",
    "runtime/split/": "its members are processes: tests/multiprocess/split/",
}


def shown() -> set[str]:
    """What tests with the mark say that they show."""
    texts = (file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    marks = (mark for text in texts for mark in re.findall(r"mark\.tour\(([^)]*)\)", text))
    return {name for mark in marks for name in re.findall(r'"([^"]*)"', mark)}


def test_each_law_and_each_room_is_shown() -> None:
    laws = re.findall(r"^(\d)\. \*\*", (ROOT / "docs" / "design.md").read_text(encoding="utf-8"), re.MULTILINE)
    table = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs" / "layout.md").read_text(encoding="utf-8"), re.MULTILINE)
    rows = [set(re.findall(r"`(.*?)`", row)) for row in table]
    assert laws
    assert rows
    found = shown()
    known = {f"law {law}" for law in laws}.union(*rows)
    assert found | ELSEWHERE.keys() <= known, "no law and no room has this name"
    assert [row for row in rows if not row & (found | ELSEWHERE.keys())] == [], "a room without a test in the tour"
    assert {name for name in known if name.startswith("law")} <= found, "a law without a test in the tour"
    assert not found & ELSEWHERE.keys()
