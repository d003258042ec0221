"""Workers that may be killed, stopped and doubled: each forked from a server that has imported torch, output in a file.

    with Crowd(tmp_path) as crowd:
        workers = [crowd.start(job, rank=0, world_size=2), crowd.start(job, rank=1, world_size=2)]
        assert [worker.wait() for worker in workers] == [0, 0]

Unlike those of the pool, the workers meet by themselves, as under a launcher, and end. Whoever is left is killed. A command or a script
that a launcher would start in new processes runs in forked ones with `launched`, without the seconds that each would take to import torch.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Self
from unittest import mock

from heterodyne.processes import worker_exit_status
from heterodyne.processes.port import reserve_port
from heterodyne.runtime.rendezvous.environment import SECRET_VARIABLE, WorkerEnvironment
from multiprocess.pool import PRELOADED

SECRET = "what the workers of a crowd know"
PATIENCE_S = 300.0  # a test that hangs, not one that is slow

Job = Callable[..., None]


class Worker:
    def __init__(self, process: Any, output: Path) -> None:
        self._process = process
        self._output = output

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8")

    def wait(self) -> int:
        """The exit status, or minus the signal."""
        self._process.join(PATIENCE_S)
        assert self._process.exitcode is not None, f"process {self.pid} does not end; so far it said:\n{self.output}"
        return int(self._process.exitcode)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()


class Crowd:
    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._stack = ExitStack()
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        self._port = self._stack.enter_context(reserve_port())
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="crowd-")))
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}):
            forkserver.ensure_running()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()
        self._stack.close()

    def start(self, job: Job, *arguments: Any, rank: int, world_size: int) -> Worker:
        """Call ``job(environment, *arguments)`` in a process of its own; it ends as a worker of ours would."""
        output = self._folder / f"{len(self._workers)}.txt"
        output.touch()
        environment = WorkerEnvironment(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_address="127.0.0.1",
            master_port=self._port,
            secret=SECRET,
        )
        process = self._context.Process(target=_live, args=(job, environment, arguments, str(output)))
        process.start()
        worker = Worker(process, output)
        self._workers.append(worker)
        return worker


def launched(
    world_size: int, arguments: Sequence[str], *, folder: Path, variables: Mapping[str, str]
) -> tuple[list[int], str]:
    """Run ``python ARGUMENTS`` (a script, or ``-m heterodyne``) in a folder on every rank; the exit statuses, and what rank 0 said."""
    with Crowd() as crowd:
        workers = [
            crowd.start(run_launched, list(arguments), str(folder), dict(variables), rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        return [worker.wait() for worker in workers], workers[0].output


def run_launched(environment: WorkerEnvironment, arguments: list[str], folder: str, variables: dict[str, str]) -> None:
    """Be what `launched` starts on one rank."""
    os.chdir(folder)
    os.environ.update(variables)
    os.environ.update(
        {
            "RANK": str(environment.rank),
            "WORLD_SIZE": str(environment.world_size),
            "LOCAL_RANK": str(environment.local_rank),
            "LOCAL_WORLD_SIZE": str(environment.local_world_size),
            "MASTER_ADDR": environment.master_address,
            "MASTER_PORT": str(environment.master_port),
            SECRET_VARIABLE: environment.secret,
        }
    )
    module = arguments[0] == "-m"
    sys.argv = arguments[module:]
    if module:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _live(job: Job, environment: WorkerEnvironment, arguments: tuple[Any, ...], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server ignores it
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gc.freeze()  # as in the pool
    import torch

    torch.set_num_threads(1)
    try:
        job(environment, *arguments)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  # whatever it is becomes the exit status
        traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(worker_exit_status(error, environment.rank))
