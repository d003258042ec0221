"""The random tests with new seeds, round after round, until Ctrl-C. Arguments: tests to which it is confined.

HETERODYNE_FUZZ_SEED=N runs the one round of that seed. The exit status is 1 if any test has failed.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator

REPLAY = "replay: "
PYTEST = (sys.executable, "-m", "pytest", "--quiet", "-m", "hypothesis", "-p", "no:cacheprovider")
BESIDE_EACH_OTHER = ("--numprocesses", "logical", "--maxprocesses", "8", "--dist", "loadfile", "--no-loadscope-reorder")


def seeds() -> Iterator[int]:
    given = os.environ.get("HETERODYNE_FUZZ_SEED")
    if given is not None:
        yield int(given)
        return
    while True:
        yield secrets.randbelow(2**32)


def run(seed: int, tests: list[str]) -> Iterator[str]:
    """One round; the lines that it prints. Ctrl-C reaches it too, and it ends by itself."""
    command = (*PYTEST, *BESIDE_EACH_OTHER, "--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}", *tests)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        yield from process.stdout


def main(tests: list[str]) -> int:
    stopped: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: stopped.append(number))
    replays: list[str] = []
    rounds = 0
    for seed in seeds():
        rounds += 1
        print(f"round {rounds}: HETERODYNE_FUZZ_SEED={seed} make fuzz", flush=True)
        for line in run(seed, tests):
            print(line, end="", flush=True)
            if line.startswith(REPLAY):
                replays.append(line)
        if stopped:
            break
    print(f"{rounds} rounds, {len(replays)} failures", *map(str.rstrip, replays), sep="\n")
    return 1 if replays else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["tests"]))
