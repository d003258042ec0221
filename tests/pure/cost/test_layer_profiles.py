"""Measured layers as costs: what was measured comes back, between is between, and beyond is nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from heterodyne.cost.layer_profiles import read_layer_profiles
from heterodyne.cost.layers import Widths
from heterodyne.errors import MeasureError

MIB = 2**20


def _written(path: Path) -> Path:
    times = [
        {
            "model": "tiny",
            "device": "fast",
            "micro_batch": micro_batch,
            "tp": width,
            "num_blocks": 3,
            "embedding": [0.1, 0.0, 0.5],
            "block": [1.0 * micro_batch, 2.0 * micro_batch, 0.5],
            "head": [2.0 * micro_batch, 3.0 * micro_batch, 0.5],
        }
        for micro_batch, width in ((1, 1), (4, 1), (1, 2), (1, 4))
    ]
    sizes = [
        {
            "model": "tiny",
            "tp": width,
            "num_blocks": 3,
            "embedding": {"params_bytes": 4 * MIB, "output_bytes": MIB, "kept_bytes": MIB},
            "block": {"params_bytes": 8 * MIB // width, "output_bytes": MIB, "kept_bytes": 6 * MIB},
            "head": {"params_bytes": 4 * MIB, "output_bytes": 2 * MIB, "kept_bytes": 3 * MIB},
        }
        for width in (1, 2)
    ]
    path.write_text(json.dumps({"times": times, "sizes": sizes}), encoding="utf-8")
    return path


def test_layers_are_those_of_the_model_in_order(tmp_path: Path) -> None:
    costs = read_layer_profiles(_written(tmp_path / "p.json"), "tiny")
    assert costs.layers == ("embedding", "block", "block", "block", "head")


def test_a_width_without_sizes_is_not_known(tmp_path: Path) -> None:
    costs = read_layer_profiles(_written(tmp_path / "p.json"), "tiny")
    assert costs.widths("fast") == tuple(Widths(tensor=tensor, data=data) for tensor in (1, 2) for data in (1, 2, 4, 8))
    assert costs.widths("other") == ()
    assert costs.cost("fast", "block", Widths(4), 1) is None


def test_devices_that_share_a_micro_batch_take_what_one_takes_for_its_part(tmp_path: Path) -> None:
    costs = read_layer_profiles(_written(tmp_path / "p.json"), "tiny")
    for data in (2, 4):
        shared, one = costs.cost("fast", "block", Widths(data=data), 2 * data), costs.cost("fast", "block", Widths(), 2)
        assert one is not None
        assert shared == replace(one, output_bytes=data * one.output_bytes)
    assert costs.cost("fast", "block", Widths(data=2), 3) is None
    assert costs.cost("fast", "block", Widths(data=2), 10) is None
    assert costs.cost("fast", "block", Widths(context=2), 2) is None


def test_between_two_measured_micro_batches_it_is_straight_and_beyond_nothing(tmp_path: Path) -> None:
    costs = read_layer_profiles(_written(tmp_path / "p.json"), "tiny")
    for micro_batch in (1, 2, 3, 4):
        cost = costs.cost("fast", "block", Widths(), micro_batch)
        assert cost is not None
        assert cost.forward_s == pytest.approx(1.0 * micro_batch)
        assert cost.backward_s == pytest.approx(2.0 * micro_batch)
        assert cost.kept_bytes == 6 * MIB * micro_batch
    assert costs.cost("fast", "block", Widths(), 5) is None
    assert costs.cost("fast", "block", Widths(2), 2) is None


def test_recomputing_keeps_what_the_layer_reads(tmp_path: Path) -> None:
    costs = read_layer_profiles(_written(tmp_path / "p.json"), "tiny")
    block, embedding = costs.cost("fast", "block", Widths(), 2), costs.cost("fast", "embedding", Widths(), 2)
    assert block is not None
    assert embedding is not None
    assert block.kept_bytes_recomputed == 2 * MIB < block.kept_bytes
    assert embedding.kept_bytes_recomputed == 0
    assert block.state_bytes == 3 * block.parameter_bytes


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    path = _written(tmp_path / "p.json")
    with pytest.raises(MeasureError, match="it has tiny"):
        read_layer_profiles(path, "huge")
    with pytest.raises(MeasureError, match="cannot be read"):
        read_layer_profiles(tmp_path / "none.json", "tiny")
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(MeasureError, match="no file of layer profiles"):
        read_layer_profiles(path, "tiny")
