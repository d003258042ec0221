"""Each example runs from its file, small: one on emulated workers, as a user starts it, the others as under a launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from multiprocess.crowd import launched

EXAMPLES = Path(__file__).parents[2] / "examples"


MEASURE = ("--measure", "2")


def emulated(tmp_path: Path, *command: str) -> str:
    """As a user starts it: on workers that have a part of a core each. What it prints."""
    done = subprocess.run(
        [sys.executable, *command, *MEASURE],
        cwd=EXAMPLES,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "emulating 3 workers" in done.stdout
    return done.stdout


def on_two(tmp_path: Path, *command: str) -> str:
    """On as many workers, as under any launcher. What rank 0 prints."""
    statuses, said = launched(
        2,
        (str(EXAMPLES / command[0]), *command[1:], *MEASURE),
        folder=tmp_path,
        variables={"XDG_CACHE_HOME": str(tmp_path)},
    )
    assert statuses == [0, 0], said
    return said


def losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([0-9.]+)", output)]


SMALL = ("--width", "16", "--layers", "1", "--steps", "6")


@pytest.mark.parametrize(
    ("start", "command", "told"),
    [
        (
            emulated,
            ("classify_100k.py", "--classes", "3000", "--batch", "16", "--steps", "6"),
            "its TaskGraphs ask for it",
        ),
        (on_two, ("m6_moe.py", "--batch", "8", *SMALL), "its TaskGraphs ask for it"),
        (
            on_two,
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
        (on_two, ("experts_apart.py", *SMALL), "model.layers.0.mlp.experts"),
        (on_two, ("long_context.py", "--length", "96", *SMALL), "sequences split"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_examples_train(tmp_path: Path, start: Callable[..., str], command: tuple[str, ...], told: str) -> None:
    output = start(tmp_path, *command)
    assert told in output
    assert len(losses(output)) == 6
    assert losses(output)[-1] < losses(output)[0]
