"""Random numbers belong to the samples: which ops of a graph draw such, so that no plan changes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from heterodyne.errors import CaptureError
from heterodyne.graph.ir import ModelGraph, Op

__all__ = ["require_samples_own_draws"]

# Operators that draw nothing but what the runtime draws for each sample, without their overload and the underscore of those in place.
_COVERED: Final = frozenset({
    "dropout", "feature_dropout", "alpha_dropout", "scaled_dot_product_attention", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "bernoulli", "uniform", "normal", "exponential", "random",
})  # fmt: skip
# What to write for those that are met most: samples of a categorical distribution.
_INSTEAD: Final[Mapping[str, str]] = {
    "multinomial": ", as (p.log() - torch.empty_like(p).exponential_().log()).argmax(-1) for one torch.multinomial(p, 1) a row",
}
_DROPS: Final = frozenset({"dropout", "feature_dropout", "alpha_dropout", "scaled_dot_product_attention"})


def require_samples_own_draws(graph: ModelGraph) -> None:
    """Raises CaptureError, with the line, for an op whose random numbers would depend on the plan."""
    if graph.opaque is not None:
        return  # there are no ops to look at; what it drew was seen when it ran (`runtime.exact.parts`)
    for name in graph.random:
        op = graph.op_by_name[name]
        if fault := _fault(op):
            raise CaptureError(f"{op.source or op.module or op.name}: {op.target} {fault}")


def _fault(op: Op) -> str:
    """Return what is wrong with what an op draws; "" for nothing."""
    kind, shape = op.kind.rstrip("_"), op.outputs[0].shape
    if kind == "randperm" and not all(size.is_constant for size in shape):
        return (
            "shuffles the samples of a batch, which makes them depend on each other, and the devices each see only their own. Mix samples "
            "where the batch is made (in the collate function), and pass both as inputs"
        )
    if kind not in _COVERED:
        return (
            "draws random numbers that cannot be made to belong to the samples, and would depend on the plan. "
            f"Draw with torch.rand, randn, randint, bernoulli or dropout{_INSTEAD.get(kind, '')}, or switch it off"
        )
    if all(size.is_constant for size in shape):
        return (
            "draws random numbers that all samples share, and each micro-batch of each device would draw others. Draw them for each sample "
            "(torch.randn(x.shape[0], ...)), or pass them as an input of the batch"
        )
    if shape[0].is_constant:
        off = ", or set the dropout to 0" if kind in _DROPS else ""
        return (
            "draws random numbers for a tensor whose first dim is not the samples, so they would depend on the plan. Move the batch to "
            f"dim 0 (batch_first=True){off}"
        )
    if op.samples and op.samples[0] != 0:
        off = ", or set the dropout to 0" if kind in _DROPS else ""
        return (
            "draws random numbers for a tensor whose rows are not known to be in the order of the samples (several inputs are joined, or "
            f"dims were turned), so they would depend on the plan. Draw them before, for each input of the batch{off}"
        )
    return ""
