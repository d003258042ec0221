"""Generated bad inputs at the level of the command line: each is a clear message within seconds, or a success that is right.

Every command, option, kind of file and variable of the environment (`bad_cases`), spoiled in the ways of accidents and strangers. Most
commands run in processes that are forked from one that has imported torch; one in twenty in a new interpreter. A command that is still
at work after the limit (a job of 2,000,000,000 steps is no mistake) must have said so, and must end with Ctrl-C.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import re
import shutil
import socket
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import ROOT, Results, arguments, spread

sys.path.insert(0, str(ROOT / "tests"))

from bad_calls import Called, bad_calls
from bad_cases import Case, cases
from bad_place import make_place
from warm_command import Ended, run

LIMIT_S = 10.0
STARTING_S = 10.0  # what a new interpreter may take besides, to import torch while others do
SAYING_S = 2.0  # who waits says so every 10 s, and must have done so
SAMPLE = 20  # one case in so many runs in a new interpreter
FAULTS = (
    "traceback",
    "over 10 s",
    "ended without a word",
    "several messages",
    "names no place",
    "an escape sequence",
    "a success that is wrong",
)
AT_WORK = re.compile(
    r"^(step \d|measuring|capturing|waiting for|rank \d+ waits|reading|rehearsing|searching|planning)", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class Judged:
    case: Case
    ended: Ended
    verdict: str
    warm: bool


def main() -> int:
    options = arguments(__doc__, seed=0)
    results = Results("bad_inputs")
    count = 40 if options.quick else 480
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as name:
        folder = Path(name)
        place = folder / "good"
        place.mkdir()
        variables = {"XDG_CACHE_HOME": str(place / "home"), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        os.environ.update(variables)

        def heterodyne(*words: str) -> None:
            ended = run(words, place=place, variables={}, limit_s=120.0)
            if ended.status != 0:
                raise RuntimeError(f"{' '.join(words)}: {ended.said}")

        make_place(place, heterodyne)
        whole = weights(place / "whole")

        def judge(numbered: tuple[int, Case]) -> Judged:
            number, case = numbered
            return judged(case, folder / str(number), good=place, whole=whole, warm=number % SAMPLE != SAMPLE - 1)

        calls = multiprocessing.get_context("spawn").Pool(1)
        calling = calls.apply_async(called)
        with calls, ThreadPoolExecutor(2) as threads:
            found = list(threads.map(judge, enumerate(cases(count, options.seed, place))))
            of_python = calling.get()
    report(results, found)
    report_calls(results, of_python)
    return results.write(options.json)


def judged(case: Case, place: Path, *, good: Path, whole: str, warm: bool) -> Judged:
    shutil.copytree(good, place)
    for name, content in case.files.items():
        if content is None:
            (place / name).unlink()
        else:
            (place / name).write_bytes(content)
    for name, kind in case.odd.items():
        put_odd(place / name, kind)
    allowed_s = LIMIT_S if warm else LIMIT_S + STARTING_S
    variables = {"XDG_CACHE_HOME": str(place / "home"), **case.variables}
    ended = run(case.arguments, place=place, variables=variables, limit_s=allowed_s + SAYING_S, warm=warm)
    verdict = verdict_of(case, ended, place, whole, allowed_s)
    shutil.rmtree(place, ignore_errors=True)
    return Judged(case=case, ended=ended, verdict=verdict, warm=warm)


def put_odd(path: Path, kind: str) -> None:
    """Put something that is no file in the place of one."""
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:  # its path may have 107 letters
                bound.bind(f"/proc/self/fd/{(folder := os.open(path.parent, os.O_RDONLY))}/{path.name}")
                os.close(folder)
        case "device":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case "huge":
            path.touch()
            os.truncate(path, 2**40)
        case "nothing":
            path.touch()
        case "letters":
            path.write_bytes(b"\xff\xfe\x80" * 100)
        case "loop":
            path.symlink_to(path.name)


def verdict_of(case: Case, ended: Ended, place: Path, whole: str, allowed_s: float) -> str:
    """One of `FAULTS`, or what is right: ``message``, ``success`` or ``at work``."""
    said = ended.said
    if "Traceback (most recent call last)" in said or "Exception ignored" in said:
        return "traceback"
    if any(letter in said for letter in "\x1b\x07\x9b\u202e"):
        return "an escape sequence"
    if ended.killed or (ended.seconds > allowed_s and not AT_WORK.search(said)):
        return "over 10 s"
    if ended.interrupted:
        return "at work"
    if ended.status == 0:
        return "success" if not case.refused and is_right(case, place, whole) else "a success that is wrong"
    messages = re.findall(r"^(?:error: |Error: |Usage: )(.*)", said, re.MULTILINE | re.IGNORECASE)
    if ended.status < 0 or not messages:
        return "verify says no" if case.arguments[0] == "verify" and ended.status == 1 else "ended without a word"
    if len(re.findall(r"^error: ", said, re.MULTILINE)) > 1:
        return "several messages"
    # Of a usage error the words come last; of ours, all that follows is part of it.
    start = re.search(r"^error: ", said, re.MULTILINE | re.IGNORECASE)
    message = said[start.start() :] if start else said
    options = (
        word[2:].rstrip("s") for word in case.arguments if word.startswith("--")
    )  # "the speed of rank 0" names --speeds
    return (
        "message"
        if any(name in message for name in (*case.names, *case.arguments[1:], *options, "here/cpu:0", "CPUs of here"))
        else "names no place"
    )


def is_right(case: Case, place: Path, whole: str) -> bool:
    """A run that was resumed has the weights of one that was left alone; losses are numbers; devices given as files are devices still."""
    if not all(Path("/dev", name).is_char_device() for name in ("null", "zero", "full")):
        return False
    if case.equals_whole:
        return weights(place / "run") == whole
    for metrics in place.glob("runs/*/metrics.jsonl"):
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        if not all(math.isfinite(line["loss"]) for line in lines if "loss" in line):
            return False
    return True


def weights(run_directory: Path) -> str:
    path = run_directory / "model" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


def report(results: Results, found: list[Judged]) -> None:
    for kind in dict.fromkeys(each.case.kind for each in found):
        of_kind = [each for each in found if each.case.kind == kind]
        counts = Counter(each.verdict for each in of_kind)
        results.row(kind, cases=len(of_kind), seconds=spread([each.ended.seconds for each in of_kind]), **dict(counts))
    new = [each.ended.seconds for each in found if not each.warm]
    if new:
        results.row("of these in a new interpreter", cases=len(new), seconds=spread(new))
    for each in found:
        if each.verdict in FAULTS:
            results.row(f"fault: {each.verdict}", **shown(each))
    for fault in FAULTS:
        results.bar(fault, sum(each.verdict == fault for each in found), "<= 0")
    results.bar("inputs", len(found), f">= {len(found)}")


def report_calls(results: Results, found: list[Called]) -> None:
    counts = Counter(each.fault or "refused" for each in found)
    results.row("calls of Python", cases=len(found), **dict(counts))
    for each in found:
        if each.fault:
            results.row(f"fault: {each.fault}", call=f"{each.call}({each.argument}={each.value})", said=each.said)
    results.bar(
        "calls with a wrong argument that are no clear refusal", sum(bool(each.fault) for each in found), "<= 0"
    )


def called() -> list[Called]:
    """All calls of Python, one after the other, in a process of their own."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        return list(bad_calls())


def shown(each: Judged) -> dict[str, Any]:
    """What one needs to see it again."""
    files = {
        name: "removed" if text is None else repr(text)[:300] for name, text in each.case.files.items()
    } | each.case.odd
    return {
        "command": " ".join(word if len(word) < 200 else f"{word[:200]}..." for word in each.case.arguments),
        "files": str(files), "variables": str(each.case.variables), "status": each.ended.status,
        "seconds": each.ended.seconds, "said": each.ended.said[-1500:],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
