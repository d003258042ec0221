"""What is published: the source with its tests, and a wheel that has all that the package reads."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import heterodyne

ROOT = Path(__file__).resolve().parents[2]
KINDS = "import sys; sys.path.insert(0, sys.argv.pop(1)); from heterodyne.cli import main; main()"
BUILD = "from setuptools import build_meta; build_meta.build_sdist({out!r}); build_meta.build_wheel({out!r})"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where source and wheel are, both made of a copy of the repository."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("packaging")
    copy, out = folder / "copy", folder / "out"
    copy.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("the repository is not there: this is a published source")
    for name in listed.stdout.splitlines():
        source, target = ROOT / name, copy / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
    out.mkdir()
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUILD.format(out=str(out))], cwd=copy, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return out


def test_the_source_has_tests_docs_and_benchmarks(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    for wanted in ("LICENSE", "tests/conftest.py", "docs/layout.md", "benchmarks/run_all.py", "Makefile"):
        assert wanted in names
    assert not [name for name in names if "__pycache__" in name]


def test_the_wheel_plans_in_a_place_of_its_own(built: Path, tmp_path: Path) -> None:
    """Only the wheel is on the path: what it reads beside its modules must be in it."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    site = tmp_path / "site"
    package = Path(heterodyne.__file__).parent
    beside = {
        path.relative_to(package) for path in package.rglob("*") if path.suffix in (".yaml", ".html", ".css", ".js")
    }
    assert beside
    assert all((site / "heterodyne" / name).is_file() for name in beside)
    metadata = next(site.glob("*.dist-info/METADATA")).read_text()
    assert "License-Expression: Apache-2.0" in metadata
    told = subprocess.run(
        [sys.executable, "-c", KINDS, str(site), "kinds"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert "H100" in told.stdout
