"""``kill -9`` of a whole run at random moments, resumed each time: the losses of the run that was left alone, bit for bit.

Three workers with unequal shares train a small GPT. The moments are drawn from the whole life of a process: start, capture,
measuring, steps, checkpoints that are being written. The second life is left alone until it has trained a little, because
nothing would ever be measured to its end if every life were shorter than that takes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import ROOT, Results, arguments

JOB = ROOT / "examples" / "first_light.yaml"
CLUSTER = "name: here\nnodes:\n  - name: here\n    devices: [{kind: cpu, count: 3, memory: 2 GiB}]\n"
SMALL = [
    "model.arguments={length: 32, width: 64, layers: 2, heads: 2}",
    "data.sequence_length=32",
    "training.validate_every=0",
]
SMALL += ["training.global_batch_size=12", "checkpoint.every=5", "metrics.tensorboard=false"]
MOST_TRIES = 60


def main() -> int:
    options = arguments(__doc__)
    results = Results("kill_and_resume")
    kills = 4 if options.quick else 20
    steps = 300 if options.quick else 2000
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cluster.yaml").write_text(CLUSTER)
        started = time.perf_counter()
        subprocess.run(command(folder, "undisturbed", steps), check=True, capture_output=True)
        undisturbed_s = time.perf_counter() - started
        # The disturbed run obeys the same plan, or another one would add in another order.
        plan = ["--plan", str(folder / "undisturbed" / "plan.json")]
        killed = at_step = 0
        reached: list[int] = []
        for _ in range(MOST_TRIES):
            resume = ["--resume"] if (folder / "killed" / "checkpoint").is_dir() else fresh(folder)
            process = subprocess.Popen(
                [*command(folder, "killed", steps), *plan, *resume], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
            if killed == 1:
                wait_for_steps(folder, process)
            try:
                _, said = process.communicate(timeout=None if killed == kills else draw.uniform(1.0, 20.0))
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.communicate()
                killed += 1
                reached.append(last_step(folder))
                print(f"killed {killed}/{kills} at step {reached[-1]}", flush=True)
                continue
            if process.returncode != 0:
                raise RuntimeError(said.decode())
            if killed == kills:
                break
            at_step += 1
            print("finished before it could be killed: from the start again", flush=True)
            fresh(folder)
        expected, got = losses(folder / "undisturbed"), losses(folder / "killed")
    different = sum(a != b for a, b in zip(expected, got, strict=False)) + abs(len(expected) - len(got))
    results.row("undisturbed", steps=len(expected), seconds=undisturbed_s, final_loss=expected[-1])
    results.row("killed and resumed", steps=len(got), kills=killed, at_steps=str(reached), final_loss=got[-1])
    results.bar("kills survived", killed, f">= {kills}")
    results.bar("losses that differ in any bit", different, "<= 0")
    return results.write(options.json)


def wait_for_steps(folder: Path, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None and not last_step(folder):
        time.sleep(0.2)


def command(folder: Path, run: str, steps: int) -> list[str]:
    sets = [part for field in [*SMALL, f"training.steps={steps}"] for part in ("--set", field)]
    start = [sys.executable, "-m", "heterodyne", "train", str(JOB), "--cluster", str(folder / "cluster.yaml")]
    return [*start, "--run-dir", str(folder / run), *sets]


def fresh(folder: Path) -> list[str]:
    """Make room for a run from the beginning."""
    subprocess.run(["rm", "-rf", str(folder / "killed")], check=True)
    return []


def lines(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def last_step(folder: Path) -> int:
    return max((int(line["step"]) for line in lines(folder / "killed")), default=0)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run) if "loss" in line]


if __name__ == "__main__":
    sys.exit(main())
