"""One pool of worker processes for the whole session; what tests capture in it is captured once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from heterodyne.frontend import Captured
from heterodyne.graph.ir import ModelGraph
from multiprocess.models import capture_of, captured, captured_by, makers
from multiprocess.pool import Pool, Shared
from multiprocess.split.random_graphs import Program, captured_program


def _captured(arguments: Sequence[Any]) -> set[str | Program]:
    """Jobs on a graph of ours, or on a program that chance has written, cut stages out of its capture."""
    graphs = {argument.name for argument in arguments if isinstance(argument, ModelGraph)} & set(makers())
    return graphs | {argument for argument in arguments if isinstance(argument, Program)}


def capture(name: str | Program) -> Captured:
    found = captured_program(name) if isinstance(name, Program) else capture_of(name)
    _ = found.graph.fingerprint  # kept in the graph, and asked for by every plan
    return found


def graph_of(name: str) -> ModelGraph:
    return capture_of(name).graph


def named(graph: ModelGraph) -> Any:
    """A graph of ours, which workers have, by its name: they keep what they have found out about it."""
    ours = graph.name in makers() and graph is captured(graph.name)
    return (graph_of, (graph.name,)) if ours else graph.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


@contextmanager
def session_pool() -> Iterator[Pool]:
    """``pool.run(world_size, function, *args)``; see `multiprocess.pool`."""
    pool = Pool(Shared(names=_captured, make=capture, reducers={ModelGraph: named}))
    with captured_by(lambda name: pool.ask(graph_of, name)):
        yield pool
    pool.close()
