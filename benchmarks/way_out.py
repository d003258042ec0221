"""Ways for a run to end: signals at each phase, errors, a forgotten ``with``, a full disk, a launcher that is gone; under four plans.

Two workers of this machine train a small model, by a job or by a loop of their own. Something happens to them at a step or a checkpoint.
From then on it is measured how long anything of the run lives, beside what it was to finish first; whether the status is right,
whether what was promised is there (a checkpoint, a line, the script's own traceback), and which processes are left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from results import ROOT, Results, arguments

CLUSTER = "name: here\nnodes:\n  - name: here\n    devices: [{kind: cpu, count: 2, memory: 2 GiB}]\n"
JOB = """
model: {factory: "way_out_model.py:build"}
data: {text: text.txt, sequence_length: 16, cache: cache}
training: {steps: 8, global_batch_size: 8, validate_every: 0, validation_samples: 8}
parallelism: {measure_s: 0.3, rehearsal_s: 0, check_s: 0}
checkpoint: {every: 2, keep: 9}
metrics: {tensorboard: false}
"""
LOOP = """
import os, sys
from pathlib import Path
import torch
import heterodyne as hd
from way_out_model import reached
way, plan, run = sys.argv[1:]
torch.manual_seed(0)
rank = int(os.environ["RANK"])
layers = [torch.nn.Linear(16, 16) if k % 2 else torch.nn.Tanh() for k in range(1, 8)]
batch = torch.randn(8, 16), torch.randint(0, 16, (8,))
def distribute():
    loss = torch.nn.functional.cross_entropy
    found = hd.PlanOptions(plan, measure_s=0.3, rehearsal_s=0.0, check_s=0.0)
    return hd.distribute(torch.nn.Sequential(*layers), batch, loss=loss, plan=found, run=run or None)
trainer = distribute()
trainer.step(batch)
reached("step")
if way == "raises" and rank == 1:
    raise ValueError("an error of the script")
if way == "refused":
    trainer.step((batch[0], torch.full((8,), 99)))
if way == "caught":
    with trainer:
        try:
            trainer.step((batch[0].double(), batch[1]) if rank == 1 else batch)
        except hd.HeterodyneError:
            pass
elif way != "forgets":
    trainer.step(batch)
"""
IN_TIME_S, LONG_S, FOREVER_S = 10.0, 17.0, 3600.0  # LONG_S: more than the grace of a launcher
PATIENCE_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a run ends.

    Args:
        environment: what happens, for `way_out_model`.
        at: the mark at which the clock starts, and ``act`` is called with the launcher and the process ids of the ranks.
        first_s: what is to be finished first.
        statuses: one of them is the right one.
        step: there is a whole checkpoint of it, or of a later one.
        says: what is in what people see.
    """

    name: str
    loop: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    at: str = "step"
    act: Callable[[psutil.Process, Sequence[int]], None] = lambda _launcher, _ranks: None
    first_s: float = 0.0
    statuses: tuple[int, ...] = (0,)
    step: int = 0
    says: str = ""


def _signal(number: signal.Signals, *, again: bool = False) -> Callable[[psutil.Process, Sequence[int]], None]:
    def act(launcher: psutil.Process, _: Sequence[int]) -> None:
        launcher.send_signal(number)
        if again:
            time.sleep(1.5)
            launcher.send_signal(number)

    return act


def _kill_both(launcher: psutil.Process, ranks: Sequence[int]) -> None:
    for child in launcher.children():
        if child.pid not in ranks:
            child.kill()
    launcher.kill()


def _slow(what: str, seconds: float) -> dict[str, str]:
    return {"WAY_OUT_AT": "3", f"WAY_OUT_{what}_S": str(seconds)}


_GOES_ON = "Training goes on"
WAYS = (
    Way(name="SIGTERM in a long step", environment=_slow("STEP", LONG_S), act=_signal(signal.SIGTERM), first_s=LONG_S, statuses=(143,),
        step=4, says="is finished first"),
    Way(name="a full disk once", environment={"WAY_OUT_FULL": "1"}, at="try-0", first_s=30.0, step=8, says=_GOES_ON),
    Way(name="guardian and launcher killed", environment=_slow("STEP", FOREVER_S), act=_kill_both, statuses=(-9,), step=2),
    Way(name="a second Ctrl-C in a step", environment=_slow("STEP", FOREVER_S), act=_signal(signal.SIGINT, again=True), statuses=(130,),
        step=2),
    Way(name="Ctrl-C in a long step", environment=_slow("STEP", LONG_S), act=_signal(signal.SIGINT), first_s=LONG_S, statuses=(130,),
        step=4),
    Way(name="SIGTERM to one rank", environment=_slow("STEP", LONG_S), act=lambda _, ranks: os.kill(ranks[1], signal.SIGTERM),
        first_s=LONG_S, statuses=(130,), step=4, says="rank 1 got SIGTERM"),
    Way(name="SIGTERM in a checkpoint", environment=_slow("WRITE", LONG_S), at="write", act=_signal(signal.SIGTERM), first_s=2 * LONG_S,
        statuses=(143,), step=2),
    Way(name="a full disk for good", environment={"WAY_OUT_FULL": "99"}, at="try-0", first_s=30.0, statuses=(2,), says="No space left"),
    Way(name="launcher killed", environment=_slow("STEP", FOREVER_S), act=lambda launcher, _: launcher.kill(), statuses=(-9,), step=2),
    Way(name="a rank killed", environment=_slow("STEP", FOREVER_S), act=lambda _, ranks: os.kill(ranks[1], signal.SIGKILL),
        statuses=(137,), step=2, says="rank 1"),
    Way(name="an error in a step", environment={"WAY_OUT_AT": "3", "WAY_OUT_RAISES": "1"}, statuses=(1,), step=2,
        says="an error of the script"),
    Way(name="a loop that forgets 'with'", loop="forgets"),
    Way(name="a loop that raises", loop="raises", statuses=(1,), says="an error of the script"),
    Way(name="a step that is refused", loop="refused", statuses=(1, 2), says="99"),
    Way(name="an error that is caught", loop="caught", statuses=(1,), says="has had an error that the others have not"),
)  # fmt: skip
PLANS = ("data", "pipeline", "split", "zero3")


def main() -> int:
    options = arguments(__doc__, names=("--plans", PLANS), part="of the ways under each plan")
    results = Results("way_out")
    plans = PLANS[:1] if options.quick else options.plans
    ways = [WAYS[k] for k in options.cases or range(2 if options.quick else len(WAYS))]
    late = wrong = lost = behind = 0
    for plan in plans:
        with tempfile.TemporaryDirectory(prefix="way-out-") as name:
            folder = Path(name)
            files = {
                "cluster.yaml": CLUSTER,
                "job.yaml": JOB,
                "loop.py": LOOP,
                "text.txt": "A text to train on. " * 2000,
            }
            for file, text in files.items():
                (folder / file).write_text(text)
            (folder / "way_out_model.py").write_bytes((ROOT / "benchmarks" / "way_out_model.py").read_bytes())
            for number, way in enumerate(ways):
                row = went(way, number, plan, folder)
                results.row(f"{plan}: {way.name}", **row)
                late += row["ended_s"] > IN_TIME_S
                wrong += row["status"] not in way.statuses
                lost += row["step"] < way.step or not row["said"]
                behind += row["left"]
    results.bar("ways that end late", late, "<= 0")
    results.bar("wrong statuses", wrong, "<= 0")
    results.bar("promises that were not kept", lost, "<= 0")
    results.bar("processes left behind", behind, "<= 0")
    return results.write(options.json)


def went(way: Way, number: int, plan: str, folder: Path) -> dict[str, int | float | bool]:
    """Start it, let it happen, and look at the end."""
    place, run = folder / f"way-{number}", folder / f"run-{number}"
    place.mkdir()
    given = planned(folder, plan, loop=bool(way.loop))
    with (place / "said").open("wb") as said:
        process = subprocess.Popen(
            command(run, str(given), way.loop), cwd=folder, stdout=said, stderr=subprocess.STDOUT,
            env=environment(place, way.environment), start_new_session=True,
        )  # fmt: skip
        marks = wait_for(lambda: sorted(place.glob(f"{way.at}.*")), 2, process)
        ranks = [int(mark.read_text()) for mark in marks]
        if process.poll() is None:
            way.act(psutil.Process(process.pid), ranks)
        started = time.monotonic()
        status = process.wait(PATIENCE_S)
        while (left := alive(place)) and time.monotonic() - started < PATIENCE_S / 4:
            time.sleep(0.1)
        seconds = time.monotonic() - started
    for one in left:
        one.kill()
    text = (place / "said").read_text(errors="replace")
    if status not in way.statuses or (way.says and way.says not in text):
        print(f"--- {way.name}: status {status}\n{text[-3000:]}", flush=True)
    return {
        "ended_s": max(0.0, seconds - way.first_s),
        "status": status,
        "step": max((int(path.parent.name.removeprefix("step-")) for path in run.glob("checkpoint/step-*/manifest.json")
                     if path.parent.name.removeprefix("step-").isdigit()), default=0),
        "said": way.says in text,
        "left": len(left),
    }  # fmt: skip


def planned(folder: Path, plan: str, *, loop: bool) -> Path:
    """The plan that is given, so that nothing is measured; made by a run that ends in peace."""
    run = folder / f"planned-{'loop' if loop else 'job'}"
    path = run.with_suffix(".json")
    if not path.exists():
        (place := folder / f"{run.name}-marks").mkdir()
        strategy = "equal" if plan in ("data", "zero3") else plan  # each device takes part
        made = subprocess.run(
            command(run, strategy, "plans" if loop else ""), cwd=folder, env=environment(place, {}), capture_output=True,
            check=False,
        )  # fmt: skip
        if made.returncode:
            raise RuntimeError(made.stdout.decode() + made.stderr.decode())
        content = json.loads((run / "plan.json").read_text())
        path.write_text(json.dumps({**content, "zero": 3} if plan == "zero3" else content))
    return path


def command(run: Path, plan: str, loop: str) -> list[str]:
    start = [sys.executable, "-m", "heterodyne"]
    if loop:
        own = [sys.executable, "loop.py", loop, plan, str(run) if loop == "plans" else ""]
        return [*start, "emulate", "--mechanism", "signals", "--speeds", "1,1", "--", *own]
    job = [*start, "train", "job.yaml", "--cluster", "cluster.yaml", "--run-dir", str(run)]
    return [*job, *(["--plan", plan] if plan.endswith(".json") else ["--set", f"parallelism.strategy={plan}"])]


def environment(place: Path, more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "WAY_OUT": str(place), "PYTHONPATH": f"{ROOT / 'src'}:{place.parent}", **more}


def wait_for(look: Callable[[], Sequence[Path]], many: int, process: subprocess.Popen[bytes]) -> Sequence[Path]:
    until = time.monotonic() + PATIENCE_S
    while len(found := look()) < many and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.1)  # a mark that was just made may be empty
    return found


def alive(place: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("WAY_OUT") == str(place) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
