"""Text as training data: windows of a long row of tokens, in an order that the plan has no part in.

The text is cut into windows of T tokens that do not overlap; what is left over at the end is not used. Some windows, in
runs that are spread evenly over the text, are kept apart for validation. The others are the training samples. Sample
``g`` of the whole training run is window ``shuffled(g mod n)`` of epoch ``g div n``, so batch s of B samples is
``[s B, (s + 1) B)``: the number of the step is the position in the data, and nothing else must be remembered. A batch may
begin in one epoch and end in the next; no sample is dropped and each is seen once an epoch.

``labels`` equal ``input_ids``, and the model shifts them: the convention of Transformers, and of every model here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heterodyne.errors import DataError
from heterodyne.runtime.data.order import EpochOrder, held_out
from heterodyne.runtime.data.source import ByStep
from heterodyne.runtime.data.tokens import VOCABULARY, TokenFile, let_go_of_pages

__all__ = ["GlobalBatch", "TextData", "require_vocabulary"]

LONGEST_RUN = 64  # windows of validation text that stand together, at most


@dataclass(frozen=True, kw_only=True, eq=False)
class GlobalBatch:
    """All samples of one optimizer step; only those that are asked for are read.

    Args:
        tokens: the whole text.  # unsigned [count]
        windows: the window of each sample.  # int64 [size]
        length: T, the tokens of a window.
    """

    tokens: NDArray[Any]
    windows: NDArray[np.int64]
    length: int

    @property
    def size(self) -> int:
        """Samples of the batch."""
        return len(self.windows)

    def samples(self, first: int, count: int) -> dict[str, Tensor]:
        """Samples ``[first, first + count)``: ``input_ids`` and ``labels``, int64 [count, T]. Raises ValueError outside."""
        if first < 0 or count < 0 or first + count > self.size:
            raise ValueError(f"samples {first} to {first + count} are not in a batch of {self.size}")
        starts = self.windows[first : first + count] * self.length
        chosen = self.tokens[starts[:, None] + np.arange(self.length)]  # [count, T]
        let_go_of_pages(self.tokens)
        input_ids = torch.from_numpy(chosen.astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids.clone()}


@dataclass(frozen=True, kw_only=True, eq=False)
class TextData(ByStep):
    """Training and validation samples of one text.

    Args:
        file: the tokens.
        validation: those of a text of its own; None: ``validation_fraction`` of the file.
        sequence_length: T.
        validation_fraction: share of the windows that is kept apart, 0 for none.
        batch_size: samples of a training batch.
        seed: decides the order.

    Raises DataError if the text is too short for one training sample, or for one of validation where some is wanted.
    """

    file: TokenFile
    sequence_length: int
    validation_fraction: float
    batch_size: int
    seed: int
    validation: TokenFile | None = None

    def __post_init__(self) -> None:
        needs, unit = self.sequence_length, self.file.unit
        for file in (self.file, self.validation):
            if file is not None and len(file.tokens) < needs:
                raise DataError(
                    f"the text has {len(file.tokens)} {unit}, one sequence needs {needs}: "
                    "give more text or a smaller data.sequence_length"
                )
        has = len(self.file.tokens)
        if self._fraction and not len(self.validation_windows):
            least = int(np.ceil(0.5 / self.validation_fraction)) * needs
            raise DataError(
                f"the text has {has} {unit}, too few to keep {self.validation_fraction:g} of it for validation in sequences of {needs} "
                f"(that takes {least}): give more text, a larger data.validation_fraction, or 0 for none"
            )
        if not len(self.training_windows):
            raise DataError(
                f"the text has {has} {unit}, of which validation takes all: give more text or a smaller data.validation_fraction"
            )

    @property
    def _fraction(self) -> float:
        return self.validation_fraction if self.validation is None else 0.0

    @cached_property
    def _is_validation(self) -> NDArray[np.bool_]:
        """For each window whether it is kept apart: runs of equal length at equal distances."""
        count = len(self.file.tokens) // self.sequence_length
        run = max(1, min(LONGEST_RUN, int(count * self._fraction) // 8))
        runs = -(-count // run)
        return np.repeat(held_out(runs, self._fraction), run)[:count]

    @cached_property
    def training_windows(self) -> NDArray[np.int64]:
        """By rising position in the text.  # [n]"""
        return np.flatnonzero(~self._is_validation)

    @cached_property
    def validation_windows(self) -> NDArray[np.int64]:
        """By rising position in their text; none of them is a training window."""
        if self.validation is not None:
            return np.arange(len(self.validation.tokens) // self.sequence_length)
        return np.flatnonzero(self._is_validation)

    @property
    def samples_per_epoch(self) -> int:
        return len(self.training_windows)

    @property
    def identity(self) -> dict[str, str | int]:
        """Return what decides the samples at a position. A run is only continued on data of the same identity."""
        return {"tokens": self.file.digest, "training_windows": self.samples_per_epoch, "seed": self.seed}

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of a step, counted from 0."""
        if step < 0:
            raise ValueError(f"there is no step {step}")
        order = EpochOrder(count=self.samples_per_epoch, seed=self.seed)
        chosen = order.between(step * self.batch_size, (step + 1) * self.batch_size)
        return self._of(self.file, self.training_windows[chosen])

    def validation_batches(self, samples: int) -> tuple[GlobalBatch, ...]:
        """At most ``samples`` of the validation samples, evenly spread, always the same, in batches of `batch_size` or fewer."""
        available = len(self.validation_windows)
        count = min(samples, available)
        windows = self.validation_windows[np.arange(count, dtype=np.int64) * available // max(1, count)]
        file = self.validation or self.file
        return tuple(
            self._of(file, windows[first : first + self.batch_size]) for first in range(0, count, self.batch_size)
        )

    def vocabulary(self) -> int:
        """The number of ids that a model needs. All tokens are read where they come in a file of the user's."""
        files = [file for file in (self.file, self.validation) if file is not None]
        return max(int(file.tokens.max()) + 1 if file.vocabulary is None else file.vocabulary for file in files)

    def _of(self, file: TokenFile, windows: NDArray[np.int64]) -> GlobalBatch:
        return GlobalBatch(tokens=file.tokens, windows=windows, length=self.sequence_length)


def require_vocabulary(size: int, *, model: str, needed: int = VOCABULARY) -> None:
    """Raises DataError if a model has fewer token ids than the data has."""
    if size < needed:
        what = f"text as bytes needs {needed}" if needed == VOCABULARY else f"the tokens of the data need {needed}"
        raise DataError(f"{model} has a vocabulary of {size}, {what}: set its vocabulary to {needed} or more")
