"""What every benchmark prints and writes: rows with their spread, bars with their verdict, and where it was run.

{"name", "machine", "commit", "command", "rows": [...], "bars": {NAME: {"value", "bar", "ok"}}}
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

__all__ = ["Results", "arguments", "spread"]

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "data"


def arguments(
    description: str | None,
    *,
    whole: str | None = None,
    seed: int | None = None,
    names: tuple[str, tuple[str, ...]] | None = None,
    part: str | None = None,
    resumed: str | None = None,
    drawn: tuple[str, int] | None = None,
) -> argparse.Namespace:
    """``--quick`` for a form of at most two minutes, ``--json FILE`` for a machine; ``--all``, if there is more than ten minutes hold;
    ``--cases 0-4``, if a ``part`` of the cases can be measured by itself;
    ``--keep FOLDER`` and ``--minutes M``, if what is ``resumed`` can be done in several calls;
    ``--NAME N`` and ``--only K``, if N of what is ``drawn`` are, of which the K-th can be looked at by itself;
    ``--seed``, if something is drawn; an option such as ``--plans A,B`` with which of the names are wanted, by default all.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a form of at most two minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here as JSON")
    if whole:
        parser.add_argument("--all", action="store_true", help=whole)
    if part:
        parser.add_argument("--cases", type=_range, metavar="FIRST-LAST", help=f"only these, {part}")
    if resumed:
        parser.add_argument(
            "--keep",
            type=Path,
            metavar="FOLDER",
            help=f"keep there what was found; other calls go on with its {resumed}",
        )
        parser.add_argument(
            "--minutes", type=float, default=math.inf, help=f"after so many, begin no further {resumed}"
        )
    if drawn is not None:
        name, many = drawn
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"so many are drawn; {many} by default")
        parser.add_argument("--only", type=int, metavar="K", help="only the K-th, from 0, with all that is known of it")
    if seed is not None:
        parser.add_argument("--seed", type=int, default=seed, help=f"what is drawn follows from it; {seed} by default")
    if names is not None:
        option, known = names
        parser.add_argument(option, type=_some_of(known), default=known, metavar=",".join(known), help="only these")
    return parser.parse_args()


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _some_of(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def chosen(text: str) -> tuple[str, ...]:
        if unknown := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: give some of {', '.join(known)}")
        return tuple(text.split(","))

    return chosen


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and count of repeated measurements."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "q1": low, "q3": high, "n": len(values)}


class Results:
    """Collects the rows and bars of one benchmark."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []
        self.bars: dict[str, dict[str, Any]] = {}

    def take_over(self, path: Path, parts: Sequence[str]) -> None:
        """What an earlier run has written there, but for rows of these parts, which were run now; ``part`` of a row says of which it is."""
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            self.rows = [*(row for row in before["rows"] if row.get("part") not in parts), *self.rows]
            self.bars = {**before["bars"], **self.bars}

    def row(self, what: str, **figures: Any) -> None:
        figures = {name: _without_places(value) if isinstance(value, str) else value for name, value in figures.items()}
        self.rows.append({"what": what, **figures})
        print(f"{what:<44} " + "  ".join(f"{k} {_short(v)}" for k, v in figures.items()), flush=True)

    def bar(self, name: str, value: float, bar: str) -> None:
        """``bar`` reads ``>= 1.85`` or ``<= 0.10``."""
        relation, bound = bar.split()
        ok = bool(value >= float(bound) if relation == ">=" else value <= float(bound))
        self.bars[name] = {"value": value, "bar": bar, "ok": ok}
        print(f"{'ok  ' if ok else 'MISS'} {name}: {value:.4g} ({bar})", flush=True)

    def write(self, path: Path | None) -> int:
        """Write the JSON if a file is wanted; 0 if every bar holds, else 1."""
        if path is not None:
            content = {
                "name": self.name,
                "machine": _machine(),
                "commit": _commit(),
                "command": " ".join(["python", f"benchmarks/{self.name}.py", *_without_file(sys.argv[1:])]),
                "rows": self.rows,
                "bars": self.bars,
            }
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return 0 if all(bar["ok"] for bar in self.bars.values()) else 1


def _without_file(arguments: Sequence[str]) -> list[str]:
    """Where the results are written is no part of what was measured."""
    kept = list(arguments)
    if "--json" in kept:
        place = kept.index("--json")
        del kept[place : place + 2]
    return kept


def _without_places(text: str) -> str:
    """Return a message without where this machine keeps the project and its libraries."""
    return text.replace(f"{sysconfig.get_path('purelib')}/", "").replace(f"{ROOT}/", "")


def _short(value: Any) -> str:
    if isinstance(value, dict) and "median" in value:
        return f"{value['median']:.4g} [{value['q1']:.4g} .. {value['q3']:.4g}] n={value['n']}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def _commit() -> str:
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return git.stdout.strip() or "unknown"
