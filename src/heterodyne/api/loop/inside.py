"""Outputs of the modules inside of a model under any plan: read as on one device, or changed for a while."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from itertools import count
from math import isclose, isnan
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from heterodyne.api.loop.module_outputs import Point, outputs_of, shards_of, whole_output
from heterodyne.api.loop.tried_edits import tried
from heterodyne.api.session import Session
from heterodyne.errors import DataError, HeterodyneError, PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.module_outputs import MODULE_OUTPUT
from heterodyne.module_outputs import Edit, OutputHook, edited, recorded
from heterodyne.plan.order import is_asynchronous
from heterodyne.runtime.same_batch import digest
from heterodyne.runtime.slices import BatchSource
from heterodyne.runtime.worker import Worker

__all__ = ["Inside"]

T = TypeVar("T")

_trainers = count()
_AS_IT_IS = (
    "the model has no graph ({}), so each device runs the module as it is: register a forward hook of PyTorch on it "
    "(module.register_forward_hook), which sees the samples of its rank"
)


class Inside:
    """The modules inside of the model of a trainer. Every rank makes the same calls.

    Args:
        model: the user's, whose names of modules are used.
        worker: runs it on this rank.
    """

    def __init__(self, model: nn.Module, worker: Worker, session: Session) -> None:
        self._model = model
        self._worker = worker
        self._session = session
        number = next(_trainers)
        self._suffix = f" of trainer {number + 1}" if number else ""
        self._hooks: dict[tuple[str, bool], OutputHook] = {}
        # By module, for each block that needs its hook, whether its edit trains something.
        self._hooked: dict[str, list[bool]] = {}
        self._handles: dict[str, Any] = {}
        self._trained: dict[str, list[Tensor]] = {}  # leaves of edits that the loss trains, by path

    def matching(self, patterns: Sequence[str]) -> dict[str, str]:
        """Return by the name that is asked for the path of each module, in the order of the model; of a module with several names the first
        that matches. Containers, which are never called, and what is inside of routed experts match no ``*``.

        Raises HeterodyneError for a pattern that matches none, PlanError for one that matches nothing but what is inside of routed experts.
        """
        every = [(name, part) for name, part in self._model.named_modules(remove_duplicate=False) if name]
        first: dict[nn.Module, str] = {}
        for name, part in every:
            first.setdefault(part, name)
        root, ops = self._worker.module, self._worker.lowered(training=None).graph.ops
        inner = {
            part: first[mixture]
            for mixture in (root.get_submodule(op.module) for op in ops if op.kind == "experts")
            for part in mixture.modules()
            if mixture in first and part is not mixture
        }
        found: dict[str, str] = {}
        for pattern in patterns:
            some = any(letter in pattern for letter in "*?[")
            fits = {
                name: part for name, part in every if fnmatchcase(name, pattern) and not (some and _is_container(part))
            }
            matched = {name: first[part] for name, part in fits.items() if part not in inner}
            if fits and not matched:
                name, part = next(iter(fits.items()))
                raise PlanError(
                    f"{name!r} is inside of routed experts, which a plan computes as one operation, with the tokens in another order: ask "
                    f"for {inner[part]!r}"
                )
            if not matched:
                near = difflib.get_close_matches(pattern, [name for name, _ in every], n=3, cutoff=0.4)
                told = f"; the nearest are {', '.join(map(repr, near))}" if near else ""
                raise HeterodyneError(
                    f"no module of {type(self._model).__name__} is called {pattern!r}{told}. Give the path of a module as named_modules() "
                    "has it, where * stands for anything"
                )
            for name, path in matched.items():
                if not some or path not in found.values():
                    found[name] = path
        order = [name for name, _ in every]
        return {name: found[name] for name in sorted(found, key=order.index)}

    def activations(
        self,
        patterns: Sequence[str],
        batch: Mapping[str, Tensor] | BatchSource,
        on: Literal["all", "rank0"] | None,
    ) -> dict[str, Any]:
        """Return by name what the modules return for a batch in eval mode. Collective.

        ``on``: the ranks that are to have it, whole and on the host; None: each has its own shards.
        """
        names = self._agreed(lambda: self.matching(patterns))
        communicator = self._session.communicator
        of_all = communicator.all_gather_object(digest(batch))
        if (other := next((rank for rank, own in enumerate(of_all) if own != of_all[0]), None)) is not None:
            raise DataError(f"rank {other} gives another batch than rank 0: give the global batch on every rank")
        paths = list(dict.fromkeys(names.values()))
        with self._looking_at(paths):
            self._worker.lowered(
                training=True
            )  # as in other evaluations, what was captured in training runs, if it is the same
            graph = self._worker.lowered(training=False).graph
            points = self._points(paths, graph)
            for name in [name for name, path in names.items() if not points[path]]:
                self._require_shown(name, patterns)
                del names[name]
            with recorded() as seen:
                self._worker.evaluate(batch)
        found: dict[str, Any] = {}
        for path in dict.fromkeys(names.values()):
            own = [entry for entry in seen if entry.key == self._key(path)]
            found[path] = (
                shards_of(points[path], own)
                if on is None
                else outputs_of(
                    points[path], [whole_output(graph, point, own, on, communicator) for point in points[path]]
                )
            )
        return {name: found[path] for name, path in names.items()} if on != "rank0" or self._session.rank == 0 else {}

    @contextmanager
    def edits(self, functions: Mapping[str, Edit]) -> Iterator[None]:
        """See `Distributed.edit`. Collective as it begins."""
        self._agreed(lambda: sorted(self._functions(functions)))
        of_paths = self._functions(functions)
        with ExitStack() as stack:
            stack.enter_context(self._looking_at(list(of_paths)))
            points = self._points(list(of_paths), self._worker.lowered(training=True).graph)
            for path in [path for path in of_paths if not points[path]]:
                self._require_shown(path, [path])
            leaves = self._tried(points, of_paths)
            if any(leaves.values()) and is_asynchronous(self._worker.plan):
                raise PlanError(
                    f"the edit of {next(path for path, found in leaves.items() if found)!r} trains something, whose gradient of a step is "
                    "there only when the next one runs ('async: predicted'): train it without 'async'"
                )
            cut_off = [
                path for path in of_paths if leaves[path] and not all(p.op.differentiable[0] for p in points[path])
            ]
            if cut_off:  # all before it is frozen: gradients flow to the edit all the same, perhaps from another device
                stack.enter_context(self._looking_at(cut_off, trains=True))
                self._worker.lowered(training=True)
            stack.enter_context(edited({self._key(path): f for path, f in of_paths.items()}))
            before = dict(self._trained)
            stack.callback(lambda: setattr(self, "_trained", before))
            self._trained |= {path: [*before.get(path, ()), *found] for path, found in leaves.items() if found}
            self._counted(self._trained)
            yield

    @contextmanager
    def trained(self) -> Iterator[Callable[[float | None], None]]:
        """While a step runs, gradients of the tensors that edits read are its own; what is yielded adds those of all ranks to what was
        there. It is given the scale of the loss. Collective."""
        leaves = list({id(leaf): leaf for found in self._trained.values() for leaf in found}.values())
        before = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None

        def reduce(scale: float | None) -> None:
            mine = self._session.cluster.devices[self._session.rank].id
            counts = bool(leaves) and mine in self._counted(self._trained)
            for leaf, old in zip(leaves, before, strict=True):
                here = counts and leaf.grad is not None
                own = leaf.grad if here and leaf.grad is not None else torch.zeros_like(leaf)
                total = torch.cat(
                    [own.detach().reshape(-1).to("cpu", torch.float64), torch.tensor([float(here)]).double()]
                )
                self._session.communicator.control.all_reduce(total).wait()
                new = (total[:-1] / (scale or 1.0)).view(leaf.shape).to(leaf.device, leaf.dtype)
                leaf.grad = old if not total[-1] else new if old is None else old + new

        try:
            yield reduce
        except BaseException:
            for leaf, old in zip(leaves, before, strict=True):
                leaf.grad = old
            raise

    def _counted(self, paths: Collection[str]) -> set[str]:
        """Return the devices whose gradients of edits of these modules count: the first of each row, since all of a row have all of it.

        Raises PlanError, on all ranks alike, where a device is the first in one stage and not in another.
        """
        lowered = self._worker.lowered(training=None)
        keys = {self._key(path) for path in paths}
        shown = [n for n, op in enumerate(lowered.graph.ops) if op.kind == MODULE_OUTPUT and op.argument("key") in keys]
        first: set[str] = set()
        others: set[str] = set()
        for stage in (stage for pipeline in lowered.plan.pipelines for stage in pipeline.stages):
            if any(stage.ops[0] <= place < stage.ops[1] for place in shown):
                heads = {row[0] for row in stage.rows}
                first |= heads
                others |= set(stage.devices) - heads
        if first & others:
            raise PlanError(
                f"edits that train something are in stages of several widths on {min(first & others)}: edit modules of one stage at a "
                "time, each in a step of its own"
            )
        return first

    def _key(self, path: str) -> str:
        return path + self._suffix

    def _agreed(self, do: Callable[[], T]) -> T:
        """Return what this rank finds, as all do; raises what any rank raises, on all of them, and HeterodyneError if they find unlike
        things.
        """
        found: list[T] = []

        def told() -> T:
            found.append(do())
            return found[0]

        of_all = self._session.communicator.agreement.gather_or_raise(told)
        for rank, other in enumerate(of_all):
            if other != of_all[0]:
                raise HeterodyneError(
                    f"rank {rank} asks for {other} inside of the model, and rank 0 for {of_all[0]}: every rank makes the same calls"
                )
        return found[0]

    @contextmanager
    def _looking_at(self, paths: Sequence[str], *, trains: bool = False) -> Iterator[None]:
        """The modules have their hooks while the block runs. ``trains``: see `OutputHook`."""
        for path in paths:
            self._hooked[path] = [*self._hooked.get(path, ()), trains]
            self._hook(path)
        try:
            yield
        finally:
            for path in paths:
                self._hooked[path] = self._hooked[path][:-1]
                self._hook(path)

    def _hook(self, path: str) -> None:
        """Let a module have the hook that the blocks that are entered need."""
        if path in self._handles:
            self._handles.pop(path).remove()
        needed = self._hooked[path]
        if needed:
            hook = self._hooks.setdefault((path, any(needed)), OutputHook(self._key(path), trains=any(needed)))
            self._handles[path] = self._model.get_submodule(path).register_forward_hook(hook)

    def _points(self, paths: Sequence[str], graph: ModelGraph) -> dict[str, list[Point]]:
        """Return the tensors of each module's outputs, in the order of its calls. Raises PlanError for a model without a graph."""
        if graph.opaque is not None:
            raise PlanError(_AS_IT_IS.format(graph.opaque))
        by_key: dict[str, list[Point]] = {self._key(path): [] for path in paths}
        for index, op in enumerate(graph.ops):
            key = op.argument("key") if op.kind == MODULE_OUTPUT else None
            if key in by_key:
                by_key[str(key)].append(Point(path=str(key).removesuffix(self._suffix), op=op, index=index))
        return {path: by_key[self._key(path)] for path in paths}

    def _functions(self, functions: Mapping[str, Edit]) -> dict[str, Edit]:
        """Return the functions by path. Raises HeterodyneError for what cannot be called, and for two of one module."""
        found: dict[str, str] = {}
        for name, function in functions.items():
            if not callable(function):
                raise HeterodyneError(
                    f"the edit of {name!r} is {function!r}: give a function of what the module returns, or a module"
                )
            for path in self.matching([name]).values():
                if (other := found.setdefault(path, name)) != name:
                    raise HeterodyneError(
                        f"{other!r} and {name!r} both edit {path!r}: give each module one function; an edit in a block inside of this one "
                        "is called after it"
                    )
        return {path: functions[name] for path, name in found.items()}

    def _require_shown(self, name: str, patterns: Sequence[str]) -> None:
        """Raises PlanError for a module whose output nothing computes, and which was asked for by its name."""
        if name not in patterns:
            return
        raise PlanError(
            f"{name!r} returns no tensor that the loss depends on, or forward does not call it: nothing computes its output under a plan"
        )

    def _tried(self, points: Mapping[str, Sequence[Point]], edits: Mapping[str, Edit]) -> dict[str, list[Tensor]]:
        """Return by path the tensors that the loss trains through the edits. Collective. Raises PlanError for one that cannot be made under
        a plan, and where it is not the same on all ranks.
        """
        leaves: dict[str, list[Tensor]] = {}

        def told() -> dict[str, list[float]]:
            values = {path: tried(points[path], edit, self._model, self._worker.device) for path, edit in edits.items()}
            leaves.update({path: own for path, (own, _) in values.items()})
            return {
                path: [*(float(t.detach().double().sum()) for t in own), *came] for path, (own, came) in values.items()
            }

        of_all = self._session.communicator.agreement.gather_or_raise(told)
        for rank, other in enumerate(of_all):
            for path, values in other.items():
                first = of_all[0][path]
                same = len(values) == len(first) and all(
                    isclose(a, b, rel_tol=1e-3, abs_tol=1e-6) or (isnan(a) and isnan(b))
                    for a, b in zip(values, first, strict=True)
                )
                if not same:
                    raise PlanError(
                        f"the edit of {path!r} is another on rank {rank} than on rank 0: it makes other numbers of the same ones, or reads "
                        "other tensors. Every rank gives the same function"
                    )
        return leaves


def _is_container(module: nn.Module) -> bool:
    """Return whether a module has no forward, as a ModuleList."""
    return type(module).forward is nn.Module.forward
