"""Batches for one's own loop: stopped, and gone on with."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

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


@pytest.mark.parametrize("draws", [False, True], ids=["default collate", "collate that draws"])
def test_samples_that_are_tuples_train_as_tuples_of_tensors_do(draws: bool) -> None:
    """As `TensorDataset` and image datasets have them; with `draws` each sample is collated by itself."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(16, 4), torch.randint(0, 3, (16,))
    model = nn.Linear(4, 3)

    def collate(samples: list[Any]) -> Any:
        torch.rand(())
        return default_collate(samples)

    batches = hd.batches(
        TensorDataset(inputs, targets), global_batch_size=8, epochs=1, shuffle=False, collate=collate if draws else None
    )
    example = batches.example()
    assert [tuple(tensor.shape) for tensor in example] == [(4, 4), (4,)]
    expected = [nn.functional.cross_entropy(model(inputs[n : n + 8]), targets[n : n + 8]).item() for n in (0, 8)]
    with hd.distribute(
        model,
        example,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        global_batch_size=8,
        plan=hd.PlanOptions(measure_s=0.05, rehearsal_s=0),
    ) as trainer:
        assert [trainer.step(batch).loss for batch in batches] == pytest.approx(expected, rel=1e-5)
        wrong = hd.batches(TensorDataset(inputs, targets + 3), global_batch_size=8, shuffle=False)
        with pytest.raises(DataError, match=r"sample 0 \(number 0 of the dataset\): target holds [345]"):
            trainer.step(next(iter(wrong)))
