"""The initial weights of a model one after the other, without all of them at once.

A model is built on fake tensors, and the operations are recorded. `RecordedBuild.weights` runs them on real tensors in the same order,
so that each random operation draws the numbers that it would have drawn, and hands out each weight as soon as nothing writes it any more.
A storage has memory from an operation that writes all of it to the last one that touches it before the next such write: a layer that is
initialised when it is made and once more at the end, as those of Transformers are, has none in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from heterodyne.runtime.weights.materialise import stored_tensors

__all__ = ["RecordedBuild"]

_OVERWRITES = frozenset({
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_", "uniform_", "zero_",
})  # fmt: skip


class _NotRecordedError(Exception):
    """The build does what cannot be run again later."""


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor of a storage, which is known by its number."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Call:
    """``made``: for each tensor of the result the number of its storage; ``overwritten``: a storage that it writes whole, unread."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    made: tuple[int, ...]
    touched: frozenset[int]
    overwritten: int | None


class RecordedBuild:
    """How a model is built, and which of the storages hold its parameters and buffers."""

    def __init__(
        self,
        calls: Sequence[_Call],
        weights: Mapping[str, _View | Tensor],
        sizes: Mapping[int, int],
        generator: Tensor | None,
    ) -> None:
        self._calls = calls
        self._weights = weights
        self._sizes = sizes
        self._generator = generator

    @classmethod
    def of(cls, build: Callable[[], nn.Module]) -> Self | None:
        """What ``build`` does; None if that cannot be run again from a record (it reads values, or seeds a generator)."""
        recorder = _Recorder()
        try:
            with torch.random.fork_rng([]), recorder:
                model = build()
            weights = {name: recorder.weight(tensor) for name, tensor in stored_tensors(model)}
        except Exception:  # noqa: BLE001  # what is wrong with the model itself is told when it is built
            return None
        return cls(recorder.calls, weights, recorder.sizes, recorder.generator)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter and buffer once, by name, with the values that the build would have given it. To be asked for once.

        The generator of the host is the build's own until the last of them.
        """
        calls = self._calls
        ends, finished = self._ends()
        real: dict[int, Tensor] = {}
        with torch.random.fork_rng([]):
            if self._generator is not None:
                torch.default_generator.set_state(self._generator)
            yield from ((name, weight) for name, weight in self._weights.items() if isinstance(weight, Tensor))
            for index, call in enumerate(calls):
                with torch.no_grad():
                    self._run(call, real)
                for storage in ends[index]:
                    kept = real[storage].untyped_storage()
                    if kept.resizable():
                        kept.resize_(0)
                for storage, names in finished[index].items():
                    yield from ((name, _real(self._weights[name], real)) for name in names)
                    del real[storage]

    def _run(self, call: _Call, real: dict[int, Tensor]) -> None:
        if call.overwritten is not None:
            written = real[call.overwritten].untyped_storage()
            if written.nbytes() != self._sizes[call.overwritten]:
                written.resize_(self._sizes[call.overwritten])
        args, kwargs = pytree.tree_map(lambda value: _real(value, real), (call.args, call.kwargs))
        for storage, tensor in zip(call.made, _tensors(call.function(*args, **kwargs)), strict=True):
            real.setdefault(storage, tensor)

    def _ends(self) -> tuple[dict[int, list[int]], dict[int, dict[int, list[str]]]]:
        """After each call the storages whose memory goes, and those that are finished, with the weights in them."""
        touches: defaultdict[int, list[int]] = defaultdict(list)
        for index, call in enumerate(self._calls):
            for storage in call.touched:
                touches[storage].append(index)
        ends: defaultdict[int, list[int]] = defaultdict(list)
        finished: defaultdict[int, dict[int, list[str]]] = defaultdict(dict)
        names: defaultdict[int, list[str]] = defaultdict(list)
        for name, weight in self._weights.items():
            if isinstance(weight, _View):
                names[weight.storage].append(name)
        for storage, at in touches.items():
            for index, following in pairwise(at):
                if self._calls[following].overwritten == storage:
                    ends[index].append(storage)
            finished[at[-1]][storage] = names[storage]
        return ends, finished


def _real(value: Any, real: Mapping[int, Tensor]) -> Any:
    if not isinstance(value, _View):
        return value
    storage = real[value.storage].untyped_storage()
    empty = torch.empty(0, dtype=value.dtype)
    return empty.set_(storage, value.offset, value.size, value.stride)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is computed on fake tensors. Aliases of a storage need no operation when it is run again.

    What is computed of real tensors alone (constants, states of generators, which are bytes) is computed at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.sizes: dict[int, int] = {}
        self.generator: Tensor | None = None
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # or a later storage could have the address of an earlier one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if not any(isinstance(tensor, FakeTensor) for tensor in given) and (
            given or kwargs.get("dtype") is torch.uint8
        ):
            if draws:
                raise _NotRecordedError("a real tensor that is drawn")
            return func(*args, **kwargs)
        if draws:
            self._require_own_generator(kwargs)
        written = _written(func, args, kwargs)
        read = pytree.tree_map(self._noted, (args, kwargs))
        known = len(self._numbers)
        with self._fake:
            found = func(*args, **kwargs)
        made = tuple(self._number(tensor) for tensor in _tensors(found))
        if len(self._numbers) == known and not written:
            return found
        views = [value for value in pytree.tree_leaves(read) if isinstance(value, _View)]
        self.calls.append(
            _Call(
                function=func,
                args=read[0],
                kwargs=read[1],
                made=made,
                touched=frozenset({*made, *(view.storage for view in views)}),
                overwritten=self._overwritten(func, written, views),
            )
        )
        return found

    def weight(self, tensor: Tensor) -> _View | Tensor:
        """A parameter or buffer of the model that was built."""
        return self._noted(tensor.detach()) if isinstance(tensor, FakeTensor) else tensor

    def _overwritten(self, func: Any, written: Sequence[Tensor], views: Sequence[_View]) -> int | None:
        if len(written) != 1 or func.overloadpacket.__name__ not in _OVERWRITES:
            return None
        (tensor,) = written
        storage = self._number(tensor)
        reads = sum(view.storage == storage for view in views) > 1
        return None if reads or tensor.numel() * tensor.itemsize != self.sizes[storage] else storage

    def _noted(self, value: Any) -> Any:
        """What is run again later: of a fake tensor where it lies in which storage, of a real one its values now."""
        if isinstance(value, FakeTensor):
            if value.layout is not torch.strided or value.is_conj() or value.is_neg():
                raise _NotRecordedError("a tensor that is more than a view of a storage")
            return _View(
                self._number(value), value.dtype, tuple(value.shape), value.stride(), int(value.storage_offset())
            )
        return value.detach().clone() if isinstance(value, Tensor) else value

    def _number(self, tensor: Tensor) -> int:
        """Of its storage. Raises _NotRecordedError for one with values, or of another device."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "cpu":
            raise _NotRecordedError("a tensor that has values, or is not on the host")
        storage = tensor.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self._numbers))
        if number not in self.sizes:
            self.sizes[number] = storage.nbytes()
            self._alive.append(tensor)
        return number

    def _require_own_generator(self, kwargs: Mapping[str, Any]) -> None:
        """On fake tensors nothing is drawn, so the state stays what it was at the first draw, unless the build seeds it anew."""
        state = torch.default_generator.get_state()
        if self.generator is None:
            self.generator = state
        if kwargs.get("generator") is not None or not torch.equal(state, self.generator):
            raise _NotRecordedError("a generator of the build's own")


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    declared = func._schema.arguments
    given = [*zip(declared, args, strict=False), *((d, kwargs[d.name]) for d in declared if d.name in kwargs)]
    return _tensors([value for d, value in given if d.alias_info is not None and d.alias_info.is_write])
