"""What can happen to a worker in the middle of its work. Each is a job for a `Crowd`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist

from heterodyne.errors import DataError
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.liveness import members
from heterodyne.runtime.liveness.failure_detector import WatchLimits
from heterodyne.runtime.rendezvous.distributed import init_distributed
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment

QUICK = WatchLimits(
    interval_s=0.1, silence_s=2.0, phase_silence_s=2.0, stuck_s=2.0, phase_s=60.0, publish_s=0.5, handle_s=2.0
)
ACTIONS = 6
FOREVER_S = 3600.0
HELD_S = 3 * QUICK.silence_s


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def work(
    environment: WorkerEnvironment,
    misfortune: str = "none",
    whose: int = -1,
    limits: WatchLimits = QUICK,
    apart: bool = False,
) -> None:
    """A few steps of a forward and a reduction, in the middle of which something happens to rank `whose`.

    ``apart``: no worker sees the processes of the others, as on machines of their own.
    """
    if apart:
        members._machine = lambda: f"machine {environment.rank}"
    with init_distributed(environment, backend="gloo", timeout_s=30.0, limits=limits) as session:
        for index in range(ACTIONS):
            session.watchdog.progress(f"0F{index}")
            time.sleep(0.02)
            if index == ACTIONS // 2 and environment.rank == whose:
                suffer(misfortune)
            session.watchdog.waiting(f"0REDUCE_GRAD{index}")
            total = torch.ones(8)
            dist.all_reduce(total)
            assert total[0] == environment.world_size
    say("done")


def work_in_channels(environment: WorkerEnvironment, whose: int) -> None:
    """The same by the runtime's own channels, whose errors name nobody; a fault of two lines happens to rank `whose`."""
    device = torch.device("cpu")
    with (
        init_distributed(environment, backend="gloo", timeout_s=30.0, limits=QUICK) as session,
        Communicator(rank=environment.rank, world_size=environment.world_size, device=device) as communicator,
    ):
        for index in range(ACTIONS):
            session.watchdog.progress(f"0F{index}")
            if index == ACTIONS // 2 and environment.rank == whose:
                raise DataError("sample 17 cannot be read\n  own.py:3: raise")
            communicator.control.all_reduce(torch.ones(8)).wait()


def suffer(misfortune: str) -> None:
    match misfortune:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "holds the GIL":
            ctypes.PyDLL(None).usleep(int(HELD_S * 1e6))
        case "hangs":
            time.sleep(FOREVER_S)
        case "fails":
            raise DataError("the file ends here")
        case "interrupted":
            raise KeyboardInterrupt
        case "leaves":
            raise SystemExit(0)
        case other:
            raise AssertionError(other)


def stay(environment: WorkerEnvironment, seconds: float) -> None:
    """Meet, do nothing for a while, announced as a phase, and leave together."""
    with init_distributed(environment, backend="gloo", timeout_s=30.0, limits=QUICK) as session:
        with session.watchdog.phase("setting up"):
            say("here")
            time.sleep(seconds)
        dist.barrier()
    say("done")


def loop(environment: WorkerEnvironment, announced: bool, limits: WatchLimits) -> None:
    """Two calls of a loop, between which rank 0 uploads something for longer than its limit, after a shorter work of the same kind."""
    with init_distributed(environment, backend="gloo", timeout_s=30.0, limits=limits) as session:
        watchdog, first = session.watchdog, environment.rank == 0
        for index in range(2):
            with watchdog.calling("step()"):
                watchdog.progress(f"0F{index}")
                time.sleep(0.001)
                watchdog.waiting(f"0REDUCE_GRAD{index}")
                dist.all_reduce(torch.ones(8))
                watchdog.progress("between steps")
                time.sleep(0.001)
            if index == 0 and first:
                with watchdog.phase("uploading", limit_s=60.0) if announced else nullcontext():
                    with watchdog.phase("packing") if announced else nullcontext():
                        pass
                    # Unannounced, it sleeps until it is given up: how soon depends on how long its first actions took on a busy machine.
                    time.sleep(3 * limits.stuck_s if announced else 60.0)
    say("done")


def spin(environment: WorkerEnvironment, limits: WatchLimits) -> None:
    """Actions that cost CPU time, so that a throttled worker takes much longer than the others."""
    with init_distributed(environment, backend="gloo", timeout_s=30.0, limits=limits) as session:
        for index in range(4):
            session.watchdog.progress(f"0F{index}")
            until = time.process_time() + 0.05
            while time.process_time() < until:
                pass
            session.watchdog.waiting(f"0REDUCE_GRAD{index}")
            dist.all_reduce(torch.ones(8))
    say("done")


def meet_briefly(environment: WorkerEnvironment, timeout_s: float) -> None:
    with init_distributed(environment, backend="gloo", timeout_s=timeout_s, limits=QUICK):
        pass
