"""Do the parts of later batches add up, too? Asked of modules that run as they are, now and then.

`exact.parts` has asked it of the first batch. A module may still choose in Python once for all samples of a batch, by what is in them:
``pad_packed_sequence`` gives outputs as long as the longest sample, and if the first batch had samples of one length, that choice did
not show. No graph says so beforehand; a later batch shows it.

And of a source that pads each slice to its own longest sample: does the loss depend on how far?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from heterodyne.errors import CaptureError, DataError
from heterodyne.graph.ir import ModelGraph
from heterodyne.loss_count import LossCount
from heterodyne.runtime.exact.parts import MOST_SAMPLES
from heterodyne.runtime.exact.verify import rounding_bar
from heterodyne.runtime.exact.weighting import sum_of_parts
from heterodyne.runtime.slices import BatchSource, as_source, union
from heterodyne.runtime.stages.forward import Forward, Precision

__all__ = ["LaterBatches"]


class LaterBatches:
    """Compares the loss of some samples with those of parts of them. Nothing is trained by it.

    BatchNorm in training would count these calls in its statistics, so modules with it are not asked.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: ModelGraph,
        count: LossCount,
        *,
        buffers: Mapping[str, Tensor],
        device: torch.device,
        precision: Precision,
    ) -> None:
        self._graph = graph
        self._count = count
        self._buffers = buffers
        self._forward = Forward(module, graph, device=device, precision=precision, seed=0)
        self._bar = rounding_bar(device, precision)

    @property
    def asks(self) -> bool:
        """Return whether parts can be compared with the whole: BatchNorm would count these calls in its statistics."""
        return not self._graph.batch_statistics

    def require(self, source: BatchSource, own: Sequence[tuple[int, int]], step: int) -> None:
        """Look at some of the samples that this rank trains on: the first, the last, and others between them in each step.

        Args:
            own: of each micro-batch of this rank, its first sample and how many it has.

        Raises CaptureError if their parts do not add up.
        """
        of_rank = [first + place for first, count in own for place in range(count)]
        chosen = [of_rank[place] for place in _chosen(len(of_rank), step)]
        samples = len(chosen)
        if samples < 2 or self._graph.batch_statistics:
            return
        begin = of_rank[
            0
        ]  # all are read at once, so that they have one length where a source pads what it is asked for
        read = as_source(source.samples(begin, of_rank[-1] + 1 - begin), self._graph)
        tensors = as_source(union(read, [(number - begin, 1) for number in chosen], self._graph), self._graph)
        whole, parts = (self._loss(tensors, 0, sizes) for sizes in ([samples], [1, samples - 1]))
        if self._are_equal(whole, parts):
            return
        raise CaptureError(
            f"the parts of the batch of step {step + 1} do not add up to the whole: the loss of {samples} of its samples is {whole:.7g}, "
            f"and {parts:.7g} in parts of 1 and {samples - 1}. Those of the first batch did. {self._graph.name} chooses something once for "
            "all samples of a batch, by what is in them, such as the length of the longest: pass it as an input, or let each sample go "
            "its own way (pad_packed_sequence has total_length)"
        )

    def require_padding(self, source: BatchSource, own: Sequence[tuple[int, int]], step: int) -> None:
        """Raises DataError if slices of the source are padded each by itself, and another length gives another loss."""
        first, samples = own[0][0], min(sum(count for _, count in own), MOST_SAMPLES)
        if samples < 2 or self._graph.batch_statistics or self._count.split or self._count.together:
            return
        shapes = [
            {name: tensor.shape[1:] for name, tensor in source.samples(*span).items()}
            for span in ((first, samples), (first, 1), (first + 1, samples - 1))
        ]
        if shapes[0] == shapes[1] == shapes[2]:
            return
        whole, parts = (self._loss(source, first, sizes) for sizes in ([samples], [1, samples - 1]))
        if not self._are_equal(whole, parts):
            raise DataError(
                f"the loss depends on how far samples are padded: for {samples} of step {step + 1} it is {whole:.7g} padded to the longest "
                f"of them, and {parts:.7g} in slices that are padded each to its own, as devices read them. Let the padding not count "
                "(an attention mask, labels of -100), give the lengths (lengths=, in a job the attribute lengths of the dataset), so that "
                "all are padded to the longest of the global batch, or pad to a fixed length"
            )

    def _are_equal(self, whole: float | None, parts: float | None) -> bool:
        return whole is None or parts is None or abs(parts - whole) <= self._bar * max(abs(whole), self._bar)

    def _loss(self, source: BatchSource, first: int, sizes: Sequence[int]) -> float | None:
        """The weighted sum over parts of these sizes, from sample ``first`` on; None where nothing in them counts."""
        spans = pairwise(accumulate(sizes, initial=first))
        parts = [(range(start, stop), source.samples(start, stop - start)) for start, stop in spans]
        summed = sum_of_parts(
            self._count,
            parts,
            self._buffers,
            lambda inputs, samples, _: self._forward.loss(inputs, self._forward.draws(0, samples)).item(),
        )
        return None if summed is None else summed[0]


def _chosen(samples: int, step: int) -> list[int]:
    """The places of up to `MOST_SAMPLES` of so many samples: those at both ends, and between them two that move with the step."""
    if samples <= MOST_SAMPLES:
        return list(range(samples))
    at_end = (MOST_SAMPLES - 2) // 2
    between = range(at_end, samples - at_end)
    moving = {between[(2 * step + place) % len(between)] for place in range(2)}
    return [*range(at_end), *sorted(moving), *range(samples - at_end, samples)]
