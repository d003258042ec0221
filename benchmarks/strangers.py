"""Strangers at the ports of a run, from its machine and from another one: training goes on, its losses are right, nobody reaches its store.

Two workers in namespaces of their own train a small model under this library's launcher and under two agents of torchrun. Ten kinds of
traffic come from a third namespace, to the ports where workers meet; then torch's own client tries every port that rank 0 listens at, from
that namespace and from rank 0's. Needs root and iproute2. Calls of the store are timed too.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

from results import ROOT, Results, arguments, spread
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs do not declare it

from heterodyne.emulate.network import WorkerNetwork, why_not, worker_networks
from heterodyne.processes.launch import WorkerSpec, launch_workers
from heterodyne.runtime.rendezvous.gateway import Gateway, Tunnel
from heterodyne.runtime.rendezvous.store import kept_store
from heterodyne.runtime.rendezvous.store_port import LOOPBACK

LINK = 1e9  # bytes per second
PORT = "29400"
TRAFFIC = ROOT / "benchmarks" / "strangers_traffic.py"
WORKER = ROOT / "benchmarks" / "strangers_worker.py"
KINDS = (
    "flood", "half-open", "garbage", "HTTP", "huge length", "TLS", "port scan", "slow bytes", "torch client", "replay",
)  # fmt: skip
FROM = {"store from another machine": 2, "store from its machine": 0}  # in whose namespace a store is looked for
CALLS = 2000


def main() -> int:
    options = arguments(__doc__, names=("--launchers", ("heterodyne", "torchrun")))
    if (reason := why_not(user=os.geteuid())) is not None:
        sys.exit(f"error: {reason}")
    results = Results("strangers")
    seconds = 1.5 if options.quick else 8.0
    wrong, stopped, reached = 0.0, 0, 0.0
    for launcher in options.launchers:
        with tempfile.TemporaryDirectory() as folder, worker_networks([LINK] * 3) as networks:
            run = Run(Path(folder), launcher, networks)
            told = run.under_traffic(seconds)
            stopped += run.status != 0
            reached += sum(row.get("stores", 0) for row in told.values())
            for kind, row in told.items():
                results.row(f"{launcher}: {kind}", **row)
            error = run.error()
            results.row(f"{launcher}: losses", status=run.status, steps=run.steps, largest_relative_error=error)
            wrong = max(wrong, error)
    store_calls(results)
    results.bar("runs that traffic ended", stopped, "<= 0")
    results.bar("stores that a stranger reached", reached, "<= 0")
    results.bar("largest relative error of a loss", wrong, "<= 1e-05")
    return results.write(options.json)


class Run:
    """One training run of two workers, and the stranger beside it."""

    def __init__(self, folder: Path, launcher: str, networks: tuple[WorkerNetwork, ...]) -> None:
        self._folder, self._launcher, self._networks = folder, launcher, networks
        self.status = -1
        self.steps = 0

    def under_traffic(self, seconds: float) -> dict[str, dict[str, float]]:
        """What each kind of traffic does to the steps, in order."""
        thread = threading.Thread(target=self._train)
        thread.start()
        try:
            self._wait_for_steps(20, thread)
            told = {}
            quiet = self._phase(None, seconds)
            for kind in (*KINDS, *FROM):
                found = self._phase(kind, seconds)
                told[kind] = found | {"step time over quiet": found["median step_s"] / quiet["median step_s"]}
                print(f"{self._launcher}: {kind}: {told[kind]}", flush=True)
        finally:
            (self._folder / "done").touch()
            thread.join(120)
        return told

    def error(self) -> float:
        losses = [json.loads(line) for line in (self._folder / "losses.jsonl").read_text().splitlines()]
        self.steps = len(losses)
        return max(abs(one - other) / abs(other) for one, other in losses)

    def _train(self) -> None:
        command = (sys.executable, str(WORKER), str(self._folder))
        workers = self._networks[:2]
        if self._launcher == "heterodyne":
            specs = [WorkerSpec(command=one.enter(command), environment=one.environment) for one in workers]
            self.status = launch_workers(specs, logs=self._folder / "logs")
            return
        shared = os.environ | {"HETERODYNE_RUN_SECRET": os.urandom(32).hex(), "OMP_NUM_THREADS": "1"}
        agents = [
            subprocess.Popen(
                one.enter(
                    (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1",
                     f"--master-addr={workers[0].address}", f"--master-port={PORT}", *command[1:])
                ),
                env=shared | {name: value for name, value in one.environment.items() if name != "MASTER_ADDR"},
            )
            for rank, one in enumerate(workers)
        ]  # fmt: skip
        self.status = max(abs(agent.wait()) for agent in agents)

    def _phase(self, kind: str | None, seconds: float) -> dict[str, float]:
        before = self._step_times()
        sent, found = 0, list[int]()
        if kind is None:
            time.sleep(seconds)
        else:
            stranger, target = self._networks[FROM.get(kind, 2)], self._networks[0]
            ports = places(target) if kind in FROM else meeting_ports(target, stranger)
            done = subprocess.run(
                stranger.enter((sys.executable, str(TRAFFIC), kind, str(seconds), target.address, *map(str, ports))),
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(done.stderr)
            sent, *found = map(int, done.stdout.split())
        times = self._step_times()[len(before) :]
        if len(times) < 2:
            raise RuntimeError(f"no steps during {kind}")
        steps = [later - earlier for earlier, later in pairwise(times)]
        return {
            "sent": sent,
            "steps": len(steps),
            "median step_s": statistics.median(steps),
            "longest step_s": max(steps),
        } | ({"stores": float(found[0])} if found else {})

    def _step_times(self) -> list[float]:
        path = self._folder / "times"
        return [float(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _wait_for_steps(self, count: int, thread: threading.Thread) -> None:
        until = time.monotonic() + 120
        while len(self._step_times()) < count:
            if not thread.is_alive() or time.monotonic() > until:
                raise RuntimeError("the run did not start")
            time.sleep(0.1)


def places(network: WorkerNetwork) -> list[str]:
    """Where rank 0 listens, but for torchrun's own store, which lets anybody in."""
    told = subprocess.run(
        network.enter((shutil.which("ss") or "ss", "-Hltn")), capture_output=True, text=True, check=True
    )
    all_of_them = [line.split()[3].replace("*", network.address) for line in told.stdout.splitlines()]
    return [place for place in all_of_them if not place.endswith(f":{PORT}")]


def meeting_ports(network: WorkerNetwork, stranger: WorkerNetwork) -> list[int]:
    """The ports in that namespace where workers meet: that of torchrun's store, and that of the gateway, which greets."""
    told = subprocess.run(
        network.enter((shutil.which("ss") or "ss", "-Hltn")), capture_output=True, text=True, check=True
    )
    places = [line.split()[3] for line in told.stdout.splitlines()]
    ports = {place.rpartition(":")[2] for place in places if not place.startswith(("127.", "[::1]"))}
    greeting = subprocess.run(
        stranger.enter((sys.executable, str(TRAFFIC), "greeting", "0", network.address, *ports)),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sorted({int(port) for port in greeting.stdout.split()} | {int(port) for port in ports if port == PORT})


def store_calls(results: Results) -> None:
    """How long a call of the store takes, directly and through a gateway and a tunnel."""
    bound = socket.socket()
    bound.bind((LOOPBACK, 0))
    secret = os.urandom(32)
    with (
        kept_store(timedelta(seconds=30)) as (store, port),
        closing(Gateway(bound, secret=secret, store=port, say=print)) as gateway,
        closing(Tunnel(LOOPBACK, gateway.port, secret=secret, rank=1)) as tunnel,
    ):
        through = TCPStore(LOOPBACK, tunnel.port, is_master=False, wait_for_workers=False)
        for name, client in (("of rank 0", store), ("through the gateway", through)):
            times = []
            for _ in range(CALLS):
                start = time.perf_counter()
                client.add("key", 1)
                times.append(time.perf_counter() - start)
            results.row(f"a call of the store, {name}", seconds=spread(times))


if __name__ == "__main__":
    sys.exit(main())
