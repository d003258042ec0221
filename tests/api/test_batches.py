"""Batches for one's own loop: stopped, and gone on with."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

import heterodyne as hd
from heterodyne.errors import CheckpointError, DataError

DATASET = [{"x": torch.tensor([float(n)]), "y": torch.tensor([2.0 * n])} for n in range(10)]


def consumed(batches: Any, steps: int | None = None) -> list[float]:
    return [float(x) for batch in islice(batches, steps) for x in batch.samples(0, batch.size)["x"]]


def test_a_loop_goes_on_in_the_middle_of_an_epoch() -> None:
    whole = consumed(hd.batches(DATASET, global_batch_size=4, seed=3, epochs=4))
    assert len(whole) == 40
    assert all(sorted(whole[first : first + 10]) == list(range(10)) for first in range(0, 40, 10))
    first = hd.batches(DATASET, global_batch_size=4, seed=3, epochs=4)
    seen = []
    for batch in first:
        seen += [float(x) for x in batch.samples(0, 4)["x"]]
        if len(seen) == 12:
            break
    state = first.state_dict()
    again = hd.batches(DATASET, global_batch_size=4, seed=3, epochs=4)
    again.load_state_dict(state)
    assert seen + consumed(again) == whole
    assert (state["epoch"], state["cursor"]) == (1, 2)
    with pytest.raises(CheckpointError, match="seed: 3 there, 4 here"):
        hd.batches(DATASET, global_batch_size=4, seed=4).load_state_dict(state)
    for changed in (DATASET[:9], [*DATASET, DATASET[0]]):  # the permutation is another one
        with pytest.raises(
            CheckpointError, match=f"samples: 10 there, {len(changed)} here.*give it the data that it began with"
        ):
            hd.batches(changed, global_batch_size=4, seed=3).load_state_dict(state)


def test_streams_and_packing_have_the_same_face() -> None:
    documents = [list(range(n, n + 5)) for n in range(12)]
    for data in (documents, lambda: iter(documents)):
        batches = hd.batches(data, global_batch_size=3, pack_to=4)
        assert batches.example(2)["input_ids"].shape == (2, 4)
        assert next(iter(batches)).samples(1, 2)["labels"].shape == (2, 4)
    padded = hd.batches([{"input_ids": [1] * n} for n in (1, 2, 3)], global_batch_size=3, pad_to=4, shuffle=False)
    assert padded.example()["attention_mask"].sum(1).tolist() == [1, 2, 3]
    with pytest.raises(TypeError, match="forever"):
        len(padded)
    for wrong, says in (({"epochs": 1}, "leave out epochs"), ({"collate": list, "pad_to": 3}, "not both")):
        with pytest.raises(DataError, match=says):
            hd.batches(lambda: iter(documents), global_batch_size=3, **wrong)
    with pytest.raises(DataError, match="a int is no data"):
        hd.batches(3, global_batch_size=3)
    with pytest.raises(DataError, match="the samples make a list; let each be a dict"):
        hd.batches([(1, 2), (3, 4)], global_batch_size=2).example()
