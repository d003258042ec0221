"""What an op allows: which dims of its tensors go together, as the letters of an einsum.

A rule names each dim of each tensor that the op reads and returns by a letter. If the letter is cut, every tensor that has it is cut
in that dim; one that has it not is the same on each device. Where the result has the letter, the result is cut; where the op sums
over it, the devices' results add up. ``bsk,ok->bso`` of a linear layer thus says at once that its columns (o), its rows (k, with a
sum to be taken), the samples (b) and the sequence (s) may be cut. Dims that have to be whole are named ``.``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Final

from heterodyne.graph.ir import Argument, Op, TensorSpec
from heterodyne.graph.sharding.layout import COPY, PARTIAL, REPLICATE, Layout, sharded
from heterodyne.graph.size import Size

__all__ = ["IN_PARTS", "LETTERS", "WHOLLY", "Call", "OpStrategy", "Rule", "but_samples", "common_units"]

WHOLLY: Final = "whole"
IN_PARTS: Final = "sum"
LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class OpStrategy:
    """One way to run an op on the devices of a stage.

    Args:
        name: the letter that is cut, or the pair of them; `WHOLLY`: each device does all of it; `IN_PARTS`: on parts that add up.
        operands: the layout in which it reads each tensor, in the order of `Op.operands`.
        outputs: the layouts of what it returns.
    """

    name: str
    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    @property
    def divides(self) -> bool:
        """Return whether each device does a part of the work."""
        return self.name not in (WHOLLY, IN_PARTS)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The letters of an op.

    Args:
        operands: a letter a dim, for each tensor that it reads, in the order of `Op.operands`.
        outputs: the same for what it returns.
        summed: letters that it sums over.
        added: operands that are added once, not once a device, where a summed letter is cut (a bias).
        exchanged: letters along which the op may be cut because its program exchanges what it has to (maxima and sums of a softmax);
            what has not the letter is the same on each device afterwards.
        together: pairs of letters that may be cut at once, because its program sends what is along the first to where it is multiplied
            with what is along the second, and sends back what comes of it (tokens and experts); with the bytes that it sends each way, of
            all devices together.
        units: for a letter, a number that its cuts must divide, beside the size of the dim (of heads, say).
        linear: sets of operands in each of which the op is linear: parts of them that add up give parts of the result.
        only: the one letter by which it has to be cut; "": there is none such. For an op that takes statistics over all devices that
            have samples, who must then have different ones.
        filled: letters of which every device must have some: kernels that refuse a tensor without elements.
    """

    operands: tuple[str, ...]
    outputs: tuple[str, ...]
    summed: str = ""
    added: frozenset[int] = frozenset()
    exchanged: str = ""
    together: Mapping[str, Size] = field(default_factory=dict)
    units: Mapping[str, Size] = field(default_factory=dict)
    linear: Sequence[frozenset[int]] = ()
    only: str = ""
    filled: str = ""

    @property
    def letters(self) -> str:
        """Those that can be cut, in order of appearance."""
        named = dict.fromkeys("".join((*self.outputs, *self.operands)).replace(".", ""))
        without = self.summed + self.exchanged
        return "".join(x for x in named if x in without or all(x in output for output in self.outputs))

    def strategy(self, letter: str, by: int = 0) -> OpStrategy:
        """With ``letter`` cut, by the ``by``-th list of shares."""
        otherwise_out = REPLICATE if letter in self.exchanged else PARTIAL
        missing = [
            PARTIAL if letter in self.summed and place in self.added else COPY for place in range(len(self.operands))
        ]
        return OpStrategy(
            name=letter,
            operands=tuple(
                sharded(dims.index(letter), by) if letter in dims else otherwise
                for dims, otherwise in zip(self.operands, missing, strict=True)
            ),
            outputs=tuple(
                sharded(dims.index(letter), by) if letter in dims else otherwise_out for dims in self.outputs
            ),
        )

    def both(self, pair: str, by: Sequence[int]) -> OpStrategy:
        """With the two letters of a pair cut, each by a list of shares of its own."""
        lists = dict(zip(pair, by, strict=True))

        def laid_out(dims: str) -> Layout:
            named = next((x for x in pair if x in dims), None)
            return COPY if named is None else sharded(dims.index(named), lists[named])

        return OpStrategy(
            pair, tuple(laid_out(dims) for dims in self.operands), tuple(laid_out(dims) for dims in self.outputs)
        )

    @property
    def whole(self) -> OpStrategy:
        """With nothing cut."""
        return OpStrategy(WHOLLY, tuple(REPLICATE for _ in self.operands), tuple(REPLICATE for _ in self.outputs))

    @property
    def in_parts(self) -> tuple[OpStrategy, ...]:
        """On parts that add up."""
        return tuple(
            OpStrategy(
                IN_PARTS,
                tuple(PARTIAL if place in linear else COPY for place in range(len(self.operands))),
                tuple(PARTIAL for _ in self.outputs),
            )
            for linear in self.linear
        )


@dataclass(frozen=True)
class Call:
    """An op with the shapes of what it reads."""

    op: Op
    specs: tuple[TensorSpec, ...]

    def shape(self, operand: int) -> tuple[Size, ...]:
        return self.specs[operand].shape

    @property
    def output(self) -> tuple[Size, ...]:
        """The shape of the first thing that it returns."""
        return self.op.outputs[0].shape

    def argument(self, name: str) -> Argument:
        return self.op.argument(name)

    def whole_number(self, name: str, otherwise: int) -> int:
        """An argument that is a whole number; ``otherwise`` where it is not given."""
        value = self.op.argument(name)
        return value if isinstance(value, int) else otherwise

    def dims(self, name: str, rank: int) -> tuple[int, ...]:
        """An argument that names dims, counted from 0; all of them where it names none."""
        value = self.op.argument(name)
        if value is None or value == ():
            return tuple(range(rank))
        given = value if isinstance(value, tuple) else (value,)
        return tuple(dim % rank for dim in given if isinstance(dim, int)) if rank else ()


def but_samples(dims: str, spatial: int) -> str:
    """The letters ahead of ``spatial`` dims, without that of the samples, which is the first one if there are two."""
    ahead = dims[: len(dims) - spatial]
    return ahead[1:] if len(ahead) > 1 else ahead


def common_units(a: Size, b: Size) -> Size:
    """The largest number of equal pieces that dims of both sizes can be cut into, whatever the batch.

    >>> common_units(Size.of(12), Size.of(8)).coefficients
    (4,)
    >>> common_units(Size.per_sample(12), Size.per_sample(1)).coefficients
    (0, 1)
    """
    first, second = (_leading(size) for size in (a, b))
    if first is None or second is None:
        return Size.of(1)
    (power, factor), (other_power, other_factor) = first, second
    together = gcd(factor, other_factor)
    return Size.per_sample(together) if power == other_power == 1 else Size.of(together)


def _leading(size: Size) -> tuple[int, int] | None:
    """``(power, factor)`` of a size that is a number, or the batch times a number."""
    kept = [(power, int(c)) for power, c in enumerate(size.coefficients) if c]
    return kept[0] if len(kept) == 1 and kept[0][0] <= 1 else None
