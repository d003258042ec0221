"""What the README claims is what the benchmarks wrote, and what it points to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_its_figures_are_those_of_the_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import run_all

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert run_all.with_table(readme, run_all.kept_results()) == readme


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "docs/index.md", "docs/layout.md", "docs/design.md", "benchmarks/RESULTS.md"],
)
def test_its_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert missing == []
