"""Two sites with 20 Mbit/s and 80 ms between: outer steps now and then against synchronous data parallelism over that link.

Each site is a network namespace with one worker; what they send each other goes through a relay of this script, which lets 20 Mbit/s
through in each direction and delivers 40 ms later. Both train a GPT on the same global batches, in five ways: a pipeline over the link,
gradients averaged in each step, weights averaged after each step in 16 and in 8 bits, and outer steps now and then (pseudo-gradients of
8 bits). That which `heterodyne plan --sites` puts first should be the fastest. The validation loss is compared with that of one device
after as many samples, which is what synchronous training gives. Besides: an outer step after each step against one device, and a site
that is killed and comes back. It needs root, for namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import ROOT, Results, arguments

from heterodyne.emulate.names import name_of
from heterodyne.processes.port import reserve_port

BITS_PER_S, ONE_WAY_S = 20e6, 0.040
ADDRESSES = ("10.253.0.1", "10.253.0.2")
SITES = ("north", "south")
SHARES = (5, 3)
PATIENCE_S = 540.0
DAY_S = 86_400

JOB = """
model: {{factory: "{gpt}:build", arguments: {{length: 64, width: {width}, layers: {layers}, heads: 4}}}}
data: {{text: stdlib, sequence_length: 64}}
training:
  steps: {steps}
  global_batch_size: 8
  validation_samples: 64
  sync: {{sites: outer, shares: {{north: 5, south: 3}}, at: "127.0.0.1:29600", every: {every}, bits: 8, lr: 1.0, momentum: 0.0}}
optimizer: {{lr: 3.0e-3, warmup_steps: 10, schedule: constant}}
parallelism: {{micro_batch_sizes: [1], measure_s: 1, rehearsal_s: 0, check_s: 0}}
metrics: {{tensorboard: false}}
"""

CLUSTER = """
name: two sites
links: [{between: regions, bandwidth: 20 Mb/s, latency: 40 ms}]
regions:
  - {name: north, nodes: [{kind: cpu, memory: 4 GB}]}
  - {name: south, nodes: [{kind: cpu, memory: 4 GB}]}
"""


@dataclass(frozen=True, kw_only=True)
class Size:
    """``steps`` of training, an outer step after each ``every``; over the link synchronously, only ``synchronous``."""

    width: int
    layers: int
    steps: int
    every: int
    synchronous: int


FULL = Size(width=64, layers=3, steps=300, every=15, synchronous=20)
QUICK = Size(width=64, layers=2, steps=60, every=15, synchronous=8)


def main() -> int:
    options = arguments(__doc__)
    results = Results("sites")
    size = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), size)
        over_the_link(results, runs, size)
        an_outer_step_after_each(results, runs)
        killed_and_back(results, runs)
    return results.write(options.json)


def over_the_link(results: Results, runs: Runs, size: Size) -> None:
    runs.wait([runs.start("one", "training.sync=null")])
    predicted = runs.predicted(size)
    few = f"training.steps={size.synchronous}"
    with two_namespaces() as spaces:
        for run, strategy in (("synchronous", "equal"), ("pipeline", "pipeline")):
            sets = ("training.sync=null", f"parallelism.strategy={strategy}", few)
            runs.wait(
                [
                    runs.start(f"{run}-{rank}", *sets, space=space, run=run, variables=as_rank(rank))
                    for rank, space in enumerate(spaces)
                ]
            )
        at = f"training.sync.at={ADDRESSES[0]}:29600"
        each = ("training.sync.every=1", few)
        for run, sets in (
            ("16", (*each, "training.sync.bits=16")),
            ("8", (*each, "training.sync.bits=8")),
            ("", ()),
        ):
            runs.wait(
                [
                    runs.start(f"{site}{run}", at, *sets, site=site, space=space)
                    for site, space in zip(SITES, spaces, strict=True)
                ]
            )
    runs_of = {
        "a pipeline over the link": "pipeline",
        "replicas, sums in 32 bits": "synchronous",
        "replicas, sums in 16 bits": "north16",
        "replicas, sums in 8 bits": "north8",
        f"apart, meeting every {size.every} steps": "north",
    }
    rate = {run: samples_per_s(runs.lines(run), sum(SHARES)) for run in runs_of.values()}
    for way, run in runs_of.items():
        seconds = predicted[way]["step_s"]
        results.row(way, samples_per_s=rate[run], predicted=sum(SHARES) / seconds if seconds else None)
    chosen = next(way for way in predicted if way in runs_of)
    results.bar(
        "samples/s of the way that is predicted to be the fastest, over those of the fastest",
        rate[runs_of[chosen]] / max(rate.values()),
        ">= 1",
    )
    outer = [line for line in runs.lines("south") if "outer_step" in line]
    sent, received = (sum(line[f"{way}_bytes"] for line in outer[1:]) / len(outer[1:]) for way in ("sent", "received"))
    seconds = (outer[-1]["time_s"] - outer[0]["time_s"]) / len(outer[1:])
    results.row(
        f"outer steps, one after {size.every} steps",
        bytes_of_an_outer_step=sent + received,
        gigabytes_a_day=(sent + received) / seconds * DAY_S / 1e9,
    )
    loss = {run: runs.validation(run) for run in ("one", "north", "south")}
    results.row(
        f"validation loss after {size.steps * sum(SHARES):,} samples", one_device=loss["one"], sites=loss["north"]
    )
    results.bar("samples/s over those of synchronous data parallelism", rate["north"] / rate["synchronous"], ">= 5")
    results.bar("validation loss over that of one device", loss["north"] / loss["one"], "<= 1.02")
    results.bar("difference of the sites' weights at the end", runs.unlike("north", "south"), "<= 0")


def an_outer_step_after_each(results: Results, runs: Runs) -> None:
    plain = (
        "optimizer.name=sgd",
        "optimizer.momentum=0",
        "optimizer.lr=0.1",
        "training.clip_grad_norm=0",
        "training.steps=6",
    )
    with reserve_port() as port:
        at = f"training.sync.at=127.0.0.1:{port}"
    every = ("training.sync.every=1", "training.sync.bits=32")
    runs.wait([runs.start("whole", *plain, "training.sync=null")])
    runs.wait([runs.start(f"plain-{site}", *plain, *every, at, site=site) for site in SITES])
    results.bar(
        "an outer step after each step: difference from one device", runs.unlike("plain-north", "whole"), "<= 1e-6"
    )


def killed_and_back(results: Results, runs: Runs) -> None:
    with reserve_port() as port:
        more = (
            f"training.sync.at=127.0.0.1:{port}",
            "training.sync.every=5",
            "training.sync.grace_s=3",
            "training.steps=100000",
            "checkpoint.every=5",
        )
    north, south = (runs.start(f"away-{site}", *more, site=site) for site in SITES)
    runs.wait_for("away-south", lambda lines: len(lines) > 10, south)
    os.kill(south.pid, signal.SIGKILL)
    south.wait()
    alone = count(runs.outer("away-north"))
    runs.wait_for("away-north", lambda lines: count(outer_of(lines)) > alone + 2, north)
    back = runs.start("away-south", *more, "metrics.every=1", site="south", resume=True)
    runs.wait_for("away-north", lambda lines: together_again(outer_of(lines)), back)
    told = runs.outer("away-north")
    without = [line["outer_step"] for line in told if "south" not in line["sites"]]
    results.row(
        "a site killed and back",
        outer_steps_without_it=len(without),
        part_when_it_is_back=next(line["sites"] for line in told if line["outer_step"] > without[-1]),
    )
    for process in (north, back):
        process.send_signal(signal.SIGINT)
    for process in (north, back):
        process.wait(PATIENCE_S)
    results.bar("outer steps without a site that was killed", len(without), ">= 1")
    results.bar("outer steps with it again", sum(line["outer_step"] > without[-1] for line in told), ">= 3")


def outer_of(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "outer_step" in line]


def count(outer: Sequence[dict[str, Any]]) -> int:
    return len(outer)


def together_again(outer: Sequence[dict[str, Any]]) -> bool:
    with_south = ["south" in line["sites"] for line in outer]
    return False in with_south and all(with_south[-3:])


def samples_per_s(lines: Sequence[dict[str, Any]], samples: int) -> float:
    """Over all steps but the first, with the outer steps between them."""
    moments = [(line["step"], line["time_s"]) for line in lines if "loss" in line or "outer_step" in line]
    (first, start_s), (last, end_s) = moments[0], moments[-1]
    return samples * (last - first) / (end_s - start_s)


def as_rank(rank: int) -> dict[str, str]:
    """What a launcher says of one worker on each of two hosts."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "tun0",
    }


class Runs:
    """Runs of the job, each in a directory of its own."""

    def __init__(self, folder: Path, size: Size) -> None:
        self._folder = folder
        (folder / "job.yaml").write_text(
            JOB.format(
                gpt=ROOT / "examples" / "gpt.py",
                width=size.width,
                layers=size.layers,
                steps=size.steps,
                every=size.every,
            )
        )

    def start(
        self,
        name: str,
        *sets: str,
        site: str | None = None,
        space: str | None = None,
        run: str | None = None,
        resume: bool = False,
        variables: dict[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "heterodyne", "train", "job.yaml", "--run-dir", run or name]
        command += [word for value in sets for word in ("--set", value)]
        command += ["--site", site] if site else []
        command += ["--resume"] if resume else []
        if space is not None:
            command = ["ip", "netns", "exec", space, *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HETERODYNE_RUN_SECRET": "of this benchmark's sites"}
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=self._folder, env={**environment, **(variables or {})}, stdout=log, stderr=log
            )

    def predicted(self, size: Size) -> dict[str, dict[str, Any]]:
        """The ways over the link as `heterodyne plan --sites` has them for this machine's measurements, the fastest first."""
        (self._folder / "cluster.yaml").write_text(CLUSTER)
        words = [sys.executable, "-P", "-m", "heterodyne"]
        sets = ["--set", f"training.sync.every={size.every}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for command in (
            ["measure", "job.yaml", "--out", "profile.json", "--set", "training.sync=null"],
            ["plan", "job.yaml", "--cluster", "cluster.yaml", "--profile", "profile.json", "--sites", "--json", *sets],
        ):
            done = subprocess.run(
                [*words, *command],
                cwd=self._folder,
                env=environment,
                check=True,
                capture_output=True,
                timeout=PATIENCE_S,
            )
        return {way["name"]: way for way in json.loads(done.stdout)}

    def wait(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        try:
            for process in processes:
                if process.wait(PATIENCE_S):
                    logs = "\n".join(log.read_text()[-2000:] for log in sorted(self._folder.glob("*.log")))
                    raise SystemExit(f"{' '.join(map(str, process.args))} failed:\n{logs}")
        finally:
            for process in processes:
                process.kill()

    def wait_for(self, run: str, so: Any, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not so(self.lines(run)):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit((self._folder / f"{run}.log").read_text()[-3000:])
            time.sleep(0.1)

    def lines(self, run: str) -> list[dict[str, Any]]:
        path = self._folder / run / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def outer(self, run: str) -> list[dict[str, Any]]:
        return outer_of(self.lines(run))

    def validation(self, run: str) -> float:
        return float(next(line["validation_loss"] for line in self.lines(run) if "validation_loss" in line))

    def unlike(self, one: str, other: str) -> float:
        """The largest relative difference of a weight."""
        from safetensors.torch import load_file

        first, second = (load_file(self._folder / run / "model" / "model.safetensors") for run in (one, other))
        return max(float((first[n].double() - w.double()).norm() / w.double().norm()) for n, w in second.items())


@contextmanager
def two_namespaces() -> Iterator[tuple[str, ...]]:
    """Two network namespaces, and a process that carries packets between them."""
    spaces = tuple(name_of(number) for number in range(2))
    with ExitStack() as stack:
        for space in spaces:
            subprocess.run(["ip", "netns", "add", space], check=True)
            stack.callback(subprocess.run, ["ip", "netns", "delete", space], check=True)
        relay = subprocess.Popen([sys.executable, __file__, "--relay", *spaces], stdout=subprocess.PIPE)
        stack.callback(relay.wait)
        stack.callback(relay.kill)
        assert relay.stdout is not None
        relay.stdout.readline()  # both devices are there
        for space, here, there in zip(spaces, ADDRESSES, ADDRESSES[::-1], strict=True):
            for words in (
                ["link", "set", "lo", "up"],
                ["address", "add", here, "peer", there, "dev", "tun0"],
                ["link", "set", "tun0", "up"],
            ):
                subprocess.run(["ip", "-n", space, *words], check=True)
        yield spaces


_SET_DEVICE, _TUN, _NO_HEAD = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_QUEUE_S = 0.1


def relay(spaces: Sequence[str]) -> None:
    """Carry packets between a device in each namespace, so many bits a second, and each ``ONE_WAY_S`` later."""
    devices = []
    for space in spaces:
        with Path("/run/netns", space).open() as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH", b"tun0", _TUN | _NO_HEAD))
        devices.append(device)
    print("there", flush=True)
    free_s, on_their_way, number = [0.0, 0.0], [], 0
    while True:
        wait_s = max(0.0, on_their_way[0][0] - time.monotonic()) if on_their_way else None
        ready, _, _ = select.select(devices, [], [], wait_s)
        now = time.monotonic()
        for device in ready:
            way = devices.index(device)
            packet = os.read(device, 65_536)
            if free_s[way] - now > _QUEUE_S:
                continue  # the queue is full
            free_s[way] = max(now, free_s[way]) + 8 * len(packet) / BITS_PER_S
            number += 1
            heapq.heappush(on_their_way, (free_s[way] + ONE_WAY_S, number, devices[1 - way], packet))
        while on_their_way and on_their_way[0][0] <= now:
            _, _, device, packet = heapq.heappop(on_their_way)
            try:
                os.write(device, packet)
            except OSError:  # that end is not up yet
                continue


if __name__ == "__main__":
    if sys.argv[1:2] == ["--relay"]:
        relay(sys.argv[2:])
    sys.exit(main())
