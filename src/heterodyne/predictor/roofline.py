"""Seconds of kernels on a device: what the slower of computing and moving takes, in tiles that fill the device or do not."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from heterodyne.predictor.constants import constants
from heterodyne.predictor.kernels import Kernels, Product

__all__ = ["Chip", "kernels_s", "product_s"]

_NARROW_HEAD = 64


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device at one precision.

    Args:
        flops: of the best matrix product, in FLOP/s; ``wide_flops``: of one whose operands are never cast to 8 bits.
        units: that compute tiles side by side.
        memory_bytes_per_s: that a copy reaches.
        attention: FLOP/s of the forward of a flash kernel on long sequences, for heads of 64 and of 128 and more.
        launch_s: of the host, for one kernel.
        element_bytes: of a weight or an activation in a product.
        prologue: a tile begins as long as so many steps along k take.
        written: of writing a tile's result, the part that tensor cores wait for.
        cast_bytes: moved for each element that is cast to 8 bits.
    """

    flops: float
    wide_flops: float
    units: int
    memory_bytes_per_s: float
    attention: tuple[float, float]
    launch_s: float = 10e-6
    element_bytes: float = 2.0
    prologue: float = 50.0
    written: float = 0.0
    cast_bytes: float = 0.0

    @property
    def wide(self) -> Chip:
        """For products that stay in 16 bits or more."""
        return replace(self, flops=self.wide_flops, cast_bytes=0.0)

    def attention_flops(self, head: float) -> float:
        """FLOP/s of a flash kernel on heads of that width. Each score costs an exponential besides its products, so narrow heads are
        slower; those below 64 fill up what was made for 64."""
        narrow, wide = self.attention
        if head <= _NARROW_HEAD:
            return narrow * head / _NARROW_HEAD
        return narrow + (wide - narrow) * min(1.0, head / _NARROW_HEAD - 1)


@lru_cache(maxsize=1 << 14)
def product_s(product: Product, chip: Chip) -> float:
    """Seconds of one kernel. Kept: whoever shares a micro-batch makes the products of a smaller one.

    Operands are loaded while others are computed with. Results are not: each unit has one tile at a time, and all write at about the same
    time (the epilogue of CUTLASS, docs/efficient_gemm.md). So of two products with as many operations the one with longer k is faster, by
    up to ``1 + rate x bytes / (bandwidth x k)``: a quarter at k = 512 on an A100. Kernels that write behind their back do not wait.
    """
    stated = constants().stated
    a_unit = chip.flops / chip.units
    best = math.inf
    for rows, columns, rate in stated.tiles:
        tiles = math.ceil(product.m / rows) * math.ceil(product.n / columns) * product.count
        # Where tiles are few and k is long, libraries divide k among units and add up what they find.
        parts = max(1.0, min(chip.units / tiles, product.k / stated.least_k))
        waves = math.ceil(tiles * parts / chip.units)
        best = min(best, waves * 2 * rows * columns * (product.k / parts + chip.prologue) / (a_unit * rate))
    a_byte = chip.element_bytes / chip.memory_bytes_per_s
    written = chip.written * product.m * product.n * product.count * a_byte
    return max(best + written, product.elements * a_byte) + stated.gap_us * 1e-6


def _cast_s(product: Product, chip: Chip) -> float:
    """Of casting what flows into a product (weights are cast once for many micro-batches)."""
    return product.m * product.k * product.count * chip.cast_bytes / chip.memory_bytes_per_s


def kernels_s(kernels: Kernels, chip: Chip, *, launch: float = 1.0) -> tuple[float, float]:
    """Seconds of a forward and of its backward. What flows in is cast in the forward, its gradient in the backward, both for two uses."""
    stated = constants().stated
    halves = [product.backward() for product in kernels.products]
    forward = sum(product_s(product, chip) + _cast_s(product, chip) for product in kernels.products)
    backward = sum(product_s(half, chip) for both in halves for half in both)
    backward += sum(_cast_s(of_input, chip) for of_input, _ in halves)
    for kernel in kernels.attention:
        moved = kernel.bytes / chip.memory_bytes_per_s
        filling = 1 + stated.attention_half[kernel.causal] / kernel.seq
        seconds = filling * kernel.flops / chip.attention_flops(kernel.head)
        forward += max(seconds, moved)
        backward += max(stated.attention_backward_flops * seconds / stated.attention_backward, 2 * moved)
    forward += kernels.moved_bytes / chip.memory_bytes_per_s
    backward += 2 * kernels.moved_bytes / chip.memory_bytes_per_s
    host = kernels.launches * chip.launch_s * launch
    return max(forward, host), max(backward, 1.5 * host)
