"""Streams: what is consumed depends on no rank and no interruption, and every element comes once an epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from heterodyne.errors import DataError
from heterodyne.runtime.data.packing import PackedRows
from heterodyne.runtime.data.stream import StreamSource
from heterodyne.runtime.slices import BatchSource
from runtime.schedules import live_through


class Numbers:
    """0 to count - 1, with the state protocol."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.at = 0
        self.begin = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.begin = self.begin, 0
        while self.at < self.count:
            self.at += 1
            self.read += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


def ids(batch: BatchSource, first: int, count: int) -> list[int]:
    found: Any = batch.samples(first, count)
    return list(found.tolist())


@pytest.mark.parametrize("seed", range(50))
def test_every_element_comes_once_an_epoch_in_the_same_order_under_any_schedule(seed: int) -> None:
    dice = random.Random(2000 + seed)
    slots, each, buffer = dice.randint(1, 6), dice.randint(1, 3), dice.randint(0, 12)
    batch_size = slots * each
    count = slots * dice.randint(1, 12)
    steps = -(-2 * count // batch_size)
    resumable = bool(dice.randint(0, 1))

    def source() -> StreamSource:
        stream = Numbers(count) if resumable else (lambda: iter(range(count)))
        return StreamSource(stream, batch_size=batch_size, seed=seed, slots=slots, shuffle_buffer=buffer)

    consumed = live_through(source, ids, seed, batch_size=batch_size, steps=steps)
    undisturbed = source()
    assert consumed == [n for step in range(steps) for n in ids(undisturbed.batch(step), 0, batch_size)]
    for slot in range(slots):
        own = [n for p, n in enumerate(consumed) if p % batch_size // each == slot]
        epoch = list(range(slot, count, slots))
        for first in range(0, len(own) - len(epoch) + 1, len(epoch)):
            assert sorted(own[first : first + len(epoch)]) == epoch
    if buffer == 0:
        assert sorted(consumed[:count]) == list(range(count)) or batch_size > slots


def documents(count: int) -> list[list[int]]:
    dice = random.Random(7)
    return [[100 * n + k for k in range(dice.randint(0, 9))] for n in range(count)]


@pytest.mark.parametrize("seed", range(50))
def test_packed_documents_lose_no_token_under_any_schedule(seed: int) -> None:
    dice = random.Random(3000 + seed)
    slots, length, buffer = dice.randint(1, 4), dice.randint(1, 12), dice.randint(0, 6)
    texts = documents(slots * dice.randint(2, 12))
    texts = [text or [1] for text in texts]
    steps = -(-sum(map(len, texts)) // (slots * length))

    def source() -> StreamSource:
        return StreamSource(texts, batch_size=slots, seed=seed, shuffle_buffer=buffer, packed_length=length)

    def rows(batch: BatchSource, first: int, count: int) -> list[Any]:
        return [tuple(row) for row in batch.samples(first, count)["input_ids"].tolist()]

    consumed: Any = live_through(source, rows, seed, batch_size=slots, steps=steps)
    for slot in range(slots):
        tokens = [token for row in consumed[slot::slots] for token in row]
        whole = sorted(token for text in texts[slot::slots] for token in text)
        epochs = len(tokens) // len(whole)
        assert sorted(tokens[: epochs * len(whole)]) == sorted(whole * epochs)
        for text in texts[slot::slots]:
            at = tokens.index(text[0]) if text[0] in tokens else len(tokens)
            assert tokens[at : at + len(text)] == text[: len(tokens) - at], "a document stays in one piece"


def test_a_stream_that_knows_its_place_is_not_read_again() -> None:
    first = StreamSource(Numbers(1000), batch_size=4, seed=0, shuffle_buffer=40)
    for step in range(50):
        first.batch(step)
    stream = Numbers(1000)
    again = StreamSource(stream, batch_size=4, seed=0, shuffle_buffer=40)
    state = first.state_dict()
    assert state is not None
    again.load_state_dict(state)
    assert ids(again.batch(50), 0, 4) == ids(first.batch(50), 0, 4)
    assert stream.read <= 4


def test_what_cannot_be_a_stream_is_refused_in_words() -> None:
    with pytest.raises(DataError, match="a generator can be read only once: pass the function"):
        StreamSource((n for n in range(3)), batch_size=1, seed=0).batch(0)
    with pytest.raises(DataError, match="fewer samples than there are slots"):
        StreamSource([1, 2], batch_size=3, seed=0).batch(0)
    with pytest.raises(DataError, match="has no samples"):
        StreamSource(list, batch_size=3, seed=0).batch(0)
    with pytest.raises(DataError, match="3 slots do not divide a batch of 4"):
        StreamSource([1], batch_size=4, seed=0, slots=3)

    def broken() -> Iterator[int]:
        yield 1
        raise RuntimeError("no connection")

    with pytest.raises(
        DataError, match=r"(?s)sample 1 of the stream cannot be read: RuntimeError: no connection.*test_stream"
    ):
        StreamSource(broken, batch_size=2, seed=0).batch(0)


def test_what_a_stream_draws_belongs_to_its_elements_and_leaves_the_run_s_generators_alone() -> None:
    def drawing() -> Iterator[float]:
        for _ in range(9):
            yield random.random()

    random.seed(1)
    before = random.getstate()
    found = []
    for workers in (0, 1):
        source = StreamSource(drawing, batch_size=3, seed=0, shuffle_buffer=3, validation=drawing, workers=workers)
        found.append([ids(source.batch(step), 0, 3) for step in range(5)])
        source.validation_batches(4)
        random.random()
        random.setstate(before)
        source.close()
        assert ids(source.batch(5), 0, 3)
        assert random.getstate() == before
    assert found[0] == found[1]
    assert len({number for batch in found[0][:3] for number in batch}) == 9


def test_validation_takes_the_first_samples_of_its_own_stream() -> None:
    source = StreamSource(Numbers(10), batch_size=4, seed=0, validation=range(100, 106))
    assert [ids(batch, 0, batch.size) for batch in source.validation_batches(99)] == [[100, 101, 102, 103], [104, 105]]
    assert [batch.size for batch in source.validation_batches(3)] == [3]


@pytest.mark.parametrize("length", [1, 4, 7])
def test_packed_rows_are_the_joined_documents_cut(length: int) -> None:
    texts = documents(30)
    rows = PackedRows([{"input_ids": text} for text in texts], length)
    joined = torch.tensor([token for text in texts for token in text])
    assert len(rows) == len(joined) // length
    for index in reversed(range(len(rows))):
        assert torch.equal(rows[index]["input_ids"], joined[index * length : (index + 1) * length])
    with pytest.raises(DataError, match="its length was given as"):
        PackedRows([[1, 2], [3]], 3, [1, 2])[0]
    with pytest.raises(DataError, match="have 3 tokens, one packed row needs 4"):
        PackedRows([[1, 2], [3]], 4)
