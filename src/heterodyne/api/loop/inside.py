"""Outputs of the modules inside of a model under any plan: read as on one device, or changed for a while."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count
from math import isclose, isnan
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from heterodyne.api.loop.prediction import gathered_rows
from heterodyne.api.session import Session
from heterodyne.errors import DataError, HeterodyneError, PlanError
from heterodyne.graph.ir import ModelGraph
from heterodyne.graph.module_outputs import MODULE_OUTPUT
from heterodyne.graph.op import Op
from heterodyne.module_outputs import Edit, OutputHook, Seen, edited, nested, recorded, result_of
from heterodyne.runtime.same_batch import digest
from heterodyne.runtime.slices import BatchSource
from heterodyne.runtime.worker import Worker

__all__ = ["Inside", "OutputShard"]

T = TypeVar("T")

_TRIED = 3
"""Samples that an edit is tried with: one of them alone, and two together."""

_trainers = count()
_AS_IT_IS = (
    "the model has no graph ({}), so each device runs the module as it is: register a forward hook of PyTorch on it "
    "(module.register_forward_hook), which sees the samples of its rank"
)


@dataclass(frozen=True, kw_only=True)
class OutputShard:
    """What a module has returned on this rank for the samples ``[first, first + count)`` of a batch, on the rank's device.

    ``output``: a tensor, or tuples and dicts of them.
    """

    first: int
    count: int
    output: Any


@dataclass(frozen=True, kw_only=True)
class _Point:
    """One tensor of the output of a module in one of its calls. ``index``: of its op in the graph."""

    path: str
    op: Op
    index: int

    @property
    def call(self) -> int:
        return _number(self.op, "call")

    @property
    def leaf(self) -> int:
        return _number(self.op, "leaf")

    @property
    def form(self) -> str:
        return str(self.op.argument("form"))

    @property
    def dim(self) -> int | None:
        """Return the dim in which the samples are, in order; None if there is none."""
        return self.op.samples[0] if self.op.samples else None


def _number(op: Op, name: str) -> int:
    value = op.argument(name)
    assert isinstance(value, int)
    return value


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
        self._hooked: dict[
            str, list[bool]
        ] = {}  # by module, for each block that needs its hook, whether its edit trains something
        self._handles: dict[str, Any] = {}
        self._trained: dict[str, list[Tensor]] = {}  # leaves of edits that the loss trains, by path

    def matching(self, patterns: Sequence[str]) -> dict[str, str]:
        """Return by the name that is asked for the path of each module, in the order of the model; of a module with several names the first
        that matches. Containers, which are never called, match no ``*``.

        Raises HeterodyneError for a pattern that matches none.
        """
        every = [(name, part) for name, part in self._model.named_modules(remove_duplicate=False) if name]
        first: dict[nn.Module, str] = {}
        for name, part in every:
            first.setdefault(part, name)
        found: dict[str, str] = {}
        for pattern in patterns:
            some = any(letter in pattern for letter in "*?[")
            matched = {
                name: first[part]
                for name, part in every
                if fnmatchcase(name, pattern) and not (some and _is_container(part))
            }
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
        of_all = self._session.communicator.all_gather_object(digest(batch))
        if (other := next((rank for rank, own in enumerate(of_all) if own != of_all[0]), None)) is not None:
            raise DataError(f"rank {other} gives another batch than rank 0: give the global batch on every rank")
        paths = list(dict.fromkeys(names.values()))
        with self._looking_at(paths):
            self._worker.lowered(
                training=True
            )  # as in other evaluations, what was captured in training runs, if it is the same
            graph = self._worker.lowered(training=False).graph
            points = self._points(paths, graph)
            names = {name: path for name, path in names.items() if points[path] or self._require_shown(name, patterns)}
            with recorded() as seen:
                self._worker.evaluate(batch)
        found: dict[str, Any] = {}
        for path in dict.fromkeys(names.values()):
            own = [entry for entry in seen if entry.key == self._key(path)]
            found[path] = (
                _shards(points[path], own)
                if on is None
                else _outputs(points[path], [self._whole(graph, point, own, on) for point in points[path]])
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
            cut_off = [
                path for path in of_paths if leaves[path] and not all(p.op.differentiable[0] for p in points[path])
            ]
            if cut_off:  # all before it is frozen: gradients flow to the edit all the same, perhaps from another device
                stack.enter_context(self._looking_at(cut_off, trains=True))
                self._worker.lowered(training=True)
            stack.enter_context(edited({self._key(path): f for path, f in of_paths.items()}))
            before = dict(self._trained)
            self._trained |= {path: found for path, found in leaves.items() if found}
            stack.callback(lambda: setattr(self, "_trained", before))
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
            counts = bool(leaves) and self._counts()
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

    def _counts(self) -> bool:
        """Return whether this rank is the first of those that run the edited modules on the same samples: each has all the gradient."""
        lowered = self._worker.lowered(training=None)
        mine = lowered.cluster.devices[self._session.rank].id
        keys = {self._key(path) for path in self._trained}
        edited_at = [
            index
            for index, op in enumerate(lowered.graph.ops)
            if op.argument("key") in keys and op.kind == MODULE_OUTPUT
        ]
        first = {
            mine in (row[0] for row in stage.rows)
            for pipeline in lowered.plan.pipelines
            for stage in pipeline.stages
            if mine in stage.devices and any(stage.ops[0] <= index < stage.ops[1] for index in edited_at)
        }
        if len(first) > 1:
            raise PlanError(
                "edits are trained in stages of several widths on one device: edit modules of one stage at a time"
            )
        return first == {True}

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

    def _points(self, paths: Sequence[str], graph: ModelGraph) -> dict[str, list[_Point]]:
        """Return the tensors of each module's outputs, in the order of its calls. Raises PlanError for a model without a graph."""
        if graph.opaque is not None:
            raise PlanError(_AS_IT_IS.format(graph.opaque))
        by_key: dict[str, list[_Point]] = {self._key(path): [] for path in paths}
        for index, op in enumerate(graph.ops):
            key = op.argument("key") if op.kind == MODULE_OUTPUT else None
            if key in by_key:
                by_key[str(key)].append(_Point(path=str(key).removesuffix(self._suffix), op=op, index=index))
        return {path: by_key[self._key(path)] for path in paths}

    def _whole(
        self, graph: ModelGraph, point: _Point, seen: Sequence[Seen], on: Literal["all", "rank0"]
    ) -> Tensor | None:
        """Return one tensor as one device has it, on the host. Collective. Raises PlanError where parts of it do not make up the whole."""
        key = self._key(point.path)
        entries = [e for e in seen if (e.key, e.leaf, e.call) == (key, point.leaf, point.call)]
        own = {(e.samples.start, len(e.samples)): e.value for e in entries}
        communicator = self._session.communicator
        of_all = communicator.all_gather_object(tuple(own))
        spans = _held_once(of_all)
        mine = [own[span] for span in spans[communicator.rank]]
        if point.dim is None:
            different = {span for each in of_all for span in each}
            if len(different) > 1 and _follows_batch(graph, point.op):
                raise PlanError(
                    f"the output of {point.path!r} has no rows of its own for each sample, and the batch ran in {len(different)} parts: "
                    "none of them is what one device has. Ask for a module whose output has the samples in one dim, give fewer samples, or "
                    "take what each rank has of it (gather=False)"
                )
            first = next(rank for rank, own_spans in enumerate(spans) if own_spans)
            spans = [((0, 1),) if rank == first else () for rank in range(len(spans))]
            rows = [value[None] for value in mine[:1]]
        else:
            rows = [
                _by_sample(value, point.dim, count)
                for value, (_, count) in zip(mine, spans[communicator.rank], strict=True)
            ]
        part = torch.cat(rows).cpu().contiguous() if rows else None
        described = communicator.all_gather_object(None if part is None else (tuple(part.shape[1:]), part.dtype))
        shape, dtype = next(entry for entry in described if entry is not None)
        whole = gathered_rows(part, spans, (0, shape, dtype), communicator, on)
        if whole is None:
            return None
        return whole[0] if point.dim is None else whole.movedim(0, point.dim).flatten(point.dim, point.dim + 1)

    def _functions(self, functions: Mapping[str, Edit]) -> dict[str, Edit]:
        """Return the functions by path. Raises HeterodyneError for what cannot be called."""
        for name, function in functions.items():
            if not callable(function):
                raise HeterodyneError(
                    f"the edit of {name!r} is {function!r}: give a function of what the module returns, or a module"
                )
        return {path: function for name, function in functions.items() for path in self.matching([name]).values()}

    def _require_shown(self, name: str, patterns: Sequence[str]) -> bool:
        """Raises PlanError for a module that was asked for by its name, and whose output nothing computes; others are left out."""
        if name not in patterns:
            return False
        raise PlanError(
            f"{name!r} returns no tensor that the loss depends on, or forward does not call it: nothing computes its output under a plan"
        )

    def _tried(self, points: Mapping[str, Sequence[_Point]], edits: Mapping[str, Edit]) -> dict[str, list[Tensor]]:
        """Return by path the tensors that the loss trains through the edits. Collective. Raises PlanError for one that cannot be made under
        a plan, and where it is not the same on all ranks.
        """
        leaves: dict[str, list[Tensor]] = {}

        def told() -> dict[str, list[float]]:
            values = {path: self._tried_one(points[path], edit) for path, edit in edits.items()}
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

    def _tried_one(self, points: Sequence[_Point], edit: Edit) -> tuple[list[Tensor], list[float]]:
        """Return what an edit trains, and numbers that come of it."""
        path = points[0].path
        if len({point.leaf for point in points}) > 1:
            raise PlanError(
                f"{path!r} returns several tensors: edit the modules inside of it that make them, each by its own path"
            )
        found: dict[int, Tensor] = {}
        numbers: list[float] = []
        for point in points:
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(0)
                made, x = self._tried_at(point, edit)
            found |= {id(leaf): leaf for leaf in _leaves(made, x)}
            numbers += [float(made.detach().double().sum()), float(made.detach().double().abs().sum())]
        stored = {id(parameter) for parameter in self._model.parameters()}
        if any(leaf in stored for leaf in found):
            raise PlanError(
                f"the edit of {path!r} reads parameters of the model, which other devices may hold: copy their values before "
                "(with trainer.whole_weights() as model: ...)"
            )
        return list(found.values()), numbers

    def _tried_at(self, point: _Point, edit: Edit) -> tuple[Tensor, Tensor]:
        """Return what an edit makes of random numbers, and these. Raises PlanError where it does not treat samples one by one."""
        spec, dim = point.op.outputs[0], point.dim
        if dim is None and not all(size.is_constant for size in spec.shape):
            raise PlanError(
                f"the output of {point.path!r} has no rows of its own for each sample: edited part by part, it is not what the whole "
                "batch gives on one device. Edit a module whose output has the samples in one dim"
            )
        shape = [int(size(_TRIED)) for size in spec.shape]
        dtype = getattr(torch, spec.dtype)
        x = torch.zeros(shape, dtype=dtype)
        x = (
            (x.normal_() if dtype.is_floating_point else x)
            .to(self._worker.device)
            .requires_grad_(dtype.is_floating_point)
        )

        def edited_of(part: Tensor) -> Tensor:
            return result_of(edit, part.clone(), point.form, point.leaf, point.path)

        try:
            with torch.enable_grad():
                made = edited_of(x)
                cuts = () if dim is None else (1, _TRIED - 1)
                rows = 0 if dim is None else x.shape[dim] // _TRIED
                parts = (
                    [edited_of(part) for part in torch.split(x, [cut * rows for cut in cuts], dim or 0)] if cuts else []
                )
        except HeterodyneError:
            raise
        except Exception as error:
            hint = (
                ". If it reads weights of the model, copy their values before (with trainer.whole_weights() as model: ...)"
                if "meta" in str(error)
                else ""
            )
            raise PlanError(
                f"the edit of {point.path!r} fails for a {spec.dtype} tensor of shape {shape}, as {_TRIED} samples have it: "
                f"{type(error).__name__}: {error}{hint}"
            ) from error
        if parts and not torch.allclose(made.float(), torch.cat(parts, dim or 0).float(), 1e-3, 1e-4, equal_nan=True):
            raise PlanError(
                f"the edit of {point.path!r} makes something else of several samples together than of each alone, or of one sample twice "
                "(does it mix samples, or draw random numbers?): devices have parts of a batch. Let it treat each sample by itself"
            )
        return made, x


def _outputs(points: Sequence[_Point], values: Sequence[Any]) -> Any:
    """Return the output of a module; of one that is called several times a list of them."""
    calls: dict[int, list[tuple[_Point, Any]]] = {}
    for point, value in zip(points, values, strict=True):
        calls.setdefault(point.call, []).append((point, value))
    made = []
    for found in calls.values():
        by_leaf = {point.leaf: value for point, value in found}
        made.append(nested(found[0][0].form, [by_leaf.get(leaf) for leaf in range(max(by_leaf) + 1)]))
    return made if len(made) > 1 else made[0]


def _shards(points: Sequence[_Point], seen: Sequence[Seen]) -> list[OutputShard]:
    """Return what this rank has of the outputs of a module, in the order of its samples."""
    found = []
    for span in sorted({(entry.samples.start, len(entry.samples)) for entry in seen}):
        here = {(e.call, e.leaf): e.value for e in seen if (e.samples.start, len(e.samples)) == span}
        own = [point for point in points if (point.call, point.leaf) in here]
        output = _outputs(own, [here[point.call, point.leaf] for point in own])
        found.append(OutputShard(first=span[0], count=span[1], output=output))
    return found


def _held_once(of_all: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[tuple[int, int], ...]]:
    """Return for each rank those of its spans that no earlier rank has: devices of a row have the same samples."""
    known: set[tuple[int, int]] = set()
    kept = []
    for spans in of_all:
        kept.append(tuple(sorted(set(spans) - known)))
        known.update(spans)
    return kept


def _by_sample(value: Tensor, dim: int, samples: int) -> Tensor:
    """[..., samples * rows, ...] as [samples, ..., rows, ...]."""
    shape = (*value.shape[:dim], samples, value.shape[dim] // samples, *value.shape[dim + 1 :])
    return value.reshape(shape).movedim(dim, 0)


def _follows_batch(graph: ModelGraph, op: Op) -> bool:
    """Return whether a value depends on the samples."""
    batch = {entry.symbol for entry in graph.inputs if entry.batch_dim is not None}
    waiting, known = list(op.inputs), set(op.inputs)
    while waiting:
        name = waiting.pop()
        if name in batch:
            return True
        made = graph.op_by_name.get(name)
        for source in () if made is None else made.inputs:
            if source not in known:
                known.add(source)
                waiting.append(source)
    return False


def _leaves(made: Tensor, x: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients a backward from ``made`` adds to, but for ``x``, in the order in which they are met."""
    found: dict[int, Tensor] = {}
    waiting, known = [made.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        known.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf is not x:
            found[id(leaf)] = leaf
        waiting += [source for source, _ in node.next_functions]
    return list(found.values())


def _is_container(module: nn.Module) -> bool:
    """Return whether a module has no forward, as a ModuleList."""
    return type(module).forward is nn.Module.forward
