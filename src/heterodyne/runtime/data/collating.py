"""A list of samples becomes a batch: the user's collator, called so that its result does not depend on how the batch is cut.

A rank collates its own slice. What a collator does to a sample may depend on its neighbours in two ways. It may pad to the longest of
them: then it is called with the longest sample of the global batch beside them, whose row is taken off again. And it may draw random
numbers (masked language modelling): then it is called for each sample by itself, with the generators of that sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from heterodyne.errors import DataError
from heterodyne.factories import describe_error
from heterodyne.runtime.data.padding import PadTo
from heterodyne.runtime.data.sample_draws import draws_of, generator_states
from heterodyne.runtime.data.shared_room import no_shared_room

__all__ = ["Collate", "Collator", "content_digest"]

Collate: TypeAlias = Callable[[list[Any]], Any]
Key: TypeAlias = tuple[int, int]
_COLLATOR = "collator"
_SHOWN = 8
_HINT = "; where samples differ in length or size, pad or pack them, or bring a collator that does"


@dataclass(frozen=True, kw_only=True, eq=False)
class Collator:
    """Args:
    collate: makes tensors of a list of samples.
    seed: of what the collator and the dataset draw.
    """

    collate: Collate = default_collate
    seed: int = 0

    @property
    def pads_alike(self) -> bool:
        """Return whether the shape of a batch is known not to depend on the lengths in it."""
        return self.collate is default_collate or isinstance(self.collate, PadTo)

    def __call__(self, samples: Sequence[Any], keys: Sequence[Key], beside: Any = None) -> Any:
        """The batch of these samples.

        Args:
            keys: epoch and number of each sample, in the dataset or in the stream.
            beside: a sample to whose length all are padded, perhaps one of them; None: there is none.

        Raises DataError with the numbers of the samples if they cannot be collated.
        """
        beside_of = [] if beside is None else [beside]
        before: tuple[object, ...] = ()
        with draws_of(self.seed, *(keys[0] if keys else ()), _COLLATOR):
            before = generator_states()
            whole = self._collated([*samples, *beside_of], keys)
            draws = generator_states() != before
        if not draws or len(samples) < 2:
            batch: Mapping[str, Tensor] = self._first(whole, len(samples), bool(beside_of), keys)
            return batch
        parts = []
        for sample, key in zip(samples, keys, strict=True):
            with draws_of(self.seed, *key, _COLLATOR):
                parts.append(self._first(self._collated([sample, *beside_of], [key]), 1, bool(beside_of), [key]))
        return self._joined(parts, keys)

    def _collated(self, samples: list[Any], keys: Sequence[Key]) -> Any:
        try:
            found = self.collate(samples)
        except Exception as error:  # whatever the user's own code raises, it is reported as such
            hint = no_shared_room(error) or (_HINT if self.collate is default_collate else "")
            raise DataError(f"{_named(keys)} cannot be collated: {describe_error(error)}{hint}") from error
        if found is None:
            raise DataError(
                f"{_named(keys)} were collated to None: let the collator return a mapping of names to tensors"
            )
        return found

    def _first(self, batch: Any, count: int, has_more: bool, keys: Sequence[Key]) -> Any:
        """The batch without the row of the sample that was beside."""
        if not has_more:
            return batch
        if not isinstance(batch, Mapping):
            raise DataError(f"the collator made a {type(batch).__name__}: let it return a mapping of names to tensors")
        rows = {name for name, value in dict(batch).items() if _has_rows(value, count + 1)}
        if not rows:
            raise DataError(
                f"the collator makes no row for each of {_named(keys)}, so they cannot be padded to the longest of the global batch: "
                "leave out lengths, or let dim 0 of what it makes be the samples"
            )
        return {name: value[:count] if name in rows else value for name, value in batch.items()}

    def _joined(self, parts: Sequence[Any], keys: Sequence[Key]) -> Any:
        if isinstance(parts[0], tuple | list):
            by_number = [{f"number {number}": each for number, each in enumerate(part)} for part in parts]
            return tuple(self._joined(by_number, keys).values())
        if isinstance(parts[0], Tensor):
            return self._joined([(part,) for part in parts], keys)[0]
        for name, first in parts[0].items():
            shapes = {tuple(part[name].shape) for part in parts}
            if len(shapes) > 1 or not first.dim():
                raise DataError(
                    "the collator draws random numbers, so that it is called for each sample by itself, and then "
                    f"{name} of {_named(keys)} has the shapes {', '.join(map(str, map(list, sorted(shapes))))}: pad to a fixed "
                    "length, or give lengths, by which all are padded to the longest of the global batch"
                )
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _has_rows(value: object, count: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == count


def _named(keys: Sequence[Key]) -> str:
    shown = ", ".join(str(index) for _, index in keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "")
    return f"samples {shown}"


def content_digest(value: Any) -> str:
    """Return a digest of numbers, texts, arrays and tensors, and of what holds them; of anything else its type alone."""
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, value)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype.is_floating_point else value.numpy()
    digest.update(type(value).__name__.encode())
    if isinstance(value, np.ndarray) and value.dtype.kind != "O":
        digest.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            _add(digest, key)
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(str(len(value)).encode())
        for entry in value:
            _add(digest, entry)
    elif isinstance(value, bytes):
        digest.update(value)
    elif value is None or isinstance(value, str | int | float | bool | np.generic):
        digest.update(repr(value).encode())
