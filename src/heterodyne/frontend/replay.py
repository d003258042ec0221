"""What each op keeps, shares and differentiates, seen by running the graph on tensors without data.

PyTorch itself decides what an op saves for its backward, so it is asked rather than imitated: the graph runs on fake CPU
tensors, at a few batch sizes, and every tensor that autograd packs away is noted with the op that did it. A tensor
is a storage here: a view costs nothing, and what two ops keep of one storage is kept once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from heterodyne.frontend.export import Traced, quiet
from heterodyne.frontend.faults import fails_for, line_of
from heterodyne.frontend.flat_graph import region_of
from heterodyne.frontend.sizes import fit
from heterodyne.graph import Size

__all__ = ["Observed", "observe"]

# Three points fix a parabola; 1 is left out because broadcasting gives it a meaning of its own.
_BATCHES = (2, 3, 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Of one op: the bytes that it is the first to keep, and for each tensor it returns whether gradients flow through
    it and whether it is a view of something that was there before."""

    saved: Size
    differentiable: tuple[bool, ...]
    views: tuple[bool, ...]


def observe(traced: Traced) -> dict[fx.Node, Observed]:
    """Run the graph forward at a few batch sizes; one observation for each node that returns tensors."""
    with quiet():
        runs = {batch: _Replay(traced, batch).observations() for batch in _BATCHES}
    first = runs[_BATCHES[0]]
    return {
        node: Observed(
            saved=fit({batch: run[node][0] for batch, run in runs.items()}), differentiable=flows, views=views
        )
        for node, (_, flows, views) in first.items()
    }


class _Replay(fx.Interpreter):
    """One run at one batch size."""

    def __init__(self, traced: Traced, batch: int) -> None:
        super().__init__(traced.root, garbage_collect_values=False, graph=traced.graph)
        self.extra_traceback = False  # `fails_for` names the line
        self._traced = traced
        self._batch = batch
        self._known: set[int] = set()  # storages that stay alive anyway, or that are already counted
        self._existing: set[int] = set()
        self._alive: list[Tensor] = []  # so that no storage is freed and its address used again
        self._saved = 0
        self._result: dict[fx.Node, tuple[int, tuple[bool, ...], tuple[bool, ...]]] = {}

    def observations(self) -> dict[fx.Node, tuple[int, tuple[bool, ...], tuple[bool, ...]]]:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor),
        ):
            try:
                self.run(*[self._stand_in(node) for node in self._traced.roles])
            finally:
                # Autograd holds the hooks of what it has saved, and they hold this: a circle that Python cannot see.
                self.env.clear()
                self._alive.clear()
        return self._result

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        self._saved = 0
        with torch.set_grad_enabled(region_of(n).grad):
            try:
                value = super().run_node(n)
            except Exception as error:
                raise fails_for(self._batch, error, line_of(n, full=True), str(n.target)) from error
        tensors = [v for v in (value if isinstance(value, tuple | list) else (value,)) if isinstance(v, Tensor)]
        if tensors:
            storages = [_storage(tensor) for tensor in tensors]
            self._result[n] = (
                self._saved,
                tuple(tensor.requires_grad for tensor in tensors),
                tuple(storage in self._existing for storage in storages),
            )
            self._existing.update(storages)
            self._alive += tensors
        return value

    def _stand_in(self, node: fx.Node) -> Tensor:
        """Return what a placeholder is at this batch size. Weights and constants are kept anyway; inputs cost what they hold."""
        traced = node.meta["val"]
        shape = [size if isinstance(size, int) else self._batch for size in traced.shape]
        tensor = torch.empty(shape, dtype=traced.dtype, device="cpu")
        role = self._traced.roles[node]
        if role.kind == "parameter":
            tensor.requires_grad_(self._traced.model.get_parameter(role.name).requires_grad)
        if role.kind != "input":
            self._known.add(_storage(tensor))
        self._existing.add(_storage(tensor))
        self._alive.append(tensor)
        return tensor

    def _pack(self, tensor: Tensor) -> None:
        """Nothing is kept: there is no backward, and a result that its own function keeps would never be freed."""
        storage = _storage(tensor)
        if storage not in self._known:
            self._known.add(storage)
            self._saved += tensor.untyped_storage().nbytes()
            self._alive.append(tensor)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
