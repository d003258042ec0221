"""A lower bound on any step, however the model is spread: no device is ever idle, and each does what it is best at.

Which device runs how many samples of which block is a linear program in t(d, b), the seconds of a sample of block b on device d. By
duality any weights w(d) that sum to 1 bound it from below: the samples, times the sum over the blocks of min over d of w(d) t(d, b).
With weights in proportion to the speeds of the devices on the whole model this is the optimum where no device is better at one block
than at another.
"""

from __future__ import annotations

from collections.abc import Sequence

from heterodyne.cost.compute import Compute
from heterodyne.cost.model import CostModel

__all__ = ["all_at_work_s"]


def all_at_work_s(model: CostModel, samples: int, largest: int) -> float:
    """Seconds of ``samples`` samples in micro-batches of up to ``largest``, with the step overhead of each device."""
    blocks = [(block.start, block.stop) for block in model.graph.blocks]
    first = {block.kind: number for number, block in reversed(list(enumerate(model.graph.blocks)))}
    times: list[list[float]] = []
    for device in model.cluster.devices:
        compute = model.compute[device.id]
        sizes = _sizes(compute, largest)
        of = {kind: _sample_s(compute, blocks[number], sizes) for kind, number in first.items()}
        times.append([of[block.kind] for block in model.graph.blocks])
    wholes = list(map(sum, times))
    if not wholes or min(wholes) <= 0:
        return 0.0
    together = sum(1 / whole for whole in wholes)
    weights = [1 / whole / together for whole in wholes]
    compute_s: float = samples * sum(
        min(w * t for w, t in zip(weights, column, strict=True)) for column in zip(*times, strict=True)
    )
    overheads = (model.measured(device.id).step_overhead_s for device in model.cluster.devices)
    return compute_s + sum(w * min(own, compute_s) for w, own in zip(weights, overheads, strict=True))


def _sizes(compute: Compute, largest: int) -> Sequence[float]:
    """Between these the curves are straight, so that a sample takes least in one of them."""
    return sorted({size for size in compute.forward.total.sizes if size <= largest} | {float(largest)})


def _sample_s(compute: Compute, ops: tuple[int, int], sizes: Sequence[float]) -> float:
    return min((compute.seconds("F", ops, size) + compute.seconds("B", ops, size)) / size for size in sizes)
