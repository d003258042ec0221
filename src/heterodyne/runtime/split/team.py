"""The devices of a sharded stage, as the graph of one of them calls them.

The graph names tensors by number (slots and steps); here the numbers become sizes, for each micro-batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from heterodyne.experts import ACTIVATIONS, Run, swiglu_experts
from heterodyne.graph.ir import Ref
from heterodyne.graph.sharding import Layout, Sharding
from heterodyne.graph.sharding.dealing import dealt
from heterodyne.graph.sharding.nested import Turn
from heterodyne.graph.sharding.numbered import Numbered
from heterodyne.runtime.exact.dropout import in_part, turn_to
from heterodyne.runtime.split import experts, vocabulary
from heterodyne.runtime.split.conversions import Redistribution, converted, ways_between
from heterodyne.runtime.split.group import Group
from heterodyne.runtime.split.vocabulary import weights_of_rows

__all__ = ["Members", "SplitTeam"]


_Step: TypeAlias = tuple[Group, Layout, Layout, tuple[int, ...], tuple[int, ...]]
_NO_SIZES: tuple[int, ...] = ()
_REDUCTIONS = ("none", "mean", "sum")


class Cut(NamedTuple):
    """A dim of a tensor that the members of a group hold in shards of these sizes."""

    group: Group
    dim: int
    sizes: tuple[int, ...]

    @property
    def own(self) -> int:
        """The size of this member's shard."""
        return self.sizes[self.group.position]

    @property
    def bounds(self) -> tuple[int, int]:
        """Where it begins and ends."""
        return self.group.bounds(self.sizes)

    def drawn(self) -> AbstractContextManager[None]:
        """What is drawn inside is for this member's slice."""
        return in_part(self.dim, self.bounds[0], sum(self.sizes))


class SplitTeam:
    """Args:
    groups: along each mesh axis, outermost first, the devices with this one's coordinates along the other axes.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = tuple(groups)

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(group.position for group in self._groups)

    def members(self, sharding: Sharding, numbered: Numbered) -> Callable[[int, range | None], Members]:
        """What a graph with these numbers calls, for a number of samples; ``some``: which of the micro-batch they are."""
        made: dict[tuple[int, range | None], Members] = {}

        def at(samples: int, some: range | None) -> Members:
            if (samples, some) not in made:
                made[samples, some] = self._at(sharding, numbered, samples, some)
            return made[samples, some]

        return at

    def _at(self, sharding: Sharding, numbered: Numbered, samples: int, some: range | None) -> Members:
        axes = sharding.axes
        left = [samples]  # at the border of a stage, by the axes outside of each
        for axis, group in zip(axes, self._groups, strict=True):
            left.append(dealt(left[-1], axis.shares[0])[group.position])

        def sizes(axis: int, ref: Ref, layout: Layout, *, nested: bool = False) -> tuple[int, ...]:
            if layout.kind != "shard":
                return _NO_SIZES
            return axes[axis].sizes(ref, layout, left[axis] if nested else samples)

        def step(ref: Ref, turn: Turn) -> _Step:
            have = sizes(turn.axis, ref, turn.have, nested=turn.had_nested)
            return (
                self._groups[turn.axis],
                turn.have,
                turn.want,
                have,
                sizes(turn.axis, ref, turn.want, nested=turn.nested),
            )

        return Members(
            slots=tuple(
                Cut(self._groups[axis], layout.dim, sizes(axis, ref, layout)) for axis, ref, layout in numbered.slots
            ),
            steps=tuple(step(ref, turn) for ref, turn in numbered.steps),
            functions=tuple(numbered.functions),
            some=some,
        )


@dataclass(frozen=True, kw_only=True)
class Members:
    """What the graph of a member calls while it runs on a micro-batch. Calls that communicate are collective.

    Args:
        slots: what is sharded.
        steps: for each redistribution its source and target layout, with the sizes of the shards.
        functions: what the graph calls by number.
        some: the samples, where they are not all of the micro-batch.
    """

    slots: tuple[Cut, ...]
    steps: tuple[_Step, ...] = field(repr=False)
    functions: tuple[Callable[..., Any], ...] = ()
    some: range | None = None

    def convert(self, tensor: Tensor, step: int) -> Tensor:
        """Redistribute a tensor."""
        return converted(self.steps[step][0], tensor, *self.steps[step][1:])

    def begin(self, tensor: Tensor, step: int) -> tuple[Redistribution, Tensor]:
        """Start an asynchronous redistribution. The tensor must not change until `end`."""
        travel = Redistribution(*ways_between(*self.steps[step]))
        return travel, travel.begin(tensor)

    def end(self, begun: tuple[Redistribution, Tensor]) -> Tensor:
        travel, on_its_way = begun
        return travel.end(on_its_way)

    def take_turn(self) -> None:
        """What is drawn from here on is for ``some`` of the samples."""
        turn_to(self.some)

    def length(self, slot: int) -> int:
        """Of this member's slice."""
        return self.slots[slot].own

    def portion(self, slot: int, count: int) -> int:
        """Of ``count`` equal parts of the sharded dim, those of this member."""
        return count * self.length(slot) // sum(self.slots[slot].sizes)

    def drawn(self, slot: int, function: int, *arguments: Any, **options: Any) -> Tensor:
        """Call a function that draws random numbers for a shard: the numbers that the whole tensor would have there."""
        with self.slots[slot].drawn():
            result: Tensor = self.functions[function](*arguments, **options)
            return result

    def drawn_within(self, slot: int, method: str, *arguments: Any, **options: Any) -> Tensor:
        """The same of another method of these, for a slice along another axis."""
        with self.slots[slot].drawn():
            result: Tensor = getattr(self, method)(*arguments, **options)
            return result

    def part_of_mean(
        self, slot: int, tensor: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """This member's part of a mean: its sum, over the number of all elements."""
        _, cut_dim, sizes = self.slots[slot]
        dims = range(tensor.dim()) if not dim and dim != 0 else [dim] if isinstance(dim, int) else dim
        count = 1
        for place in {place % tensor.dim() for place in dims}:
            count *= sum(sizes) if place == cut_dim else tensor.shape[place]
        made = tensor.dtype if dtype is None else dtype
        total = torch.sum(tensor, list(dims), keepdim=keepdim, dtype=torch.promote_types(made, torch.float32))
        return (total / count).to(made)

    def part_of_mean_loss(self, slot: int, function: int, *arguments: Any, **options: Any) -> Tensor:
        """The same of a loss that takes the mean over everything: of the members' means, each by its part of the elements."""
        _, cut_dim, sizes = self.slots[slot]
        if not arguments[0].numel():
            empty: Tensor = arguments[0].sum() + arguments[1].sum()
            return empty
        mean: Tensor = self.functions[function](*arguments, **options)
        return mean * (int(arguments[0].shape[cut_dim]) / sum(sizes))

    def embedding(self, slot: int, ids: Tensor, weight: Tensor, **options: Any) -> Tensor:
        """Rows of a row-sharded table: this member's rows, zeros elsewhere (a partial sum)."""
        cut, padding = self.slots[slot], options.pop("padding_idx", None)
        return vocabulary.embedding(
            cut.group, ids, weight, cut.sizes, padding_idx=-1 if padding is None else padding, **options
        )

    def softmax(self, slot: int, tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """Along the sharded dim. It is contiguous, as PyTorch's is: some kernels rely on that."""
        tensor = tensor if dtype is None else tensor.to(dtype)
        return vocabulary.softmax(self.slots[slot].group, tensor.contiguous(), dim, self.slots[slot].sizes)

    def log_softmax(self, slot: int, tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """Along the dim that is cut; contiguous too."""
        tensor = tensor if dtype is None else tensor.to(dtype)
        return vocabulary.log_softmax(self.slots[slot].group, tensor.contiguous(), dim, self.slots[slot].sizes)

    def cross_entropy(
        self,
        slot: int,
        logits: Tensor,
        labels: Tensor,
        weight: Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Of logits [N, C, ...] that are cut. Along the classes: the same on each member. Else this member's part of a sum, or of a mean
        over what all members count.
        """
        group, dim, sizes = self.slots[slot]
        if dim == 1:
            how: Any = _REDUCTIONS[reduction]
            return vocabulary.cross_entropy(group, logits, labels, sizes, weight, how, ignore_index, label_smoothing)
        total = F.cross_entropy(
            logits, labels, weight, reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        if _REDUCTIONS[reduction] == "sum":
            return total
        # Half precision cannot count.
        own = weights_of_rows(labels, weight, ignore_index, torch.promote_types(total.dtype, torch.float32)).sum()
        return (total / group.all_reduce(own)).to(total.dtype)

    def attention(
        self,
        slot: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Of a slice of the queries with all keys; where it is causal the slice sees the keys up to its own places."""
        first, stop = self.slots[slot].bounds
        if is_causal:
            if not dropout_p:  # dropped out are weights of all keys
                key, value = key[..., :stop, :], value[..., :stop, :]
            if first or dropout_p:
                attn_mask, is_causal = _seen(query, first, stop, key.shape[-2], enable_gqa), False
        with self.slots[slot].drawn():
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

    def experts_here(self, slot: int, tokens: Tensor, indices: Tensor, weights: Tensor, *own: Any) -> Tensor:
        """What this member's experts add to a mixture of all tokens, which each member has. ``own``: matrices and activation."""
        cut, run = self.slots[slot], _run(*own)
        return experts.experts_here(cut.group, tokens, indices, weights, sizes=cut.sizes, run=run)

    def experts_between(self, slot: int, tokens: Tensor, indices: Tensor, weights: Tensor, *own: Any) -> Tensor:
        """The mixture of this member's tokens: each row is dispatched to the member that holds its expert."""
        cut, run = self.slots[slot], _run(*own)
        return experts.experts_between(cut.group, tokens, indices, weights, sizes=cut.sizes, run=run)

    def begin_experts(self, slot: int, tokens: Tensor, indices: Tensor, weights: Tensor, *own: Any) -> experts.Dispatch:
        """`experts_between` in three calls: what travels is on its way meanwhile."""
        cut, run = self.slots[slot], _run(*own)
        return experts.dispatch(cut.group, tokens, indices, weights, sizes=cut.sizes, run=run)

    def run_experts(self, dispatched: experts.Dispatch) -> experts.Dispatch:
        dispatched.compute()
        return dispatched

    def end_experts(self, dispatched: experts.Dispatch) -> Tensor:
        return dispatched.combine()


def _seen(query: Tensor, first: int, stop: int, keys: int, grouped: bool) -> Tensor:
    """The causal mask of the queries ``[first, stop)`` of a sequence. Where kernels know one without memory, that one."""
    if query.is_cuda and keys == stop and not grouped:
        return causal_lower_right(stop - first, stop)
    places = torch.arange(first, stop, device=query.device).unsqueeze(1)
    return places >= torch.arange(keys, device=query.device)


def _run(gate_up: Tensor, down: Tensor, activation: str) -> Run:
    return partial(swiglu_experts, gate_up=gate_up, down=down, activation=ACTIVATIONS[activation])
