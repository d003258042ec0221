"""Numbers of a model that change during a run, as inputs of its graph: ``loss + self.beta * penalty`` holds for every beta.

During the trace such an attribute is a `Number`. What is computed of it in Python is computed again for each new value; where it reaches
a tensor, the graph gets an input. What Python decides by it is a guard: the graph holds for the values that decide alike.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from heterodyne.errors import CaptureError
from heterodyne.model_output import NUMBER

__all__ = ["FROM_NUMBERS", "NumberRecorder", "Numbers"]

Values: TypeAlias = Mapping[str, int | float]
_Computed: TypeAlias = Callable[[Values], Any]

FROM_NUMBERS: Final = "_numbers_of_the_script"
"""The name of the module, in the copy that is traced, whose buffers stand for the inputs."""
_MOST = {float: 8, int: 4}  # inputs of each type


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The numbers of a graph.

    Args:
        names: of the attributes, with the path of their module.
        guards: functions of the values, with what they gave in the trace.
        inputs: of the graph, by name: how each is computed.
    """

    names: tuple[str, ...] = ()
    guards: tuple[tuple[_Computed, Any], ...] = field(default=(), repr=False)
    inputs: Mapping[str, tuple[_Computed, torch.dtype]] = field(default_factory=dict, repr=False)

    def hold(self, values: Values) -> bool:
        """Return whether the graph is that of the model with these values, too."""
        try:
            return all(type(found := guard(values)) is type(known) and found == known for guard, known in self.guards)
        except (ArithmeticError, ValueError, TypeError):
            return False

    def tensors(self, values: Values) -> dict[str, Tensor]:
        """Return what the graph is given beside the batch."""
        return {name: torch.tensor(made(values), dtype=dtype) for name, (made, dtype) in self.inputs.items()}


class NumberRecorder:
    """Puts numbers in the place of attributes of a copy of the model, and notes what becomes of them.

    Args:
        copy: the copy that is traced.
        names: of attributes that are whole numbers or floats.
        empty: makes a stand-in for a tensor without dims.
    """

    def __init__(self, copy: nn.Module, names: Sequence[str], empty: Callable[[torch.dtype], Tensor]) -> None:
        self.guards: list[tuple[_Computed, Any]] = []
        self._names = tuple(names)
        self._values: dict[str, int | float] = {}
        self._inputs: dict[str, tuple[_Computed, torch.dtype]] = {}
        self._places: dict[str, str] = {}
        self._holder = nn.Module()
        for kind, dtype in ((float, torch.float32), (int, torch.int64)):
            for place in range(_MOST[kind] if names else 0):
                self._holder.register_buffer(f"{kind.__name__}_{place}", empty(dtype))
        if names:
            copy.add_module(FROM_NUMBERS, self._holder)
        for name in names:
            path, _, attribute = name.rpartition(".")
            own = vars(copy.get_submodule(path))
            self._values[name] = own[attribute]
            own[attribute] = Number(self, own[attribute], _reader(name), name)

    def found(self) -> Numbers:
        return Numbers(names=self._names, guards=tuple(self.guards), inputs=dict(self._inputs))

    def decided(self, made: _Computed, result: Any) -> Any:
        self.guards.append((made, result))
        return result

    def tensor(self, number: Number) -> Tensor:
        """The input that stands for a number. Raises CaptureError if there are too many."""
        place = self._places.get(number.text)
        if place is None:
            kind = type(number.value)
            taken = sum(other.startswith(kind.__name__) for other in self._places.values())
            if taken == _MOST[kind]:
                raise CaptureError("the model computes too many numbers that change during the run")
            place = self._places[number.text] = f"{kind.__name__}_{taken}"
            buffer = self._holder.get_buffer(place)
            self._inputs[f"{NUMBER}{place}"] = (number.made, buffer.dtype)
            # The value that it had in the trace decides nothing more, but its type does.
            self.decided(_type_of(number.made), kind.__name__)
        return self._holder.get_buffer(place)


def _type_of(made: _Computed) -> _Computed:
    return lambda values: type(made(values)).__name__


def _reader(name: str) -> _Computed:
    return lambda values: values[name]


class Number:
    """An ``int`` or ``float`` of the script, with how it is computed (``made``) of the numbers that change."""

    __hash__ = None  # type: ignore[assignment]  # set below: what is looked up by a number must be that number

    def __init__(self, recorder: NumberRecorder, value: int | float, made: _Computed, text: str) -> None:
        self.recorder, self.value, self.made, self.text = recorder, value, made, text

    @property  # type: ignore[misc]  # so that isinstance(beta, float) is what it is outside of the trace
    def __class__(self) -> type:
        return type(self.value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        del types
        args, kwargs = pytree.tree_map(_as_tensor, (args, kwargs or {}))
        return func(*args, **kwargs)

    def pinned(self) -> int | float:
        """The value, which has to be the same wherever the graph is used."""
        return self.recorder.decided(self.made, self.value)  # type: ignore[no-any-return]  # it is what was given

    def __bool__(self) -> bool:
        return bool(self.recorder.decided(lambda values: bool(self.made(values)), bool(self.value)))


def _as_tensor(value: Any) -> Any:
    return value.recorder.tensor(value) if type(value) is Number else value


def _arithmetic(function: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    def apply(self: Number, *others: Any) -> Any:
        if any(type(other) is not Number and not isinstance(other, int | float) for other in others):
            return NotImplemented
        operands = [self, *others][:: -1 if reflected else 1]
        values = [operand.value if type(operand) is Number else operand for operand in operands]
        makers = [operand.made if type(operand) is Number else _constant(operand) for operand in operands]
        texts = [operand.text if type(operand) is Number else repr(operand) for operand in operands]
        result = function(*values)

        def made(of: Values) -> Any:
            return function(*[maker(of) for maker in makers])

        if type(result) not in _MOST:
            return self.recorder.decided(made, result)
        return Number(self.recorder, result, made, f"{function.__name__}({', '.join(texts)})")

    return apply


def _constant(value: int | float) -> _Computed:
    return lambda _: value


def _pinning(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: function(self.pinned(), *others)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _function = getattr(operator, _name)
    setattr(Number, f"__{_name}__", _arithmetic(_function))
    setattr(Number, f"__r{_name}__", _arithmetic(_function, reflected=True))
for _name in ("neg", "pos", "abs", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name)))
_PINNING: dict[str, Callable[..., Any]] = {
    "__float__": float, "__int__": int, "__index__": operator.index, "__hash__": hash, "__str__": str, "__repr__": repr,
    "__format__": format, "__round__": round, "__trunc__": int, "__complex__": complex,
}  # fmt: skip
for _name, _function in _PINNING.items():
    setattr(Number, _name, _pinning(_function))
