"""Each example runs from its file, small: one on emulated workers, as a user starts it, the others as under a launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from heterodyne.processes.port import reserve_port
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
        (on_two, ("looking_inside.py", "--length", "32", "--batch", "4", *SMALL), "steered at layers.0"),
        (on_two, ("predicted_weights.py", "--length", "32", "--batch", "8", *SMALL), "predicted weights (inexact)"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_examples_train(tmp_path: Path, start: Callable[..., str], command: tuple[str, ...], told: str) -> None:
    output = start(tmp_path, *command)
    assert told in output
    assert len(losses(output)) == 6
    assert losses(output)[-1] < losses(output)[0]


def test_two_sites_end_with_the_same_loss(tmp_path: Path) -> None:
    sizes = ("training.steps=8", "training.sync.every=4", "parallelism.measure_s=1", "parallelism.rehearsal_s=0")
    with reserve_port() as port:
        sets = [word for size in (*sizes, f"training.sync.at=127.0.0.1:{port}") for word in ("--set", size)]
    done = subprocess.run(
        [sys.executable, "two_sites.py", *sets],
        cwd=EXAMPLES,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"(north|south): validation loss ([0-9.]+), 5 outer steps, [0-9,]+ bytes", done.stdout)
    assert [site for site, _ in found] == ["north", "south"], done.stdout
    assert found[0][1] == found[1][1]
