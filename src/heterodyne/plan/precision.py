"""In which precision each device of a plan computes.

Where kinds of devices differ, each has its own: bf16 where it has units for it, fp16 with a scaled loss where it has none. Devices that
hold parts of one stage exchange parts of the same tensors, so they compute in one precision: fp32 where theirs differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

__all__ = ["Precision", "Precisions", "between", "in_words", "of_kind", "precision_of", "together"]

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
Precisions: TypeAlias = Precision | dict[str, Precision]
"""Of all devices, or of each kind of device."""


def of_kind(backend: str, *, bf16_units: bool) -> Precision:
    """Return what ``auto`` is: bf16 where there are units for it, else fp16 with a scaled loss; fp32 on CPUs, which gain nothing by 16 bits
    unless they are of the newest.
    """
    if backend == "cpu":
        return "fp32"
    return "bf16" if bf16_units else "fp16"


def precision_of(precisions: Precision | Mapping[str, Precision], kind: str) -> Precision:
    """Return the precision of a kind of device; one that is not named computes in fp32."""
    return precisions if isinstance(precisions, str) else precisions.get(kind, "fp32")


def together(of_each: Iterable[Precision]) -> Precision:
    """Return the precision of devices that hold parts of one stage."""
    found = set(of_each)
    return found.pop() if len(found) == 1 else "fp32"


def between(one: Precision, other: Precision) -> Precision:
    """In which activations and their gradients go from one device to another: the narrower of theirs, for what computes in it has no
    more; bf16 between the two of 16 bits, since fp16 has not its range.
    """
    narrow = {one, other} - {"fp32"}
    return "bf16" if "bf16" in narrow else narrow.pop() if narrow else "fp32"


def in_words(precisions: Precision | Mapping[str, Precision]) -> str:
    """For people: ``bf16``, or ``bf16 (A100), fp16 (V100)``."""
    if isinstance(precisions, str):
        return precisions
    kinds: dict[str, list[str]] = {}
    for kind, precision in precisions.items():
        kinds.setdefault(precision, []).append(kind)
    return ", ".join(f"{precision} ({', '.join(of)})" for precision, of in kinds.items())
