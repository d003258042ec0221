"""Scripts that change things between steps, at random: followed as plain PyTorch does, or refused by the name of what changed.

A life is a model, an optimizer, a plan (or two: saved under one and resumed under the other) and a script of 6 to 20 steps, with
evaluations and changes between them: numbers, tensors, modules, modes, hooks, options of the optimizer, weights, averages (`tests/life/`).
It runs in real processes and in plain PyTorch. *Followed*: each loss, evaluation and output and in the end all weights, buffers and
states within 1e-5 of plain PyTorch's in fp32, relative to their norms (or as near as that is to itself in double precision). *Refused*: by
a HeterodyneError on every rank that names what changed (or its line), before any value was wrong. A change on one rank alone must be
refused with the rank. All else is a failure. ``--seed S --only K`` shows one life as a script, and what becomes of it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import TYPE_CHECKING

from results import Results, arguments

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

if TYPE_CHECKING:
    from life.draw import Life
    from life.judge import Outcome
    from multiprocess.pool import Pool

FULL, QUICK = 400, 40


def main() -> int:
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    from life.draw import KINDS, draw
    from life.watching import watching
    from multiprocess.pool import Pool

    options = arguments(__doc__, seed=0, drawn=("lives", FULL), names=("--events", KINDS))
    count = options.lives or (QUICK if options.quick else FULL)
    numbers = range(count) if options.only is None else [options.only]
    lives = {number: draw(Random(f"{options.seed}/{number}"), kinds=options.events) for number in numbers}
    if options.only is not None:
        print(lives[options.only].script(), flush=True)
    results = Results("lives")
    pools: SimpleQueue[Pool] = SimpleQueue()
    made = [Pool() for _ in range(min(os.cpu_count() or 1, len(lives)))]
    for pool in made:
        pools.put(pool)
    # The lives of a model one after the other on one pool, in which it is captured once.
    groups: dict[str, list[int]] = defaultdict(list)
    for number, life in lives.items():
        groups[life.subject].append(number)
    found: dict[int, Outcome] = {}

    def run(group: Sequence[int]) -> None:
        pool = pools.get()
        for number in group:
            found[number] = told(results, number, lives[number], pool)
        pools.put(pool)

    with ThreadPoolExecutor(len(made)) as executor:
        list(executor.map(run, sorted(groups.values(), key=len, reverse=True)))
    results.rows.sort(key=lambda row: int(row["what"].split()[1]))
    if options.only is None:
        step_s, look_s = made[0].run(2, watching)[0]
        results.row("watching", step_s=step_s, look_s=look_s, modules=65)
        results.bar("looking for changes, of a step of a small transformer", look_s / step_s, "<= 0.01")
    for pool in made:
        pool.close()
    if options.only is not None:
        print(found[options.only].told)
    summary(results, lives, found)
    return results.write(options.json)


def told(results: Results, number: int, life: Life, pool: Pool) -> Outcome:
    from life.lived import lived

    started_s = time.perf_counter()
    outcome = lived(pool, life)
    results.row(
        f"life {number}",
        model=life.subject,
        optimizer=life.optimizer,
        plan=" then ".join(plan for plan, _ in life.parts),
        events="; ".join(life.events()),
        outcome=outcome.what,
        step=outcome.step,
        **(
            {}
            if outcome.what == "followed"
            else {"at": "; ".join(outcome.blamed), "message": " ".join(outcome.told.split())[-500:]}
        ),
        seconds=round(time.perf_counter() - started_s, 1),
    )
    return outcome


def summary(results: Results, lives: dict[int, Life], found: dict[int, Outcome]) -> None:
    """What became of the kinds of change, then the bars."""
    from life.draw import ALONE
    from life.judge import FAILURES

    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in found.values():
        for kind, times in outcome.passed.items():
            kinds[kind]["followed"] += times
        if outcome.what != "followed":
            for kind in outcome.blamed:
                kinds[kind][outcome.what] += 1
    for kind in sorted(kinds, key=lambda kind: (not any(kinds[kind][what] for what in FAILURES), kind)):
        results.row(f"event: {kind}", **kinds[kind])
    counts = Counter(outcome.what for outcome in found.values())
    results.row("all", **counts)
    possible = [number for number, life in lives.items() if ALONE not in life.events()]
    results.bar("silently wrong", counts["wrong"], "<= 0")
    results.bar("raw tracebacks", counts["traceback"], "<= 0")
    results.bar("hangs", counts["hung"], "<= 0")
    results.bar("refused without the name, or on some ranks alone", counts["nameless"], "<= 0")
    results.bar("scripts that plain PyTorch cannot run", counts["void"], "<= 0")
    if possible:
        followed = sum(found[number].what == "followed" for number in possible)
        results.bar("followed, of changes on all ranks", followed / len(possible), ">= 0.70")


if __name__ == "__main__":
    sys.exit(main())
