"""BatchNorm over the whole micro-batch of all ranks: count-weighted statistics, forward and backward.

The j-th micro-batches of all ranks together are what one device would see as one batch. `GlobalBatchNorm` is a function mode:
while it is active, ``torch.nn.functional.batch_norm`` in training uses the statistics of all of them. The user's modules stay
as they are. With x of channel c over all N values of all ranks:

    mean = sum x / N      var = sum (x - mean)^2 / N      y = (x - mean) / sqrt(var + eps) * weight + bias
    dx = weight / sqrt(var + eps) * (dy - sum dy / N - xhat * sum (dy xhat) / N)

(Ioffe & Szegedy, "Batch Normalization", 2015, section 3.) Each rank sends its count, mean and centred sum of squares in
float64, so that nothing cancels. Where the loss of rank r counts w_r in the loss of all, and dy is the gradient of its own loss, the sums
are those of w_r dy, divided by the w of the rank that reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from heterodyne.errors import CaptureError
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.exact.exchange import over_all_losses
from heterodyne.runtime.exact.interception import BatchNormCall, Interception, batch_norms

__all__ = ["GlobalBatchNorm"]

# Places are counted up to a number whose square, times the ranks, a double holds exactly.
_PLACES = 2**20
_MOST_CALLS = 1009


class GlobalBatchNorm(Interception):
    """While active, batch norm in training takes its statistics over all ranks of ``process_group``.

    Every rank of the channel must make the same calls in the same order, forward and backward. Each call sends its place, so that a rank
    which has left one out is found out: raises CaptureError then, on all of them.

    Args:
        weight: what this rank's loss counts in the loss of all, asked for in the backward.
        takes_part: whether what this rank computes belongs to the batch, asked for in the forward.
        waiting: entered around each exchange.
    """

    def __init__(
        self,
        process_group: ProcessGroup,
        weight: Callable[[], float] = lambda: 1.0,
        takes_part: Callable[[], bool] = lambda: True,
        waiting: AbstractContextManager[object] | None = None,
    ) -> None:
        super().__init__(batch_norms(self._batch_norm))
        self._process_group = process_group
        self._weight, self._takes_part = weight, takes_part
        self.waiting = waiting or nullcontext()
        self._forwards = self._calls = 0

    def begin_forward(self) -> None:
        """To be called before the forward of each micro-batch."""
        self._forwards, self._calls = self._forwards + 1, 0

    def over_all(self, sums: Tensor, *, takes_part: bool) -> Tensor:
        """Return what this rank's loss would find for ``sums`` if it were the loss of all. Collective."""
        with self.waiting:
            return over_all_losses(self._process_group, sums, self._weight(), takes_part=takes_part)

    def _sum(self, tensor: Tensor) -> None:
        with self.waiting:
            self._process_group.all_reduce(tensor).wait()

    def _batch_norm(self, call: BatchNormCall) -> Tensor:
        self._calls += 1
        place = (self._forwards * _MOST_CALLS + self._calls) % _PLACES
        seen = call.input.detach()
        takes_part = self._takes_part()
        count, mean, var = self._global_statistics(seen if takes_part else seen[:0], place)
        if count < 2:
            raise ValueError(
                f"batch norm needs more than one value per channel in training, over all workers; got {tuple(call.input.shape)}"
            )
        running_mean, running_var = call.running_mean, call.running_var
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.lerp_(mean.to(running_mean.dtype), call.momentum)
                running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), call.momentum)
        normalised: Tensor = _Normalise.apply(
            call.input, call.weight, call.bias, mean, var, call.eps, count, self, takes_part
        )  # type: ignore[no-untyped-call]
        return normalised

    def _global_statistics(self, input: Tensor, place: int) -> tuple[float, Tensor, Tensor]:
        """Count of values a channel, mean [C] and biased variance [C] (float64) over all ranks, which are all at that ``place``.

        The places p of R ranks are equal if R sum p^2 = (sum p)^2. With own count n_r, mean m_r, variance v_r:
        sum n_r v_r + n_r m_r^2 - N m^2 = N var, in float64.
        A device of a stage in parts may have none of the samples: it adds nothing.
        """
        channels = input.shape[1]
        count = input.numel() // channels
        dims = [0, *range(2, input.dim())]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        if count:
            var, mean = torch.var_mean(wide, dim=dims, correction=0)
        else:
            var = mean = wide.new_zeros(channels)  # of no values both would be NaN
        var, mean = var.double(), mean.double()
        sent = torch.cat([mean * count, (var + mean * mean) * count, mean.new_tensor([count, place, place**2])])
        self._sum(sent)
        total, places, squares = sent[-3:].tolist()
        if len(self._process_group.ranks) * squares != places**2:
            raise CaptureError(
                "a rank has reached BatchNorm in a micro-batch in which another has not, so their statistics cannot be those of one "
                "device: move it out of the branch that depends on the data, or put it in eval mode"
            )
        mean = sent[:channels] / total
        var = (sent[channels:-3] / total - mean * mean).clamp_(min=0.0)
        return total, mean, var


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        count: float,
        norm: GlobalBatchNorm,
        takes_part: bool,
    ) -> Tensor:
        dtype = torch.promote_types(input.dtype, torch.float32)
        mean, var = mean.to(dtype), var.to(dtype)
        # The kernel of inference: it normalises with statistics that are given.
        output = F.batch_norm(input, mean, var, weight, bias, False, 0.0, eps)
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(var + eps))  # type: ignore[arg-type]  # None is allowed
        ctx.count, ctx.norm, ctx.takes_part, ctx.bias = count, norm, takes_part, bias is not None  # type: ignore[attr-defined]
        return output

    @staticmethod
    @once_differentiable  # a second derivative would leave out the other ranks
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        dims = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        upstream_wide = upstream.to(mean.dtype)
        normalised = (input.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        of_bias = upstream_wide.sum(dims)
        of_weight = (upstream_wide * normalised).sum(dims)
        sums = torch.stack([of_bias, of_weight]).double()
        per_value = ctx.norm.over_all(sums, takes_part=ctx.takes_part).div_(ctx.count).to(mean.dtype)
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        of_input = upstream_wide - per_value[0].view(shape)
        of_input = of_input.addcmul_(normalised, per_value[1].view(shape), value=-1).mul_(scale.view(shape))
        return (
            of_input.to(input.dtype),
            # Of this rank's own samples: they are summed over the ranks with all other gradients.
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(mean.dtype if weight is None else weight.dtype) if ctx.bias else None,
            *([None] * 6),
        )
