"""Small models that nobody has thought of: programs of some ops, written by chance, that are legal and end in a loss.

A program is a list of lines of Python, so one that fails can be read. Each line was tried on real tensors, of two batch sizes, before
it was kept. What a seed gives is the same in every process.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heterodyne as hd
from heterodyne.frontend import Captured, trace

NAMES = (
    "t", "linear", "matmul", "add", "mul", "transpose", "permute", "view", "flatten", "softmax", "cat", "expand", "slice_1", "select",
    "reshape", "sum_1", "mean", "embedding", "relu", "cross_entropy_loss",
)  # fmt: skip
"""What ops are called in a graph. A model may call its weights so."""
BATCHES = (5, 3)  # sizes that nothing else has in common
WIDTHS = (1, 2, 3, 4, 6, 8, 12)
CLASSES = (2, 5, 6, 8)
LARGEST = 1500  # elements of a tensor
IGNORED = -100


@dataclass(frozen=True)
class Value:
    """An input (its shape without the batch), parameter or buffer. ``below``: of whole numbers; 0: it holds real ones."""

    name: str
    shape: tuple[int, ...]
    below: int = 0
    ignored: bool = False

    def tensor(self, seed: int, *before: int) -> Tensor:
        """Its values; the same wherever it is asked for."""
        shape = (*before, *self.shape)
        generator = torch.Generator().manual_seed(Random(f"{seed} {self.name}").getrandbits(60))
        if not self.below:
            return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.7
        numbers = torch.randint(0, self.below, shape, generator=generator)
        if not self.ignored:
            return numbers
        drawn = torch.rand(shape, generator=generator) < 0.3
        drawn.view(-1)[-1] = False  # something has to count
        return numbers.masked_fill(drawn, IGNORED)


@dataclass(frozen=True)
class Program:
    """``marked``: runs of lines that are a TaskGraph each, as (first, stop, name)."""

    seed: int
    inputs: tuple[Value, ...]
    parameters: tuple[Value, ...]
    buffers: tuple[Value, ...]
    lines: tuple[str, ...]
    marked: tuple[tuple[int, int, str], ...] = ()

    @property
    def text(self) -> str:
        """What forward runs."""
        names = {first: name for first, _, name in self.marked}
        within = {place for first, stop, _ in self.marked for place in range(first, stop)}
        written = []
        for place, line in enumerate(self.lines):
            if place in names:
                written.append(f"with hd.split(2, {names[place]!r}):")
            written.append(f"    {line}" if place in within else line)
        return "\n".join(written)

    def batch(self, samples: int) -> dict[str, Tensor]:
        return {value.name: value.tensor(self.seed, samples) for value in self.inputs}

    def __str__(self) -> str:
        values = [f"# {v.name}: {list(v.shape)}" for v in (*self.inputs, *self.parameters, *self.buffers)]
        return "\n".join((f"# seed {self.seed}", *values, self.text))


class Written(nn.Module):
    """The model of a program, in double precision."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        for value in program.parameters:
            self.register_parameter(value.name, nn.Parameter(value.tensor(program.seed)))
        for value in program.buffers:
            self.register_buffer(value.name, value.tensor(program.seed).abs())
        self._code = compile(program.text, "<program>", "exec")

    def forward(self, **inputs: Tensor) -> Tensor:
        known = {**_KNOWN, **dict(self.named_parameters()), **dict(self.named_buffers()), **inputs, "self": self}
        exec(self._code, known)
        loss: Tensor = known["loss"]
        return loss


_KNOWN = {"F": F, "torch": torch, "hd": hd}


class Author:
    """Writes a program, line by line."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self._seed = seed
        length, width = self.one_of((2, 3, 4, 5, 6)), self.one_of((4, 6, 8))
        self.inputs = [Value("x", (length, width)), Value("ids", (length,), below=6)]
        if self.chance(0.3):
            self.inputs.append(Value("image", (self.one_of((2, 4, 6)), 4, 4)))
        self.parameters: list[Value] = []
        self.buffers: list[Value] = []
        self.lines = ["b = x.shape[0]"]
        self._number = 0
        self._runs: list[dict[str, Any]] = []
        self._again()

    # ---- chance -----------------------------------------------------------------------------------------------------

    def one_of(self, values: Sequence[Any]) -> Any:
        return values[self.random.randrange(len(values))]

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def between(self, least: int, most: int) -> int:
        return self.random.randint(least, most)

    # ---- what there is ----------------------------------------------------------------------------------------------

    def tensors(self, suits: Callable[[Tensor], bool], *, stored: bool = False) -> list[str]:
        """Names of those that suit, in the order in which they were made."""
        kept = {value.name for value in (*self.parameters, *self.buffers)}
        return [
            name
            for name, value in self._runs[0].items()
            if isinstance(value, Tensor) and (stored or name not in kept) and suits(value)
        ]

    def pick(self, suits: Callable[[Tensor], bool], *, stored: bool = False) -> str:
        """One of them, a late one more likely. Raises LookupError if there is none."""
        names = self.tensors(suits, stored=stored)
        if not names:
            raise LookupError
        return names[max(self.random.randrange(len(names)) for _ in range(2))]

    def real(self, *ranks: int) -> str:
        """One of real numbers that follows the samples; of these ranks, of none: any but 0."""
        return self.pick(
            lambda t: t.is_floating_point() and t.dim() > 0 and (not ranks or t.dim() in ranks) and _follows(t)
        )

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._runs[0][name].shape)

    def rank(self, name: str) -> int:
        return len(self.shape(name))

    def size(self, name: str, dim: int) -> str:
        """As it is written in a program: the samples are ``b``."""
        first, second = (int(run[name].shape[dim]) for run in self._runs)
        rows = first // BATCHES[0]
        return str(first) if first == second else "b" if rows == 1 else f"{rows} * b"

    def free(self, name: str) -> int:
        """A dim that does not follow the samples. Raises LookupError."""
        dims = self.free_dims(name)
        if not dims:
            raise LookupError
        return int(self.one_of(dims))

    def free_dims(self, name: str) -> list[int]:
        first, second = (run[name].shape for run in self._runs)
        return [dim for dim in range(len(first)) if first[dim] == second[dim]]

    def dim(self, name: str) -> int:
        """The same, counted from the end as often as not."""
        dim = self.free(name)
        return dim if self.chance(0.5) else dim - self.rank(name)

    def parameter(self, *shape: int) -> str:
        """A new one, or one of that shape that there is."""
        found = [value.name for value in self.parameters if value.shape == shape]
        if found and self.chance(0.4):
            return str(self.one_of(found))
        free = [name for name in NAMES if name not in self._runs[0]]
        name = self.one_of(free) if free and self.chance(0.3) else f"w{len(self.parameters)}"
        return self._stored(self.parameters, Value(name, shape))

    def buffer(self, *shape: int, below: int = 0) -> str:
        return self._stored(self.buffers, Value(f"c{len(self.buffers)}", shape, below))

    def _stored(self, kept: list[Value], value: Value) -> str:
        kept.append(value)
        for run in self._runs:
            tensor = value.tensor(self._seed)
            run[value.name] = tensor.requires_grad_() if kept is self.parameters else tensor.abs()
        return value.name

    # ---- writing ----------------------------------------------------------------------------------------------------

    def name(self) -> str:
        self._number += 1
        return f"t{self._number}"

    def write(self, *lines: str) -> bool:
        """Keep these lines, if they are legal and what they make can be used."""
        try:
            for run in self._runs:
                exec("\n".join(lines), run)
            good = all(_usable(*(run[name] for run in self._runs)) for name in self._runs[0])
        except (RuntimeError, LookupError, ValueError, TypeError):
            good = False
        if not good:
            self._again()  # something may have been written into
            return False
        self.lines += lines
        return True

    def _again(self) -> None:
        """Run what there is once more."""
        self._runs = []
        for samples in BATCHES:
            run: dict[str, Any] = {**_KNOWN, **{value.name: value.tensor(self._seed, samples) for value in self.inputs}}
            for value in self.parameters:
                run[value.name] = value.tensor(self._seed).requires_grad_()
            for value in self.buffers:
                run[value.name] = value.tensor(self._seed).abs()
            exec("\n".join(self.lines), run)
            self._runs.append(run)

    def apply(self, expression: str, *, into: int = 1) -> bool:
        """A line that makes one tensor, or several."""
        return self.write(f"{', '.join(self.name() for _ in range(into))} = {expression}")

    def backward(self) -> bool:
        """Whether the loss has gradients."""
        for run in self._runs:
            try:
                run["loss"].backward()
            except RuntimeError:
                return False
            gradients = [run[value.name].grad for value in self.parameters]
            if any(g is not None and not bool(g.isfinite().all()) for g in gradients):
                return False
        return True


def _follows(tensor: Tensor) -> bool:
    return any(size % BATCHES[0] == 0 and size for size in tensor.shape)


def _usable(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor):
        return True
    if not 0 < first.numel() <= LARGEST or first.dim() > 6 or first.dim() != second.dim():
        return False
    pairs = [(a, b) for a, b in zip(first.shape, second.shape, strict=True) if a != b]
    if len(pairs) > 1 or any(a % BATCHES[0] or b != a // BATCHES[0] * BATCHES[1] for a, b in pairs):
        return False
    if any(size % BATCHES[0] == 0 for size in first.shape) and not pairs:
        return False  # a size that could be taken for the batch
    return not first.is_floating_point() or bool(first.isfinite().all() and first.abs().max() < 1e3)


# ---- ops: each writes a line or some, or raises LookupError where there is nothing for it -----------------------------


def linear(a: Author) -> bool:
    x = a.real(2, 3, 4)
    if a.rank(x) - 1 not in a.free_dims(x):
        return False
    weight = a.parameter(a.one_of(WIDTHS), a.shape(x)[-1])
    out = a.shape(weight)[0]
    return a.apply(a.one_of((
        f"F.linear({x}, {weight})",
        f"F.linear({x}, {weight}, {a.parameter(out)})",
        f"F.linear({x}, {weight}, {a.parameter(out)})",
        f"{x} @ {weight}.t()",
        f"{x} @ {weight}.T",
        f"torch.matmul({x}, {weight}.transpose(0, 1))",
        f"torch.addmm({a.parameter(out)}, {x}, {weight}.t(), alpha=0.5)",
        f"torch.mm({x}, {weight}.t())",
        f"{x} @ {weight}[0]",
    )))  # fmt: skip


def of_weights(a: Author) -> bool:
    """A linear layer whose weights are made of others."""
    x = a.real(2, 3, 4)
    if a.rank(x) - 1 not in a.free_dims(x):
        return False
    out, width = a.one_of((2, 3, 4, 6)), a.shape(x)[-1]
    weight, other = a.parameter(out, width), a.parameter(out, width)
    made = a.one_of((
        f"torch.outer({a.parameter(out)}, {a.parameter(width)})",
        f"{weight}.softmax({a.one_of((0, 1, -1))})",
        f"{weight} / {weight}.norm(dim=1, keepdim=True)",
        f"torch.cat([{weight}, {other}.flip(0)])",
        f"torch.cat([{weight}[:, 1:], {other}[:, :1]], 1)",
        f"{weight} * {other}.cumsum(0)",
        f"{weight}.view(-1).view({out}, {width})",
        f"({a.parameter(out, 3)} @ {a.parameter(3, width)})",
        f"{weight} + {a.parameter(width)}",
        f"{weight}[[{', '.join(map(str, range(out)))}]]",
        f"{a.parameter(width, out)}.T",
        f"{weight}.detach() + {other}",
        f"{weight}.unsqueeze(0).expand(2, {out}, {width}).sum(0)",
        f"torch.stack([{weight}, {other}]).mean(0)",
    ))  # fmt: skip
    return a.apply(f"F.linear({x}, {made})")


def tied(a: Author) -> bool:
    """Weights that are read twice, the second time the other way round, as they are or through views of them."""
    x = a.real(2, 3, 4)
    if a.rank(x) - 1 not in a.free_dims(x):
        return False
    width = a.shape(x)[-1]
    weight = a.parameter(a.one_of(WIDTHS), width)
    turned, made = a.name(), a.name()
    return a.write(*a.one_of((
        (f"{made} = F.linear({x}, {weight}).relu() @ {weight}",),
        (f"{turned} = {weight}.t()", f"{made} = torch.tanh({x} @ {turned}) @ {turned}.t()"),
        (f"{turned} = {weight}.t()", f"{made} = {x} + ({x} @ {turned}) @ {weight}"),
        (f"{turned} = {weight} * 0.5", f"{made} = F.linear(F.linear({x}, {turned}), {weight}.mT)"),
        (f"{turned} = {weight}.detach()", f"{made} = F.linear({x}, {weight}) @ {turned}"),
    )))  # fmt: skip


def linear_back(a: Author) -> bool:
    """With the same weights the other way round."""
    x = a.real(2, 3)
    found = [value.name for value in a.parameters if len(value.shape) == 2 and value.shape[0] == a.shape(x)[-1]]
    return bool(found) and a.apply(f"{x} @ {a.one_of(found)}")


def product(a: Author) -> bool:
    x = a.real(3, 4)
    same = a.pick(lambda t: tuple(t.shape) == a.shape(x) and t.is_floating_point())
    last = a.shape(x)[-1]
    choices = [
        f"{x} @ {same}.transpose(-1, -2)",
        f"{x}.mT @ {same}",
        f"torch.matmul({x}, {x}.mT)",
        f"({x} @ {same}.mT) @ {x}",
        f"{x} @ {a.parameter(last)}",
        f"{a.parameter(3, a.shape(x)[-2])} @ {x}",
    ]
    if a.rank(x) == 3:
        choices += [
            f"torch.bmm({x}, {same}.mT)",
            f"torch.baddbmm({a.parameter(1, 1)}, {x}, {same}.mT, beta=0.5)",
            f"torch.einsum('bij,bkj->bik', {x}, {same})",
            f"torch.einsum('bij,bij->bi', {x}, {same})",
            f"torch.einsum('bij,kj->bki', {x}, {a.parameter(4, last)})",
            f"torch.einsum('bij,bij->bji', {x}, {same})",
            f"torch.einsum('bij,bij->b', {x}, {same})",
            f"torch.einsum('bij,j,i->bj', {x}, {a.parameter(last)}, {a.parameter(a.shape(x)[1])})",
        ]
    return a.apply(a.one_of(choices))


def lookup(a: Author) -> bool:
    ids = a.pick(lambda t: t.dtype == torch.int64 and _follows(t) and t.dim() < 4)
    rows = a.one_of((4, 6, 9))
    more = a.one_of(("", ", padding_idx=1"))
    line = f"F.embedding({ids}.abs() % {rows}, {a.parameter(rows, a.one_of((4, 6, 8)))}{more})"
    return a.apply(a.one_of((line, line, f"F.one_hot({ids}.abs() % {rows}, {rows}).double()")))


def positions(a: Author) -> bool:
    x = a.real(3)
    table = a.parameter(a.shape(x)[1] + a.between(0, 2), a.shape(x)[2])
    return a.apply(
        a.one_of((
            f"{x} + {table}[:{a.shape(x)[1]}]",
            f"{x} + F.embedding(torch.arange({a.shape(x)[1]}), {table})",
            f"{x} * {table}.softmax(0)[:{a.shape(x)[1]}].unsqueeze(0)",
        ))
    )  # fmt: skip


def norm(a: Author) -> bool:
    x = a.real(2, 3, 4)
    dims = a.between(1, a.rank(x) - 1)
    last = list(a.shape(x)[-dims:])
    channels = a.shape(x)[1]
    groups = a.one_of([g for g in (1, 2, 3, 4, 6) if channels % g == 0])
    if prod(a.shape(x)[1:]) // groups < 2 or (a.rank(x) > 2 and prod(a.shape(x)[2:]) < 2):
        return False  # PyTorch refuses to norm one element
    sums = f"{a.parameter(channels)}, {a.parameter(channels)}"
    return a.apply(a.one_of((
        f"F.layer_norm({x}, {last})",
        f"F.layer_norm({x}, {last}, {a.parameter(*last)}, {a.parameter(*last)})",
        f"F.rms_norm({x}, {last}, {a.parameter(*last)})",
        f"F.group_norm({x}, {groups}, {sums})",
        f"F.group_norm({x}, {groups})",
        f"F.normalize({x}, dim={a.dim(x)})",
        f"F.batch_norm({x}, {a.buffer(channels)}, {a.buffer(channels)}, {sums}, training=False)",
        f"F.instance_norm({x})",
    )))  # fmt: skip


def softmax(a: Author) -> bool:
    x = a.real(2, 3, 4)
    kind = a.one_of(("softmax", "log_softmax", "softmin"))
    return a.apply(f"F.{kind}({x}, dim={a.dim(x)})")


def convolution(a: Author) -> bool:
    x = a.real(3, 4)
    dims, inner = a.rank(x) - 2, a.shape(x)[1]
    groups = a.one_of([g for g in (1, 1, 2, 3, 4, 6) if inner % g == 0])
    outer = groups * a.one_of((1, 2, 3))
    wide = (a.one_of((1, 2, 3)),) * dims
    weight = a.parameter(outer, inner // groups, *wide)
    bias = a.one_of(("None", a.parameter(outer)))
    more = a.one_of((f"padding={a.between(0, 1)}", "stride=2, padding=1", "padding='same'", "dilation=1"))
    if a.chance(0.2):
        weight = a.parameter(inner, 2, *wide)
        return a.apply(f"F.conv_transpose{dims}d({x}, {weight}, stride=2)")
    return a.apply(f"F.conv{dims}d({x}, {weight}, {bias}, {more}, groups={groups})")


def pooling(a: Author) -> bool:
    x = a.real(3, 4)
    dims = a.rank(x) - 2
    return a.apply(a.one_of((
        f"F.max_pool{dims}d({x}, 2)",
        f"F.avg_pool{dims}d({x}, 2, stride=1)",
        f"F.adaptive_avg_pool{dims}d({x}, 1)",
        f"F.adaptive_max_pool{dims}d({x}, 2)",
        f"F.interpolate({x}, scale_factor=2)",
        f"F.interpolate({x}, scale_factor=2, mode={('linear' if dims == 1 else 'bilinear')!r})",
        f"F.lp_pool{dims}d({x}, 2.0, 2)",
    )))  # fmt: skip


def other_shape(a: Author) -> bool:
    x = a.pick(lambda t: t.dim() > 1 and _follows(t))
    rank, shape = a.rank(x), a.shape(x)
    first = a.between(0, rank - 2)
    sizes = [a.size(x, dim) for dim in range(rank)]
    dim = a.free(x)
    factors = [f for f in (1, 2, 3, 4, 6) if shape[dim] % f == 0]
    factor = a.one_of(factors)
    parts = a.one_of((f"{factor}, {shape[dim] // factor}", f"{factor}, -1", f"-1, {factor}"))
    apart = ", ".join([*sizes[:dim], parts, *sizes[dim + 1 :]])
    turned = a.random.sample(range(rank), rank) if a.chance(0.2) else [0, *a.random.sample(range(1, rank), rank - 1)]
    one, other = a.between(0, rank - 1), a.between(0, rank - 1)
    to_end = a.between(1, rank)
    method = a.one_of(("view", "reshape"))
    return a.apply(a.one_of((
        f"{x}.flatten({first}, {a.between(first, rank - 1)})",
        f"{x}.flatten({first - rank}, -1)",
        f"{x}.unflatten({dim}, ({parts}))",
        f"{x}.{method}({apart})",
        f"{x}.{method}({apart})",
        f"{x}.reshape(-1, {sizes[-1]})",
        f"{x}.reshape({sizes[0]}, -1)",
        f"{x}.reshape({', '.join([*sizes[: to_end - 1], '1', *sizes[to_end - 1 :]])})",
        f"{x}.permute({', '.join(map(str, turned))})",
        f"{x}.permute({', '.join(map(str, turned))})",
        f"{x}.transpose({one}, {other - rank})",
        f"{x}.movedim({one}, {other})",
        f"{x}.swapaxes({one}, {other})",
        f"{x}.swapdims({one - rank}, {other})",
        f"{x}.mT",
        f"{x}.reshape_as({a.pick(lambda t: t.numel() == prod(shape) and t.shape[0] == shape[0])})",
        f"{x}.view_as({a.pick(lambda t: t.numel() == prod(shape) and t.shape[0] == shape[0])})",
    )))  # fmt: skip


def ones(a: Author) -> bool:
    """Dims of 1, and what they become."""
    x = a.pick(lambda t: t.dim() > 0 and _follows(t))
    rank, dim = a.rank(x), a.between(1, a.rank(x))
    single = [d for d, size in enumerate(a.shape(x)) if size == 1]
    choices = [f"{x}.unsqueeze({dim})", f"{x}.unsqueeze({dim - rank - 1})", f"{x}.squeeze({a.between(0, rank - 1)})"]
    if single:
        wide = [str(a.one_of((2, 3, 4))) if d in single else a.one_of(("-1", a.size(x, d))) for d in range(rank)]
        choices += [f"{x}.squeeze()", f"{x}.squeeze({tuple(single)})", *[f"{x}.expand({', '.join(wide)})"] * 3]
        like = a.tensors(lambda t: t.dim() >= rank)
        choices += [f"{x}.expand_as({a.one_of(like)})", f"{x}.broadcast_to(({', '.join(wide)},))"] if like else []
    return a.apply(a.one_of(choices))


def pieces(a: Author) -> bool:
    x = a.pick(lambda t: t.dim() > 1 and _follows(t))
    dim = a.dim(x)
    size = a.shape(x)[dim]
    if size < 2:
        return False
    cut = a.between(1, size - 1)
    half = -(-size // 2)
    how = a.one_of((f"split([{cut}, {size - cut}], {dim})", f"chunk(2, {dim})", f"split({half}, {dim})", "unbind"))
    if how == "unbind":
        return size < 5 and a.apply(f"{x}.unbind({dim})", into=size)
    return a.apply(f"{x}.{how}", into=2)


def joined(a: Author) -> bool:
    x = a.pick(lambda t: t.dim() > 0 and _follows(t))
    others = a.tensors(lambda t: tuple(t.shape) == a.shape(x) and t.dtype == a._runs[0][x].dtype)
    names = ", ".join([x, *(a.one_of(others) for _ in range(a.between(1, 2)))])
    stacked = a.between(1, a.rank(x))
    return a.apply(a.one_of((
        f"torch.cat([{names}], {a.dim(x)})" if a.free_dims(x) else f"torch.stack([{names}], {stacked})",
        f"torch.stack([{names}], {a.one_of((stacked, stacked - a.rank(x) - 1))})",
    )))  # fmt: skip


def cut_out(a: Author) -> bool:
    x = a.pick(lambda t: t.dim() > 1 and _follows(t))
    dim = a.free(x)
    size = a.shape(x)[dim]
    start, stop = sorted(a.between(-size, size) for _ in range(2))
    before = ":, " * dim
    order = a.random.sample(range(size), min(size, a.between(1, 3)))
    index = a.buffer(a.between(1, 3), below=size)
    places = a.pick(lambda t: t.dtype == torch.int64 and t.dim() == a.rank(x))
    return a.apply(a.one_of((
        f"{x}[{before}{start}:{stop}]",
        f"{x}[{before}{a.between(0, size - 1)}:]",
        f"{x}[{before}:{size}]",
        f"{x}[{before}{-size}:]",
        f"{x}[{before}::{a.one_of((1, 2))}]",
        f"{x}[{before}{a.between(-size, size - 1)}]",
        f"{x}.select({dim}, {a.between(0, size - 1)})",
        f"{x}.narrow({dim}, 0, {size})",
        f"{x}.narrow({dim}, 0, {a.between(1, size)})",
        f"{x}.narrow({dim}, {a.between(0, size - 1)}, 1)",
        f"{x}[{before}{order}]",
        f"{x}[{before}{index}]",
        f"{x}.index_select({dim}, {index})",
        f"{x}.gather({dim}, {places} % {size})",
        f"torch.take_along_dim({x}, {places} % {size}, {dim})",
        f"{x}.flip({dim})",
    )))  # fmt: skip


def filled(a: Author) -> bool:
    x = a.real(2, 3, 4)
    last, before = a.between(0, 2), a.between(-1, 1)
    mode = a.one_of(("constant", "constant", "reflect", "circular", "replicate"))
    padding = [last, a.between(0, 1), *([before, a.between(0, 1)] if mode == "constant" and a.rank(x) > 2 else [])]
    value = a.one_of(("", ", value=0.5")) if mode == "constant" else ""
    return a.apply(a.one_of((
        f"F.pad({x}, {padding}, mode={mode!r}{value})",
        f"F.pad({x}, {padding}, mode={mode!r}{value})",
        f"{x}.repeat_interleave({a.between(1, 3)}, dim={a.dim(x)})",
        f"{x}.repeat_interleave({a.between(1, 3)}, dim={a.dim(x)})",
        f"{x}.repeat({', '.join(['1', *(str(a.between(1, 2)) for _ in range(a.rank(x) - 1))])})",
        f"{x}.tril()",
        f"{x}.triu(1)",
    )))  # fmt: skip


def reduced(a: Author) -> bool:
    x = a.real(2, 3, 4, 5)
    dims = a.free_dims(x)
    some = a.random.sample(dims, a.between(1, len(dims))) if dims else []
    if not some:
        return False
    over = [dim if a.chance(0.5) else dim - a.rank(x) for dim in some]
    keep = a.one_of(("", ", keepdim=True"))
    kind = a.one_of(("sum", "sum", "mean", "mean", "amax", "amin", "var", "std", "logsumexp"))
    return a.apply(a.one_of((
        f"{x}.{kind}({over}{keep})",
        f"{x}.{kind}({over[:1]}{keep})",
        f"{x}.{kind}({over}{keep})",
        f"{x}.mean({over}{keep}, dtype=torch.float64)",
        f"{x}.{a.one_of(('max', 'min', 'sort'))}({over[0]}).values",
        f"{x}.max({over[0]}, keepdim=True).values",
        f"{x}.prod({over[0]}{keep})",
        f"torch.linalg.vector_norm({x}, dim={over}{keep})",
        f"{x}.norm(dim={over[0]}{keep})",
        f"{x}.argmax({over[0]}{keep})",
        f"{x}.argmin({over[0]}{keep})",
        f"{x}.kthvalue(1, {over[0]}{keep}).values",
        f"{x}.logsumexp({over}{keep})",
        f"({x} > 0).all({over[0]}{keep})",
        f"({x} > 0).any({over[0]}{keep})",
        f"({x} > 0).sum({over[0]}{keep})",
    )))  # fmt: skip


def arithmetic(a: Author) -> bool:
    x = a.real()
    y = _broadcastable(a, x)
    return a.apply(a.one_of((
        f"{x} + {y}", f"{x} + {y}", f"{x} - {y}", f"{x} * {y}", f"{x} * {y}", f"{y} - {x}",
        f"{x} / ({y} * {y} + 1)",
        f"torch.maximum({x}, {y})",
        f"torch.add({x}, {y}, alpha=2)",
        f"torch.lerp({x}, {y}, 0.3)",
        f"torch.addcmul({x}, {x}, {y}, value=0.5)",
        f"torch.where({x} > {y}, {x}, {y} * 0.5)",
        f"torch.where({x} > 0, {x}, 0.25)",
        f"torch.minimum({x}, {y})",
        f"{x}.type_as({y}) + {y}",
        f"torch.logaddexp({x}, {y})",
        f"{x} * torch.logical_not({x} < {y})",
        f"{x}.masked_fill({x} > {y}, 0.5)",
        f"{x} * ({y} > 0)",
        f"{x} * {x}", f"{x} + {x}", f"{x} * 0.5", f"2.0 - {x}", f"{x} / 3", f"1 / ({x}.abs() + 1)",
        f"{x}.pow(2)", f"-{x}", f"{x} + 1", f"{x} > {y}",
    )))  # fmt: skip


def _broadcastable(a: Author, x: str) -> str:
    """Something that is broadcast to a tensor's shape: one with as many samples, one row, a parameter."""
    shape = a.shape(x)

    def fits(t: Tensor) -> bool:
        return t.dim() <= len(shape) and all(
            one in (1, other) for one, other in zip(reversed(t.shape), reversed(shape), strict=False)
        )

    found = a.tensors(lambda t: t.is_floating_point() and fits(t), stored=True)
    free = a.free_dims(x)
    own = [size if dim in free and a.chance(0.7) else 1 for dim, size in enumerate(shape)]
    first = a.between(0, len(own))
    new = a.parameter(*own[first:])
    return new if a.chance(0.3) or not found else str(a.one_of(found))


def pointwise(a: Author) -> bool:
    x = a.real()
    return a.apply(a.one_of((
        f"F.gelu({x})", f"F.silu({x})", f"F.relu({x})", f"{x}.tanh()", f"{x}.sigmoid()", f"F.softplus({x})", f"F.elu({x})",
        f"{x}.exp().clamp(max=5.0)", f"{x}.abs().sqrt()", f"{x}.cos()", f"{x}.clone()", f"{x}.contiguous()",
        f"F.leaky_relu({x})", f"{x}.abs().log1p()", f"{x}.erf()", f"F.hardswish({x})", f"F.mish({x})", f"torch.rsqrt({x} * {x} + 1)",
        f"{x}.detach()", f"{x}.square()", f"{x}.to(torch.float64)",
        f"F.prelu({x}, {a.parameter(1)})",
    )))  # fmt: skip


def random_numbers(a: Author) -> bool:
    x = a.pick(lambda t: t.is_floating_point() and t.dim() > 1 and _follows(t) and t.shape[0] % BATCHES[0] == 0)
    return a.apply(a.one_of((
        f"F.dropout({x}, 0.4)",
        f"F.dropout({x}, 0.4)",
        f"F.dropout1d({x}, 0.4)",
        f"F.alpha_dropout({x}, 0.4, training=True)",
        f"{x} + 0.1 * torch.rand_like({x})",
        f"{x} + 0.1 * torch.randn_like({x})",
    )))  # fmt: skip


def in_place(a: Author) -> bool:
    x = a.real()
    if a.rank(x) < 2:
        return False
    y, name = _broadcastable(a, x), a.name()
    made = a.one_of(
        (f"{name} = {x} * 1.5", f"{name} = {x}.clone()", f"{name} = F.linear({x}, {a.parameter(4, a.shape(x)[-1])})")
    )
    change = a.one_of((
        f"{name}.relu_()", f"{name}.add_({y})", f"{name}.mul_({y})", f"{name}.sub_({x})", f"{name}.div_(2)", f"{name} += {y}",
        f"F.relu({name}, inplace=True)", f"F.dropout({name}, 0.3, inplace=True)", f"{name}.clamp_(min=-1)",
        f"{name}[:, 0] = 0.5", f"{name}[:, :1] += 1", f"{name}[..., 0] = 0", f"{name}[..., -1].mul_(2)", f"{name}.cumsum_(-1)",
        f"{name}.masked_fill_({name}.detach() > 0.5, 0.5)", f"{name}.view(-1).mul_(0.5)", f"{name}.transpose(0, -1).mul_(0.5)",
        f"{name}[:, 0] = {name}[:, -1].clone()",
    ))  # fmt: skip
    return a.write(made, change)


def numbers(a: Author) -> bool:
    """Whole numbers and truth values."""
    ids = a.pick(lambda t: t.dtype == torch.int64 and t.dim() > 0 and _follows(t))
    x = a.real()
    return a.apply(a.one_of((
        f"{ids} * 2 + 1", f"{ids} % 3", f"{ids}.double()", f"({ids} > 1).double()", f"{ids} // 2", f"{ids}.cumsum({a.dim(ids)})",
        f"torch.zeros_like({x}) + {x}", f"{x}.new_zeros({x}.shape) + {x}", f"torch.ones_like({x}).cumsum(-1) * {x}",
        f"{x} * torch.arange({a.shape(x)[-1]})", f"{ids}.unsqueeze(-1).expand(*{ids}.shape, 3)",
        f"{x}.round().long().clamp(-3, 3)", f"{x}.sign()", f"{ids}.argsort({a.dim(ids)})",
    )))  # fmt: skip


def attention(a: Author) -> bool:
    """Queries, keys and values of one tensor, in heads, keys and values perhaps in fewer."""
    x = a.real(3)
    length, width = a.shape(x)[1:]
    size, (heads, few) = a.one_of((2, 3, 4)), a.one_of(((1, 1), (2, 2), (2, 1), (4, 2), (4, 4), (6, 3)))
    if a.size(x, 0) != "b" or length > 8:
        return False
    names = [a.name() for _ in range(5)]
    lines = []
    for name, count in zip(names, (heads, few, few), strict=False):
        made = f"F.linear({x}, {a.parameter(count * size, width)}{a.one_of(('', ', ' + a.parameter(count * size)))})"
        lines.append(f"{name} = {made}.view(b, {length}, {count}, {size}).transpose(1, 2)")
    key, value = names[1:3]
    if few < heads and a.chance(0.4):
        key, value = (f"{name}.repeat_interleave({heads // few}, dim=1)" for name in (key, value))
        few = heads
    more = [f"enable_gqa={few < heads}"]
    mask = a.between(0, 5)
    if mask == 0:
        more.append("is_causal=True")
    elif mask == 1:
        more.append(f"attn_mask=torch.ones({length}, {length}, dtype=torch.bool).tril()")
    elif mask == 2:
        more.append(f"attn_mask={a.parameter(heads, length, length)}")
    elif mask == 3:
        more.append("attn_mask=((ids > 0) | (torch.arange(ids.shape[1]) == 0))[:, None, None, :]")
    if a.chance(0.3):
        more.append("dropout_p=0.3")
    if a.chance(0.3):
        more.append("scale=0.5")
    call = f"F.scaled_dot_product_attention({names[0]}, {key}, {value}, {', '.join(more)})"
    lines.append(f"{names[3]} = {call}")
    lines.append(f"{names[4]} = {names[3]}.transpose(1, 2).reshape(b, {length}, -1)")
    return a.write(*lines)


def by_hand(a: Author) -> bool:
    """Blocks as people write them."""
    x = a.real(3)
    width = a.shape(x)[-1]
    name = a.name()
    up, down, gate = a.parameter(2 * width, width), a.parameter(width, 2 * width), a.parameter(2 * width, width)
    return a.write(a.one_of((
        f"{name} = {x} + F.linear(F.gelu(F.linear({x}, {up}, {a.parameter(2 * width)})), {down}, {a.parameter(width)})",
        f"{name} = F.linear(F.silu(F.linear({x}, {gate})) * F.linear({x}, {up}), {down})",
        f"{name} = {x} * F.rms_norm({x}, [{width}]).sigmoid()",
        f"{name} = ({x} @ {x}.mT).softmax(-1) @ {x}",
        f"{name} = torch.cat([{x}[..., {width // 2}:], -{x}[..., :{width // 2}]], -1) * {x}.cos() + {x}",
        f"{name} = torch.no_grad()(lambda: {x} * 2)() + {x}",
    )))  # fmt: skip


def without_a_rule(a: Author) -> bool:
    x = a.real(2, 3, 4)
    dim = a.dim(x)
    return a.apply(a.one_of((
        f"{x}.cumsum({dim})", f"{x}.sort({dim}).values", f"{x}.roll(1, {dim})", f"{x}.diff(dim={dim})", f"{x}.topk(1, {dim}).values",
        f"{x}.unfold({dim}, 1, 1)", f"{x}.logcumsumexp({dim})", f"{x}.cummax({dim}).values", f"F.glu({x}, {dim})",
        f"{x}.unfold({dim}, 2, 1)", f"F.cosine_similarity({x}, {x}.flip({dim}), {dim})", f"{x}.renorm(2, 0, 1.0)",
        f"torch.cdist({x}, {x} * 0.5)", f"{x}.diagonal(dim1=-2, dim2=-1)", f"{x}.median({dim}).values", f"{x}.rot90(1, (-2, -1))",
        f"{x}.index_add({a.free(x)}, torch.tensor([0]), {x}.narrow({a.free(x)}, 0, 1))",
    )))  # fmt: skip


OPS: tuple[Callable[[Author], bool], ...] = (
    *[linear, arithmetic, other_shape] * 3,
    *[product, norm, ones, pieces, cut_out, reduced, pointwise, in_place, attention, by_hand, of_weights, tied] * 2,
    linear_back, lookup, positions, softmax, convolution, pooling, joined, filled, random_numbers, numbers, without_a_rule,
)  # fmt: skip


# ---- losses -----------------------------------------------------------------------------------------------------------


def loss(a: Author, hidden: str) -> bool:
    """Of a tensor that begins with the samples."""
    return a.one_of((of_classes, of_classes, of_classes, of_targets))(a, hidden)  # type: ignore[no-any-return]


def of_classes(a: Author, hidden: str) -> bool:
    classes, width = a.one_of(CLASSES), a.shape(hidden)[-1]
    a.lines.append(f"logits = F.linear({hidden}, {a.parameter(classes, width)})")
    shape = a.shape(hidden)[1:-1]
    a.inputs.append(Value("labels", shape, below=classes, ignored=a.chance(0.5)))
    given = a.one_of((("logits.flatten(0, -2)", "labels.flatten()"), ("logits.movedim(-1, 1)", "labels")))
    options = []
    if a.chance(0.3):
        options.append(f"weight={a.buffer(classes)}")
    if a.chance(0.3):
        options.append("label_smoothing=0.1")
    called = ", ".join([*given, *options])
    a.lines.append(a.one_of((
        f"loss = F.cross_entropy({called})",
        f"loss = F.cross_entropy({called})",
        f"loss = F.cross_entropy({called}, reduction='sum')",
        f"loss = F.cross_entropy({called}, reduction='none').mean()",
        f"loss = F.nll_loss({given[0]}.log_softmax(1), {given[1]})",
        f"loss = 0.5 * F.cross_entropy({called})",
    )))  # fmt: skip
    return _ends(a)


def of_targets(a: Author, hidden: str) -> bool:
    a.inputs.append(Value("targets", a.shape(hidden)[1:]))
    kind = a.one_of(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"))
    targets = "targets.sigmoid()" if kind.startswith("binary") else "targets"
    more = ", pos_weight=" + a.buffer(a.shape(hidden)[-1]) if kind.startswith("binary") and a.chance(0.4) else ""
    called = f"{hidden}, {targets}{more}"
    a.lines.append(a.one_of((
        f"loss = F.{kind}({called})",
        f"loss = F.{kind}({called}, reduction='sum')",
        f"loss = F.{kind}({called}, reduction='none').mean()",
        f"loss = ({hidden} - targets).pow(2).mean()",
        f"loss = ({hidden} - targets).abs().sum()",
        f"loss = ({hidden} - targets).square().flatten(1).mean(1).mean()",
    )))  # fmt: skip
    return _ends(a)


def _ends(a: Author) -> bool:
    try:
        a._again()
    except (RuntimeError, LookupError, ValueError, TypeError):
        return False
    return bool(a._runs[0]["loss"].isfinite()) and a.backward()


def _gathered(a: Author) -> str:
    """All that nothing reads, added to the last tensor that begins with the samples, so that each line has a part in the loss."""
    hidden = a.pick(
        lambda t: t.is_floating_point() and t.dim() > 1 and t.shape[0] == BATCHES[0] and t.grad_fn is not None
    )
    loose = [n for n in a.tensors(lambda t: t.is_floating_point() and t.grad_fn is not None) if n != hidden]
    written = Counter(re.findall(r"\w+", "\n".join(a.lines)))
    loose = [name for name in loose if written[name] == 1]
    for name in loose[-6:]:
        dims = a.free_dims(name)
        at = [dim for dim in range(a.rank(name)) if dim not in dims]
        if not at:
            term = f"{name}.mean()"
        elif a.size(name, at[0]) != "b":
            continue
        else:
            rows = f"{name}.sum({dims})" if dims else name
            term = f"{rows}.view(b{', 1' * (a.rank(hidden) - 1)})"
        made = a.name()
        if a.write(f"{made} = {hidden} + 0.1 * {term}"):
            hidden = made
    return hidden


@functools.cache
def captured_program(written: Program) -> Captured:
    """Captured once a process, and by processes that are forked from it not at all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ops that chance has chosen may warn
        return trace(Written(written).train(), written.batch(4))


def program(seed: int) -> Program | None:
    """What chance writes; None if it has led nowhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch gives some once a process
        return _program(seed)


def _program(seed: int) -> Program | None:
    a = Author(seed)
    wanted = a.between(4, 22)
    for _ in range(4 * wanted):
        try:
            wanted -= bool(a.one_of(OPS)(a))
        except LookupError:
            continue
        if not wanted:
            break
    try:
        hidden = _gathered(a)
    except LookupError:
        return None
    if not loss(a, hidden):
        return None
    used = set(re.findall(r"\w+", "\n".join(a.lines)))
    return Program(
        seed=seed,
        inputs=tuple(value for value in a.inputs if value.name in used),
        parameters=tuple(value for value in a.parameters if value.name in used),
        buffers=tuple(value for value in a.buffers if value.name in used),
        lines=tuple(a.lines),
        marked=_marks(a),
    )


def _marks(a: Author) -> tuple[tuple[int, int, str], ...]:
    """Up to two runs of lines, apart from each other."""
    borders = sorted(a.between(1, len(a.lines)) for _ in range(4))
    found = [(borders[0], borders[1], "one"), (borders[2], borders[3], "other")]
    return tuple((first, stop, name) for first, stop, name in found if first < stop)
