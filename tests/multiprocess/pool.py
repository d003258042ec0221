"""Worker processes that stay up for a whole test session, so that a collective test costs a fraction of a second.

    def job(world: World, number: int) -> int: ...        # top level of any test module

    results = pool.run(3, job, 7)                          # [job(rank 0), job(rank 1), job(rank 2)]

Workers are forked from a server that has imported torch once, with one thread each. Every call gets a process group of
its own (the default group of torch.distributed, gloo over 127.0.0.1), so calls cannot disturb each other. An exception
comes back with its traceback; a worker that died or that is stuck makes the call fail in bounded time, and the next call
starts on fresh workers.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["Pool", "RemoteError", "World"]

# Imported once by the server instead of once by each worker.
PRELOADED = (
    "torch.distributed",
    "torch.optim",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.resnet.modeling_resnet",
)
GRACE_S = 3.0  # what the others get to end by themselves once one worker has failed


class RemoteError(AssertionError):
    """A job failed on some rank; the message holds the traceback of that rank."""


@dataclass(frozen=True, kw_only=True)
class World:
    """What a job knows of its place. The default process group is up if there is more than one rank."""

    rank: int
    world_size: int


@dataclass(frozen=True)
class _Call:
    """A job on its way: the function by file and name, and pickled arguments (unpickled once its module is there)."""

    module: str
    file: str
    function: str
    arguments: bytes
    world: World
    store: str
    timeout_s: float
    path: list[str]


class _Worker:
    def __init__(self, context: multiprocessing.context.ForkServerContext) -> None:
        self.pipe, remote = context.Pipe()
        self.process = context.Process(target=_serve, args=(remote,), daemon=True)
        self.process.start()
        remote.close()

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()
        self.process.close()


class Pool:
    """Workers are started when they are first needed; `close` ends them all."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._workers: list[_Worker] = []

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call ``function(world, *arguments)`` on every rank; the results in order of rank. Raises RemoteError.

        ``function`` stands at the top level of its module; arguments and results are pickled. After ``timeout_s`` seconds the
        workers are killed and the call fails.
        """
        self._start(world_size)
        workers = self._workers[:world_size]
        packed = pickle.dumps(arguments)
        with tempfile.TemporaryDirectory(prefix="pool-") as folder:
            for rank, worker in enumerate(workers):
                worker.pipe.send(
                    _Call(
                        module=function.__module__,
                        file=function.__code__.co_filename,
                        function=function.__qualname__,
                        arguments=packed,
                        world=World(rank=rank, world_size=world_size),
                        store=str(Path(folder) / "store"),
                        timeout_s=timeout_s,
                        path=list(sys.path),
                    )
                )
            return self._collect(workers, timeout_s)

    def close(self) -> None:
        """End every worker. The pool can be used again."""
        for worker in self._workers:
            worker.stop()
        self._workers.clear()

    def _start(self, count: int) -> None:
        if not self._workers:
            self._context.set_forkserver_preload(list(PRELOADED))
            # Threads that a library starts on import would not survive the fork.
            with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}):
                forkserver.ensure_running()
        while len(self._workers) < count:
            self._workers.append(_Worker(self._context))

    def _collect(self, workers: list[_Worker], timeout_s: float) -> list[Any]:
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
                except EOFError:
                    workers[rank].process.join()
                    good, value = False, f"the worker died with exit status {workers[rank].process.exitcode}"
                if good:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting and not failures:
            failures = dict.fromkeys(waiting.values(), f"no answer within {timeout_s} s")
        if failures:
            self.close()
            raise RemoteError("\n".join(f"rank {rank}: {failures[rank]}" for rank in failures))
        return [results[rank] for rank in range(len(workers))]


def _serve(pipe: connection.Connection) -> None:
    """What a worker does: one call after the other, until the other end of the pipe is closed."""
    import torch

    torch.set_num_threads(1)
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

    sys.path[:] = call.path
    function = _function(call)
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
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return function(call.world, *arguments)
    finally:
        if several:
            dist.destroy_process_group()


def _function(call: _Call) -> Callable[..., Any]:
    """Import the test module by its file: under pytest's importlib mode its name alone does not lead to it."""
    module = sys.modules.get(call.module)
    if module is None or getattr(module, "__file__", None) != call.file:
        spec = importlib.util.spec_from_file_location(call.module, call.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[call.module] = module
        spec.loader.exec_module(module)
    value: Any = module
    for part in call.function.split("."):
        value = getattr(value, part)
    return value
