"""The documentation says what the code does: generated pages are up to date, examples parse, and commands exist."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import typer.main
import yaml

from heterodyne.cli import app
from heterodyne.job import Job

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_generated_pages_are_those_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for name, text in generate.pages().items():
        assert (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") == text, "run python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_code_parse(page: Path) -> None:
    for code in blocks(page, "python"):
        ast.parse(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_jobs_are_jobs(page: Path) -> None:
    for text in blocks(page, "yaml"):
        Job.model_validate(yaml.safe_load(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist(page: Path) -> None:
    """Every ``heterodyne VERB --option`` of an indented example."""
    commands = typer.main.get_command(app.application()).commands  # type: ignore[attr-defined]
    for line in re.findall(
        r"^    (?:\S*/)?heterodyne ([a-z]+ .*|[a-z]+)$", page.read_text(encoding="utf-8"), re.MULTILINE
    ):
        verb, *rest = line.split("#")[0].split(" -- ")[0].split()
        assert verb in commands, line
        options = {option for parameter in commands[verb].params for option in parameter.opts}
        assert {word.strip("[]") for word in rest if word.strip("[]").startswith("--")} <= options, line
