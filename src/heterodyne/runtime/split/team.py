"""The devices of a stage that lies on them in parts, as the graph of one of them calls them.

The graph names tensors by number (slots and steps); here the numbers become sizes, for each number of samples that a micro-batch has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from heterodyne.experts import ACTIVATIONS, Run, swiglu_experts
from heterodyne.graph.ir import Ref
from heterodyne.graph.sharding import Layout, Sharding
from heterodyne.graph.sharding.numbered import Numbered
from heterodyne.runtime.exact.dropout import in_part, turn_to
from heterodyne.runtime.split import experts, vocabulary
from heterodyne.runtime.split.conversions import Redistribution, converted, ways_between
from heterodyne.runtime.split.group import Group
from heterodyne.runtime.split.vocabulary import weights_of_rows

__all__ = ["Members", "SplitTeam"]


_NO_SIZES: tuple[int, ...] = ()
_REDUCTIONS = ("none", "mean", "sum")


class SplitTeam:
    """Args:
    group: of the devices.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    @property
    def position(self) -> int:
        return self._group.position

    def members(self, sharding: Sharding, numbered: Numbered) -> Callable[[int, range | None], Members]:
        """What a graph with these numbers calls, for a number of samples; ``some``: which of the micro-batch they are."""
        made: dict[tuple[int, range | None], Members] = {}

        def at(samples: int, some: range | None) -> Members:
            if (samples, some) not in made:
                made[samples, some] = self._at(sharding, numbered, samples, some)
            return made[samples, some]

        return at

    def _at(self, sharding: Sharding, numbered: Numbered, samples: int, some: range | None) -> Members:
        def sizes(ref: Ref, layout: Layout) -> tuple[int, ...]:
            return sharding.sizes(ref, layout, samples) if layout.kind == "cut" else _NO_SIZES

        return Members(
            group=self._group,
            slots=tuple((layout.dim, sizes(ref, layout)) for ref, layout in numbered.slots),
            steps=tuple((have, want, sizes(ref, have), sizes(ref, want)) for ref, have, want in numbered.steps),
            functions=tuple(numbered.functions),
            some=some,
        )


@dataclass(frozen=True, kw_only=True)
class Members:
    """What the graph of a member calls while it runs on a micro-batch. All calls that exchange something are collective.

    Args:
        slots: for each the dim that is cut, and the sizes of the members' slices.
        steps: for each how a tensor lies and how it is wanted, with the sizes of the slices.
        functions: what the graph calls by number.
        some: the samples, where they are not all of the micro-batch.
    """

    group: Group
    slots: tuple[tuple[int, tuple[int, ...]], ...]
    steps: tuple[tuple[Layout, Layout, tuple[int, ...], tuple[int, ...]], ...] = field(repr=False)
    functions: tuple[Callable[..., Any], ...] = ()
    some: range | None = None

    def convert(self, tensor: Tensor, step: int) -> Tensor:
        """Lay a tensor out otherwise."""
        have, want, have_sizes, want_sizes = self.steps[step]
        return converted(self.group, tensor, have, want, have_sizes, want_sizes)

    def begin(self, tensor: Tensor, step: int) -> tuple[Redistribution, Tensor]:
        """The same in two calls: what is exchanged is on its way meanwhile. The tensor must stay as it is until `end`."""
        travel = Redistribution(*ways_between(self.group, *self.steps[step]))
        return travel, travel.begin(tensor)

    def end(self, begun: tuple[Redistribution, Tensor]) -> Tensor:
        travel, on_its_way = begun
        return travel.end(on_its_way)

    def take_turn(self) -> None:
        """What is drawn from here on is for ``some`` of the samples."""
        turn_to(self.some)

    def length(self, slot: int) -> int:
        """Of this member's slice."""
        return self.slots[slot][1][self.group.position]

    def portion(self, slot: int, count: int) -> int:
        """Of ``count`` equal parts of the dim that is cut, those of this member."""
        return count * self.length(slot) // sum(self.slots[slot][1])

    def drawn(self, slot: int, function: int, *arguments: Any, **options: Any) -> Tensor:
        """Call a function that draws random numbers for a slice of a tensor: those that the whole tensor would have there."""
        dim, sizes = self.slots[slot]
        with in_part(dim, self.group.bounds(sizes)[0], sum(sizes)):
            result: Tensor = self.functions[function](*arguments, **options)
            return result

    def part_of_mean(
        self, slot: int, tensor: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """This member's part of a mean: its sum, over the number of all elements."""
        cut_dim, sizes = self.slots[slot]
        dims = range(tensor.dim()) if not dim and dim != 0 else [dim] if isinstance(dim, int) else dim
        count = 1
        for place in {place % tensor.dim() for place in dims}:
            count *= sum(sizes) if place == cut_dim else tensor.shape[place]
        made = tensor.dtype if dtype is None else dtype
        total = torch.sum(tensor, list(dims), keepdim=keepdim, dtype=torch.promote_types(made, torch.float32))
        return (total / count).to(made)

    def part_of_mean_loss(self, slot: int, function: int, *arguments: Any, **options: Any) -> Tensor:
        """The same of a loss that takes the mean over everything: of the members' means, each by its part of the elements."""
        cut_dim, sizes = self.slots[slot]
        if not arguments[0].numel():
            empty: Tensor = arguments[0].sum() + arguments[1].sum()
            return empty
        mean: Tensor = self.functions[function](*arguments, **options)
        return mean * (int(arguments[0].shape[cut_dim]) / sum(sizes))

    def embedding(self, slot: int, ids: Tensor, weight: Tensor, **options: Any) -> Tensor:
        """Rows of a table that is cut along its rows: this member's, among zeros."""
        padding = options.pop("padding_idx", None)
        return vocabulary.embedding(
            self.group, ids, weight, self.slots[slot][1], padding_idx=-1 if padding is None else padding, **options
        )

    def softmax(self, slot: int, tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """Along the dim that is cut. It is contiguous, as PyTorch's is: there are kernels that rely on that."""
        tensor = tensor if dtype is None else tensor.to(dtype)
        return vocabulary.softmax(self.group, tensor.contiguous(), dim, self.slots[slot][1])

    def log_softmax(self, slot: int, tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """Along the dim that is cut; contiguous too."""
        tensor = tensor if dtype is None else tensor.to(dtype)
        return vocabulary.log_softmax(self.group, tensor.contiguous(), dim, self.slots[slot][1])

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
        dim, sizes = self.slots[slot]
        if dim == 1:
            how: Any = _REDUCTIONS[reduction]
            return vocabulary.cross_entropy(
                self.group, logits, labels, sizes, weight, how, ignore_index, label_smoothing
            )
        total = F.cross_entropy(
            logits, labels, weight, reduction="sum", ignore_index=ignore_index, label_smoothing=label_smoothing
        )
        if _REDUCTIONS[reduction] == "sum":
            return total
        # Half precision cannot count.
        own = weights_of_rows(labels, weight, ignore_index, torch.promote_types(total.dtype, torch.float32)).sum()
        return (total / self.group.all_reduce(own)).to(total.dtype)

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
        dim, sizes = self.slots[slot]
        first, stop = self.group.bounds(sizes)
        if is_causal:
            if not dropout_p:  # dropped out are weights of all keys
                key, value = key[..., :stop, :], value[..., :stop, :]
            if first or dropout_p:
                attn_mask, is_causal = _seen(query, first, stop, key.shape[-2], enable_gqa), False
        with in_part(dim, first, sum(sizes)):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

    def experts_here(self, slot: int, tokens: Tensor, indices: Tensor, weights: Tensor, *own: Any) -> Tensor:
        """What this member's experts add to a mixture of all tokens, which each member has. ``own``: matrices and activation."""
        run = _run(*own)
        return experts.experts_here(self.group, tokens, indices, weights, sizes=self.slots[slot][1], run=run)

    def experts_between(self, slot: int, tokens: Tensor, indices: Tensor, weights: Tensor, *own: Any) -> Tensor:
        """The mixture of this member's tokens, of which a row of each choice goes to the member that has the expert."""
        run = _run(*own)
        return experts.experts_between(self.group, tokens, indices, weights, sizes=self.slots[slot][1], run=run)

    def begin_experts(
        self, slot: int, tokens: Tensor, indices: Tensor, weights: Tensor, *own: Any
    ) -> experts.ExpertDispatch:
        """`experts_between` in three calls: what travels is on its way meanwhile."""
        run = _run(*own)
        return experts.ExpertDispatch(self.group, tokens, indices, weights, sizes=self.slots[slot][1], run=run)

    def run_experts(self, dispatched: experts.ExpertDispatch) -> experts.ExpertDispatch:
        dispatched.compute()
        return dispatched

    def end_experts(self, dispatched: experts.ExpertDispatch) -> Tensor:
        return dispatched.combine()


def _seen(query: Tensor, first: int, stop: int, keys: int, grouped: bool) -> Tensor:
    """The causal mask of the queries ``[first, stop)`` of a sequence. Where kernels know one without memory, that one."""
    if query.is_cuda and keys == stop and not grouped:
        return causal_lower_right(stop - first, stop)
    places = torch.arange(first, stop, device=query.device).unsqueeze(1)
    return places >= torch.arange(keys, device=query.device)


def _run(gate_up: Tensor, down: Tensor, activation: str) -> Run:
    return partial(swiglu_experts, gate_up=gate_up, down=down, activation=ACTIVATIONS[activation])
