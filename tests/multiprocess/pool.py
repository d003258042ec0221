"""Worker processes that stay up for a whole test session, so that a collective test costs a fraction of a second.

    def job(world: World, number: int) -> int: ...        # top level of any test module

    results = pool.run(3, job, 7)                          # [job(rank 0), job(rank 1), job(rank 2)]
    results = pool.run(2, job, 7, devices=("vendor_a", "cpu"))  # rank 0 has the accelerator of `device.accelerator` under that name

Workers are forked, with one thread each, from a template: a process that has imported torch and has made what jobs share
(see `Shared`), so a new worker costs milliseconds. Every call gets a process group of its own (the default group of
torch.distributed, gloo over 127.0.0.1), so calls cannot disturb each other. An exception comes back with its traceback; a
worker that died or that is stuck makes the call fail in bounded time, and the next call starts on fresh workers.
"""

from __future__ import annotations

import copyreg
import functools
import gc
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, reduction
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from device.accelerator import Accelerator

__all__ = ["CPU", "Pool", "RemoteError", "Shared", "World", "accelerator"]

# Imported once by the server, for all templates.
PRELOADED = (
    "torch.distributed",
    "torch.optim",
    "torch.export._trace",
    "heterodyne.api.train",
    "heterodyne.cli.app",
    "heterodyne.search.planner",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.resnet.modeling_resnet",
)
CPU = "cpu"
GRACE_S = 3.0  # what the others get to end by themselves once one worker has failed
MAKING_S = 120.0  # what the template gets to make one thing


class RemoteError(AssertionError):
    """A job failed on some rank; the message holds the traceback of that rank."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What a job knows of its place. The default process group is up if there is more than one rank."""

    rank: int
    world_size: int
    devices: tuple[str, ...] = ()  # of all ranks, as `Pool.run` was asked; none: CPUs

    @property
    def device(self) -> str:
        return self.devices[self.rank] if self.devices else CPU


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What is slow to make and read by many jobs: made once, in the template, before workers are forked from it."""

    names: Callable[[Sequence[Any]], set[Any]]  # what a call with these arguments reads; hashable, pickled
    make: Callable[[Any], object]  # at the top level of a module; it keeps what it returns
    reducers: Mapping[type, Callable[[Any], Any]] = field(default_factory=dict)  # how arguments name what was made


@dataclass(frozen=True)
class _Function:
    """A function at the top level of a module, by file and name."""

    module: str
    file: str
    name: str
    path: list[str]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> _Function:
        # What is wrapped, as by functools.cache, has the code.
        code = getattr(function, "__wrapped__", function).__code__
        return cls(function.__module__, code.co_filename, function.__qualname__, list(sys.path))


@dataclass(frozen=True)
class _Call:
    """A job on its way; the arguments are unpickled once its module is there."""

    function: _Function
    arguments: bytes
    world: World
    store: str
    timeout_s: float


class _Template:
    """The process that workers are forked from, as the session sees it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        # Threads that a library starts on import would not survive the fork.
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}):
            forkserver.ensure_running()
        self._pipe, remote = context.Pipe()
        self._process = context.Process(target=_template, args=(remote,), daemon=True)
        self._process.start()
        remote.close()

    def load(self, function: _Function) -> None:
        """Import its module, and with it what that imports."""
        self._ask(("load", function))

    def make(self, function: _Function, name: object) -> None:
        self._ask(("make", function, pickle.dumps((name,))))

    def call(self, function: _Function, arguments: tuple[Any, ...]) -> Any:
        return self._ask(("call", function, pickle.dumps(arguments)))

    def fork(self) -> tuple[int, connection.Connection]:
        """The process id of a new worker, and the pipe to it."""
        pipe, remote = multiprocessing.Pipe()
        self._pipe.send(("fork",))
        reduction.send_handle(self._pipe, remote.fileno(), self._process.pid)
        remote.close()
        return int(self._answer()), pipe

    def status(self, pid: int) -> int:
        """The exit status of a worker that ends; minus the signal that ended it."""
        return int(self._ask(("wait", pid)))

    def close(self) -> None:
        self._pipe.close()
        self._process.join()
        self._process.close()

    def _ask(self, request: tuple[Any, ...]) -> Any:
        self._pipe.send(request)
        return self._answer()

    def _answer(self) -> Any:
        if not self._pipe.poll(MAKING_S):
            raise RemoteError(f"the template does not answer within {MAKING_S} s")
        good, value = self._pipe.recv()
        if not good:
            raise RemoteError(value)
        return value


@dataclass(frozen=True)
class _Worker:
    pid: int
    pipe: connection.Connection

    def stop(self, template: _Template) -> None:
        self.pipe.close()
        os.kill(
            self.pid, signal.SIGKILL
        )  # its template has not asked for its status yet, so the number is still its own
        template.status(self.pid)


class Pool:
    """Workers are started when they are first needed; `close` ends them all."""

    def __init__(self, shared: Shared | None = None) -> None:
        self._shared = shared
        self._made: set[Any] = set()
        self._loaded: set[str] = set()  # files of jobs
        self._template: _Template | None = None
        self._workers: dict[str, list[_Worker]] = {}  # a process keeps the accelerator that it has loaded

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *arguments: Any,
        timeout_s: float = 60.0,
        devices: Sequence[str] | None = None,
    ) -> list[Any]:
        """Call ``function(world, *arguments)`` on every rank; the results in order of rank. Raises RemoteError.

        ``function`` stands at the top level of its module; arguments and results are pickled. After ``timeout_s`` seconds the
        workers are killed and the call fails. ``devices``: of each rank, ``cpu`` or a name for the accelerator of the tests.
        """
        template = self._template = self._template or _Template()
        job = _Function.of(function)
        self._make(template, job, arguments)
        devices = tuple(devices or (CPU,) * world_size)
        workers = self._workers_with(template, devices)
        packed = self._packed(arguments)
        with tempfile.TemporaryDirectory(prefix="pool-") as folder:
            for rank, worker in enumerate(workers):
                worker.pipe.send(
                    _Call(
                        function=job,
                        arguments=packed,
                        world=World(rank=rank, world_size=world_size, devices=devices),
                        store=str(Path(folder) / "store"),
                        timeout_s=timeout_s,
                    )
                )
            return self._collect(template, workers, timeout_s)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns in the process that workers are forked from; what it keeps, they have. Raises RemoteError."""
        template = self._template = self._template or _Template()
        return template.call(_Function.of(function), arguments)

    def close(self) -> None:
        """End every process. The pool can be used again."""
        self._stop_workers()
        if self._template is not None:
            self._template.close()
        self._template = None
        self._made.clear()
        self._loaded.clear()

    def _make(self, template: _Template, job: _Function, arguments: Sequence[Any]) -> None:
        """Workers that were forked before it was made would make it again, each for itself: new ones are cheap."""
        missing = self._shared.names(arguments) - self._made if self._shared else set()
        if missing or job.file not in self._loaded:
            self._stop_workers()
        if job.file not in self._loaded:
            template.load(job)
            self._loaded.add(job.file)
        for name in missing if self._shared else ():
            template.make(_Function.of(self._shared.make), name)
            self._made.add(name)

    def _packed(self, arguments: Sequence[Any]) -> bytes:
        stream = io.BytesIO()
        packer = pickle.Pickler(stream)
        if self._shared is not None:
            packer.dispatch_table = copyreg.dispatch_table | self._shared.reducers
        packer.dump(tuple(arguments))
        return stream.getvalue()

    def _workers_with(self, template: _Template, devices: Sequence[str]) -> list[_Worker]:
        """A worker for each rank."""
        for device in set(devices):
            having = self._workers.setdefault(device, [])
            while len(having) < devices.count(device):
                having.append(_Worker(*template.fork()))
        return [self._workers[device][devices[:rank].count(device)] for rank, device in enumerate(devices)]

    def _stop_workers(self) -> None:
        for worker in (worker for having in self._workers.values() for worker in having):
            assert self._template is not None
            worker.stop(self._template)
        self._workers.clear()

    def _collect(self, template: _Template, workers: list[_Worker], timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[index]  # a list of Connection gives Connection
                try:
                    good, value = workers[rank].pipe.recv()
                except (EOFError, ConnectionResetError):
                    worker = workers[rank]
                    good, value = False, f"the worker died with exit status {template.status(worker.pid)}"
                    worker.pipe.close()
                    for having in self._workers.values():
                        having[:] = [each for each in having if each is not worker]
                if good:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting and not failures:
            failures = dict.fromkeys(waiting.values(), f"no answer within {timeout_s} s")
        if failures:
            self._stop_workers()
            raise RemoteError("\n".join(f"rank {rank}: {failures[rank]}" for rank in failures))
        return [results[rank] for rank in range(len(workers))]


def _template(pipe: connection.Connection) -> None:
    """What the template does: one request after the other, until the other end of the pipe is closed."""
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            kind, *what = pipe.recv()
        except EOFError:
            return
        try:
            match kind:
                case "load":
                    _loaded(what[0])
                    answer: Any = None
                case "make" | "call":
                    found = _loaded(what[0])(*pickle.loads(what[1]))
                    answer = found if kind == "call" else None
                case "fork":
                    answer = _fork(connection.Connection(reduction.recv_handle(pipe)), pipe)
                case "wait":
                    answer = os.waitstatus_to_exitcode(os.waitpid(what[0], 0)[1])
        except BaseException:  # noqa: BLE001  # whatever it is, the test shall see it
            pipe.send((False, traceback.format_exc()))
        else:
            pipe.send((True, answer))


def _fork(to_worker: connection.Connection, to_template: connection.Connection) -> int:
    pid = os.fork()
    if pid:
        to_worker.close()
        return pid
    try:
        to_template.close()
        _serve(to_worker)
    finally:
        os._exit(0)


def _serve(pipe: connection.Connection) -> None:
    """What a worker does: one call after the other, until the other end of the pipe is closed."""
    import torch

    # The threads of the template are not here: some builds of torch abort where two threads find that out at once.
    torch.set_num_threads(1)
    gc.freeze()  # training begins with a full collection, which would visit all that torch and the template have made
    while True:
        try:
            call: _Call = pipe.recv()
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _perform(call)))
        except BaseException:  # noqa: BLE001  # whatever it is, the test shall see it
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _perform(call: _Call) -> Any:
    import torch.distributed as dist

    if call.world.device != CPU:
        accelerator(call.world.device)
    function = _loaded(call.function)
    arguments = pickle.loads(call.arguments)
    several = call.world.world_size > 1
    if several:
        from datetime import timedelta

        dist.init_process_group(
            "gloo",
            store=dist.FileStore(call.store, call.world.world_size),
            rank=call.world.rank,
            world_size=call.world.world_size,
            timeout=timedelta(seconds=call.timeout_s),
        )
        dist.barrier()  # a job without a collective could leave while another rank still connects
    try:
        with warnings.catch_warnings(), mock.patch.dict(os.environ):
            warnings.simplefilter("error")
            return function(call.world, *arguments)
    finally:
        if several:
            dist.destroy_process_group()


@functools.cache
def accelerator(name: str) -> Accelerator:
    """That of this worker process, loaded at its first call, with its collective backend."""
    from device.accelerator import load
    from device.strict import register

    loaded = load(name)
    register(loaded)
    return loaded


def _loaded(function: _Function) -> Callable[..., Any]:
    """Import the test module by its file: under pytest's importlib mode its name alone does not lead to it."""
    sys.path[:] = function.path
    module = sys.modules.get(function.module)
    if module is None or getattr(module, "__file__", None) != function.file:
        spec = importlib.util.spec_from_file_location(function.module, function.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[function.module] = module
        spec.loader.exec_module(module)
    value: Any = module
    for part in function.name.split("."):
        value = getattr(value, part)
    return value
