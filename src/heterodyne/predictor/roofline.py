"""Seconds of kernels on a device: what the slower of computing and moving takes, in tiles that fill the device or do not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from heterodyne.predictor.constants import constants
from heterodyne.predictor.kernels import Kernels, Product

__all__ = ["Chip", "kernels_s", "product_s"]


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device at one precision.

    Args:
        flops: of the best matrix product, in FLOP/s. ``units``: that compute tiles side by side.
        memory_bytes_per_s: that a copy reaches.
        attention: FLOP/s of a flash kernel on long sequences, forward and backward. ``attention_half``: tokens of the sequences for which
            it does half of that.
        launch_s: of the host, for one kernel.
        element_bytes: of a weight or an activation in a product.
        prologue: a tile begins and ends as long as so many steps along k take.
    """

    flops: float
    units: int
    memory_bytes_per_s: float
    attention: tuple[float, float]
    attention_half: float = 0.0
    launch_s: float = 10e-6
    element_bytes: float = 2.0
    prologue: float = 50.0


@lru_cache(maxsize=1 << 14)
def product_s(product: Product, chip: Chip) -> float:
    """Seconds of one kernel. Kept: whoever shares a micro-batch makes the products of a smaller one."""
    stated = constants().stated
    a_unit = chip.flops / chip.units
    best = math.inf
    for rows, columns, rate in stated.tiles:
        tiles = math.ceil(product.m / rows) * math.ceil(product.n / columns) * product.count
        # Where tiles are few and k is long, libraries divide k among units and add up what they find.
        parts = max(1.0, min(chip.units / tiles, product.k / stated.least_k))
        waves = math.ceil(tiles * parts / chip.units)
        best = min(best, waves * 2 * rows * columns * (product.k / parts + chip.prologue) / (a_unit * rate))
    moved = product.elements * chip.element_bytes / chip.memory_bytes_per_s
    return max(best, moved) + stated.gap_us * 1e-6


def kernels_s(kernels: Kernels, chip: Chip, *, launch: float = 1.0) -> tuple[float, float]:
    """Seconds of a forward and of its backward."""
    forward = sum(product_s(product, chip) for product in kernels.products)
    backward = sum(product_s(half, chip) for product in kernels.products for half in product.backward())
    for kernel in kernels.attention:
        moved = kernel.bytes / chip.memory_bytes_per_s
        flops = kernel.flops * (1 + chip.attention_half / kernel.seq)
        forward += max(flops / chip.attention[0], moved)
        backward += max(constants().stated.attention_backward_flops * flops / chip.attention[1], 2 * moved)
    forward += kernels.moved_bytes / chip.memory_bytes_per_s
    backward += 2 * kernels.moved_bytes / chip.memory_bytes_per_s
    host = kernels.launches * chip.launch_s * launch
    return max(forward, host), max(backward, 1.5 * host)
