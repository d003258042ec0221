"""Mixtures of experts on one device, and the operator that stands for one in a captured graph.

A mixture gives a token x the output  y = sum_c w_c f_{e_c}(x)  of the k experts e_c that it has chosen, with the weights of the
router (Shazeer et al., "Outrageously Large Neural Networks", 2017). Each choice is a row. The rows are put in order of expert, each expert
that has any runs on its own, and what it makes of them goes back to their tokens. No place is padded, so what is computed is what was
chosen, and no more. Between several devices rows travel there and back in between (`runtime.split.experts`).

``heterodyne::experts`` is one op for all of that. A graph that has it says what its parts do not: that each token is treated by
itself, and what each expert holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

__all__ = ["ACTIVATIONS", "Route", "Run", "by_expert", "mixture", "permute", "swiglu_experts", "unpermute"]

Run = Callable[[Tensor, Sequence[int]], Tensor]
"""What experts do: rows [M, H], in order of expert, and how many there are for each; gives [M, H]."""

ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
"""Those that experts of the operator may have."""


def mixture(tokens: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """The mixture [N, H], in the dtype of the tokens.

    Args:
        tokens: [N, H].
        indices, weights: [N, k]: the experts that each token has chosen, and how much each counts.
        gate_up, down, activation: of all experts, see `swiglu_experts`; one of `ACTIVATIONS`.
    """
    if isinstance(indices, FakeTensor) or indices.is_meta:
        # Where there are no values, all choose the first expert: what is kept for the backward comes to the same.
        rows = indices.reshape(-1).argsort(stable=True)
        counts = (rows.shape[0], *(0 for _ in range(gate_up.shape[0] - 1)))
    else:
        rows, counted = by_expert(indices, gate_up.shape[0])
        counts = tuple(counted.tolist())
    route = Route(choices=indices.shape[1], rows=rows, counts=counts)
    rows_picked = permute(tokens, route)
    made = swiglu_experts(rows_picked, counts, gate_up, down, ACTIVATIONS[activation])
    return unpermute(made, weights, rows_picked, route)


# An operator has to be known to PyTorch under its name before a graph can call it.
torch.library.define(
    "heterodyne::experts",
    "(Tensor tokens, Tensor indices, Tensor weights, Tensor gate_up, Tensor down, str activation) -> Tensor",
)
torch.library.impl("heterodyne::experts", "CompositeImplicitAutograd")(mixture)


# ---- from tokens to rows, and back -------------------------------------------------------------------------------------------------


def by_expert(indices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The numbers of the choices in order of expert, and how many there are for each expert."""
    chosen = indices.reshape(-1)
    return chosen.argsort(stable=True), torch.bincount(chosen, minlength=experts)


@dataclass(frozen=True, kw_only=True)
class Route:
    """Which choices become rows.

    Args:
        choices: k. Choice c of token n has the number n * k + c.
        rows: [S], the numbers of the choices of tokens that are here, in order of expert, for one expert in order of token.
        counts: how many rows each expert of this device has; they add up to M, which is S unless rows travel.
    """

    choices: int
    rows: Tensor
    counts: tuple[int, ...]

    def at_choices(self, rows: Tensor, tokens: int) -> Tensor:
        """[S, ...] to [tokens, k, ...], with zeros for choices that did not go out. Each row has a place of its own, so none are added."""
        places = rows.new_zeros((tokens * self.choices, *rows.shape[1:]))
        places[self.rows] = rows
        return places.view(tokens, self.choices, *rows.shape[1:])


def permute(tokens: Tensor, route: Route, anchor: Tensor | None = None) -> Tensor:
    """The rows [S, H] of tokens [N, H], one a choice, in order of expert.

    ``anchor``: a number that requires gradients where the rows shall, whatever the tokens do.
    """
    rows: Tensor = _Picked.apply(tokens, anchor, route)  # type: ignore[no-untyped-call]
    return rows


def unpermute(results: Tensor, weights: Tensor, rows: Tensor, route: Route) -> Tensor:
    """Return what the experts made [S, H] of the rows that were `permute`, back at their tokens and added up: [N, H].

    ``weights``: [N, k] of the tokens here.
    """
    # A device without experts has made nothing, perhaps not even in another dtype.
    combined: Tensor = _Weighed.apply(results.to(rows.dtype), weights, rows, route)  # type: ignore[no-untyped-call]
    return combined


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, tokens: Tensor, anchor: Tensor | None, route: Route) -> Tensor:  # noqa: ARG004
        ctx.route, ctx.tokens = route, tokens.shape[0]  # type: ignore[attr-defined]
        ctx.save_for_backward(route.rows)  # it is kept anyway; so whoever counts what is kept sees it
        return tokens[route.rows // route.choices]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return ctx.route.at_choices(upstream, ctx.tokens).sum(1), None, None


class _Weighed(torch.autograd.Function):
    """``rows`` are not read: they let the result have a gradient also where there are no experts that made anything of them."""

    @staticmethod
    def forward(ctx: FunctionCtx, results: Tensor, weights: Tensor, rows: Tensor, route: Route) -> Tensor:  # noqa: ARG004
        ctx.route = route  # type: ignore[attr-defined]
        ctx.save_for_backward(results, weights)
        weighted = results * _of_rows(weights, route)
        return route.at_choices(weighted, weights.shape[0]).sum(1).to(results.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        results, weights = ctx.saved_tensors
        route = ctx.route
        of_rows = upstream[route.rows // route.choices].to(torch.promote_types(results.dtype, weights.dtype))
        of_weights = route.at_choices((of_rows * results).sum(-1).to(weights.dtype), weights.shape[0])
        return (of_rows * _of_rows(weights, route)).to(results.dtype), of_weights, None, None


def _of_rows(weights: Tensor, route: Route) -> Tensor:
    """[N, k] to [S, 1]."""
    return weights.reshape(-1)[route.rows].unsqueeze(-1)


# ---- what the experts compute ---------------------------------------------------------------------------------------


def swiglu_experts(
    rows: Tensor,
    counts: Sequence[int],
    gate_up: Tensor,
    down: Tensor,
    activation: Callable[[Tensor], Tensor] = F.silu,
) -> Tensor:
    """down_e (activation(gate_e x) * up_e x) for each row x of expert e: the experts of Mixtral and Qwen.

    It is computed in the dtype of the weights, under autocast too, as Transformers does it.

    Args:
        rows: [M, H], in order of expert.
        counts: rows of each expert; n of them.
        gate_up: [n, 2 I, H], the gate first, as Transformers keeps it.
        down: [n, H, I].
        activation: of the gate.
    """
    gate, up = _grouped(rows, gate_up, counts).chunk(2, dim=-1)
    return _grouped(activation(gate) * up, down, counts)


def _grouped(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows [M, i] in order of expert, times the transposed matrix of each expert, of [n, o, i]: [M, o]."""
    made: Tensor = _Grouped.apply(rows.to(weight.dtype), weight, tuple(counts))  # type: ignore[no-untyped-call]
    return made


class _Grouped(torch.autograd.Function):
    """Products are written where they are to be. A matrix that no row is multiplied with has a gradient of zero, as it has on one
    device.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.counts = counts  # type: ignore[attr-defined]
        made = rows.new_empty(rows.shape[0], weight.shape[1])
        for expert, own in _slices(counts):
            torch.mm(rows[own], weight[expert].t(), out=made[own])
        return made

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        of_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for expert, own in _slices(ctx.counts):
            if of_rows is not None:
                torch.mm(upstream[own], weight[expert], out=of_rows[own])
            if of_weight is not None:
                torch.mm(upstream[own].t(), rows[own], out=of_weight[expert])
        if of_weight is not None:
            for expert, count in enumerate(ctx.counts):
                if not count:
                    of_weight[expert].zero_()
        return of_rows, of_weight, None


def _slices(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and which these are."""
    first = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(first, first + count)
        first += count
