"""Collators that fill up what has different lengths.

Where the plan cuts the model, all of a global batch must have one shape: the stages of all ranks are made for it. What pads to
the longest sample *of a slice* gives each slice a shape of its own; that is exact too, as long as the attention mask is
right, but only where each device runs the whole module. So this pads to a fixed length. (`collating` pads slices to the longest sample
of the global batch, where lengths are known.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from heterodyne.errors import DataError

__all__ = ["PadTo"]

_LABELS = -100


@dataclass(frozen=True)
class PadTo:
    """Makes a batch of samples that are mappings, each sequence filled up at its end to ``length``.

    ``labels`` are filled with -100, which counts in no loss, everything else with 0. An
    ``attention_mask`` is added where there are ``input_ids`` and none. Numbers are stacked as they are.

    Raises DataError for a sample that is longer.
    """

    length: int

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        return dict(default_collate([self._padded(sample) for sample in samples]))

    def _padded(self, sample: Any) -> dict[str, Tensor]:
        if not isinstance(sample, Mapping):
            raise DataError(
                f"padding needs samples that are mappings of names to sequences, not a {type(sample).__name__}"
            )
        tensors = {name: torch.as_tensor(value) for name, value in sample.items()}
        if "input_ids" in tensors and "attention_mask" not in tensors:
            tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
        return {name: self._filled(name, tensor) for name, tensor in tensors.items()}

    def _filled(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            return tensor
        if len(tensor) > self.length:
            raise DataError(f"a sample has {len(tensor)} {name}, more than {self.length}: cut it, or pad to more")
        filled = tensor.new_full((self.length, *tensor.shape[1:]), _LABELS if name == "labels" else 0)
        filled[: len(tensor)] = tensor
        return filled
