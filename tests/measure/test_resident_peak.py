"""The peak of a block on a CPU is what its run adds to the resident size of the process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from heterodyne.measure.block_run import BlockRun
from heterodyne.measure.clock import HostClock
from heterodyne.processes.heap import forget_high_water_mark

ROW = 2**21  # values, of 8 MiB
COUNTED_TOGETHER = 2**17  # the system counts pages in batches, each processor its own


class Exponential(nn.Module):
    """Keeps its result for the backward."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Block:
    def instantiate(self, batch: int, device: torch.device, *, seed: int = 0) -> tuple[nn.Module, Sequence[object]]:
        del seed
        return Exponential(), (torch.zeros(batch, ROW, device=device, requires_grad=True),)


@pytest.mark.skipif(not forget_high_water_mark(), reason="this system counts no peak of a process anew")
@pytest.mark.parametrize("size", [1, 2])
def test_the_peak_has_what_is_kept_and_what_comes_and_goes(size: int) -> None:
    run = BlockRun(Block(), size, torch.device("cpu"), precision="fp32", seed=0, clock=HostClock())
    (kept, _), peak, _ = run.memory()
    tensor = 4 * ROW * size
    assert kept == tensor
    # The copy of the input, the result, and the gradient of the input; each of the two halves of a backward may hold one more.
    assert 3 * tensor - COUNTED_TOGETHER <= peak <= 4 * tensor + 2**21
