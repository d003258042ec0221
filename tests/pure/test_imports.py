"""Thinking needs no torch: planning, simulating and reporting work on a machine that has none."""

from __future__ import annotations

import subprocess
import sys

THINKING = (
    "units",
    "errors",
    "documents",
    "timeline",
    "job",
    "graph",
    "cluster",
    "plan",
    "cost",
    "sim",
    "predictor",
    "search",
    "api.offline",
)

PROGRAM = """
import importlib, pkgutil, sys
for room in {rooms!r}:
    module = importlib.import_module("heterodyne." + room)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        importlib.import_module(found.name)
loaded = sorted(name for name in ("torch", "transformers") if name in sys.modules)
assert not loaded, f"the thinking wing imported {{loaded}}"
print(sum(name.startswith("heterodyne.") for name in sys.modules))
"""


def test_the_thinking_wing_never_loads_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(rooms=THINKING)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20  # the modules were there to be imported
