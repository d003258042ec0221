"""Gradients and autocast, turned on and off between the ops of a graph as the model did around them; and ops that hear of."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

import torch
from torch import fx

from heterodyne.frontend.flat_graph import Region

__all__ = ["Keeper", "Regions", "Switches", "compile_graph"]

_Autocast = tuple[str, torch.dtype, bool, bool | None]


class Keeper(Protocol):
    """Keeps what the ops make that run between `begin` and `end`."""

    def begin(self) -> None: ...
    def end(self) -> None:
        """Also where nothing has begun."""


class Regions:
    """What is switched while a graph runs. As a context manager, it leaves everything as it was, also after an error.

    Outside of the model's own regions the state is that of the caller: a graph that runs under ``torch.no_grad`` stays under it.
    ``keeper``: hears of the ops whose outputs are kept; None: nobody is.
    """

    def __init__(self, keeper: Keeper | None = None) -> None:
        self._keeper = keeper
        self._autocast: torch.autocast | None = None
        self._grad: torch.set_grad_enabled | None = None

    def enter(self, grad: bool, autocast: _Autocast | None) -> None:
        """Leave the region before, and enter one."""
        self.leave()
        if autocast is not None:
            device, dtype, enabled, cache = autocast
            self._autocast = torch.autocast(device, dtype, enabled, cache)
            self._autocast.__enter__()  # type: ignore[no-untyped-call]
        if not grad:
            self._grad = torch.set_grad_enabled(False)

    def leave(self) -> None:
        """Leave the region, if in one."""
        if self._grad is not None:
            self._grad.__exit__(None, None, None)
            self._grad = None
        if self._autocast is not None:
            self._autocast.__exit__(None, None, None)
            self._autocast = None

    def begin_kept(self) -> None:
        if self._keeper is not None:
            self._keeper.begin()

    def end_kept(self) -> None:
        if self._keeper is not None:
            self._keeper.end()

    def __enter__(self) -> Regions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_kept()
        self.leave()


def compile_graph(run: fx.GraphModule) -> None:
    """Let torch.compile make the graph's code, at its first call. What switches stays outside: code that is compiled would lose it."""
    apart = {switch: torch.compiler.disable(switch) for switch in (Regions.enter, Regions.leave)}  # type: ignore[no-untyped-call]
    for node in run.graph.nodes:
        node.target = apart.get(node.target, node.target) if node.op == "call_function" else node.target
    run.recompile()
    run.compile()


class Switches:
    """Writes the switches into a graph. ``regions`` is the node that holds a `Regions` while the graph runs."""

    def __init__(self, graph: fx.Graph, device: torch.device, regions: fx.Node) -> None:
        self._graph = graph
        self._device = device
        self._regions = regions
        self._now = Region()

    def to(self, region: Region) -> None:
        """Let the ops that follow be in that region."""
        if region == self._now:
            return
        if region == Region():
            self._graph.call_function(Regions.leave, (self._regions,))
        else:
            autocast: Any = None if region.autocast is None else (self._device.type, *region.autocast[1:])
            self._graph.call_function(Regions.enter, (self._regions, region.grad, autocast))
        self._now = region

    def around_kept(self, op: fx.Node) -> None:
        """Let an op that was just written keep what it makes."""
        with self._graph.inserting_before(op):
            self._graph.call_function(Regions.begin_kept, (self._regions,))
        self._graph.call_function(Regions.end_kept, (self._regions,))
