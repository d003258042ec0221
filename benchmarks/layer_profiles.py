"""Layer costs out of a file of measured layers: seconds by kind of device, micro-batch and tensor-parallel width, and sizes.

The file is JSON with two lists. ``times``: ``model``, ``device``, ``micro_batch``, ``tp``, ``num_blocks`` and, for ``embedding``,
``block`` and ``head``, [forward, backward, update] in seconds. ``sizes``: ``model``, ``tp`` and, for each layer, ``params_bytes``,
``output_bytes`` and ``kept_bytes`` at micro-batch 1. Between two measured micro-batches seconds are interpolated; beyond them, and
at a width without sizes, nothing is known.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heterodyne.cost.layers import DATA_WIDTHS, LayerCost, Widths
from heterodyne.errors import MeasureError
from heterodyne.json_files import read_json

__all__ = ["LayerProfiles", "LayerSizes", "read_layer_profiles"]

_PARTS = ("embedding", "block", "head")
Seconds = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Bytes of a layer at one tensor-parallel width; ``output`` and ``kept`` of a micro-batch of one sample."""

    parameters: int
    output: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class LayerProfiles:
    """Measured layers of one model, as `LayerCosts`.

    Args:
        times: by (kind of device, width, kind of layer): (micro-batch, (forward, backward, update) in seconds), ascending.
        sizes: by (width, kind of layer).
        optimizer_factor: bytes that the optimizer keeps for each byte of parameters; Adam in the precision of the parameters: 2.
    """

    model: str
    layers: tuple[str, ...]
    times: Mapping[tuple[str, int, str], tuple[tuple[int, Seconds], ...]]
    sizes: Mapping[tuple[int, str], LayerSizes]
    optimizer_factor: float = 2.0
    _known: dict[tuple[str, str, Widths, int], LayerCost | None] = field(
        default_factory=dict, repr=False, compare=False
    )

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        known = {width for kind, width, _ in self.times if kind == device_kind}
        whole = sorted(width for width in known if all((width, part) in self.sizes for part in set(self.layers)))
        return tuple(Widths(tensor=width, data=data) for width in whole for data in DATA_WIDTHS)

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        key = (device_kind, layer_kind, widths, micro_batch)
        if key not in self._known:
            own = None
            if widths.context == 1 and micro_batch % widths.data == 0:
                own = self._cost(device_kind, layer_kind, widths.tensor, micro_batch // widths.data)
            self._known[key] = None if own is None else own.beside(widths.data)
        return self._known[key]

    def _cost(self, device_kind: str, layer_kind: str, width: int, micro_batch: int) -> LayerCost | None:
        rows = self.times.get((device_kind, width, layer_kind))
        size = self.sizes.get((width, layer_kind))
        seconds = _between(rows, micro_batch) if rows else None
        if seconds is None or size is None:
            return None
        forward_s, backward_s, update_s = seconds
        # A recomputed layer keeps its input, which is as large as the output of a block; the first layer reads tokens only.
        reads = self.sizes[width, "block"].output if layer_kind != "embedding" else 0
        return LayerCost(
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=update_s,
            parameter_bytes=size.parameters,
            gradient_bytes=size.parameters,
            optimizer_bytes=round(self.optimizer_factor * size.parameters),
            kept_bytes=size.kept * micro_batch,
            kept_bytes_recomputed=min(reads, size.kept) * micro_batch,
            output_bytes=size.output * micro_batch,
            workspace_bytes=size.output * micro_batch,  # the gradient of the output
        )


def read_layer_profiles(path: Path, model: str) -> LayerProfiles:
    """The layers of one model of the file. Raises MeasureError if the file or the model is not there, or an entry is wrong."""
    try:
        content = read_json(path)
        times = [row for row in content["times"] if row["model"] == model]
        sizes = [row for row in content["sizes"] if row["model"] == model]
        if not times or not sizes:
            there = ", ".join(sorted({row["model"] for row in content["times"]}))
            raise MeasureError(f"{path} has no layers of {model!r}: it has {there}")
        return _profiles(model, times, sizes)
    except OSError as error:
        raise MeasureError(f"layer profiles cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise MeasureError(f"{path} is no file of layer profiles: {error!r}") from error


def _profiles(model: str, times: list[dict[str, Any]], sizes: list[dict[str, Any]]) -> LayerProfiles:
    found: dict[tuple[str, int, str], dict[int, Seconds]] = {}
    for row in times:
        for part in _PARTS:
            forward_s, backward_s, update_s = map(float, row[part])
            rows = found.setdefault((row["device"], int(row["tp"]), part), {})
            rows[int(row["micro_batch"])] = (forward_s, backward_s, update_s)
    return LayerProfiles(
        model=model,
        layers=("embedding", *["block"] * int(times[0]["num_blocks"]), "head"),
        times={key: tuple(sorted(rows.items())) for key, rows in found.items()},
        sizes={
            (int(row["tp"]), part): LayerSizes(
                parameters=int(row[part]["params_bytes"]),
                output=int(row[part]["output_bytes"]),
                kept=int(row[part]["kept_bytes"]),
            )
            for row in sizes
            for part in _PARTS
        },
    )


def _between(rows: tuple[tuple[int, Seconds], ...], micro_batch: int) -> Seconds | None:
    """Straight between the two measured micro-batches around; None outside of them."""
    sizes = [size for size, _ in rows]
    at = bisect_left(sizes, micro_batch)
    if at == len(sizes):
        return None
    if sizes[at] == micro_batch:
        return rows[at][1]
    if at == 0:
        return None
    (small, low), (large, high) = rows[at - 1], rows[at]
    part = (micro_batch - small) / (large - small)
    forward_s, backward_s, update_s = (a + part * (b - a) for a, b in zip(low, high, strict=True))
    return forward_s, backward_s, update_s
