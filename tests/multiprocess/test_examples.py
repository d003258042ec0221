"""Each example runs from its file, as a user would start it, small."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(tmp_path: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command, "--measure", "2"],
        cwd=EXAMPLES,
        env={**os.environ, "HETERODYNE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([0-9.]+)", output)]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("classify_100k.py", "--classes", "3000", "--batch", "16", "--steps", "6"), "its TaskGraphs ask for it"),
        (("m6_moe.py", "--width", "16", "--layers", "1", "--batch", "8", "--steps", "6"), "its TaskGraphs ask for it"),
        (
            (
                "llama_hybrid.py",
                "--strategy",
                "split",
                "--width",
                "32",
                "--layers",
                "1",
                "--length",
                "32",
                "--steps",
                "6",
            ),
            "weights split",
        ),
        (("long_context.py", "--width", "16", "--layers", "1", "--length", "96", "--steps", "6"), "sequences split"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_examples_train(tmp_path: Path, command: tuple[str, ...], told: str) -> None:
    output = run(tmp_path, *command)
    assert told in output
    assert len(losses(output)) == 6
    assert losses(output)[-1] < losses(output)[0]
