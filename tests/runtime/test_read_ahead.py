"""Processes that read ahead change nothing but the time: samples, positions and faults are those of reading in place."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import default_collate

from heterodyne.errors import DataError
from heterodyne.runtime.data.dataset import DatasetSource
from heterodyne.runtime.data.stream import StreamSource
from heterodyne.runtime.slices import BatchSource
from runtime.schedules import live_through
from runtime.test_stream import Numbers


class Drawn:
    """Sample i is i, what is drawn for it, and the process that has read it."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index, "noise": torch.rand(()), "process": os.getpid()}


def read(batch: BatchSource, first: int, count: int) -> list[Any]:
    found = batch.samples(first, count)
    return list(zip(found["x"].tolist(), found["noise"].tolist(), strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_a_dataset_read_ahead_is_the_dataset_under_any_schedule(seed: int) -> None:
    dice = random.Random(seed)
    count, batch_size = dice.randint(3, 40), dice.randint(1, 12)
    opened: list[DatasetSource] = []

    def source(workers: int) -> DatasetSource:
        opened.append(DatasetSource(dataset=Drawn(count), batch_size=batch_size, seed=seed, workers=workers))
        return opened[-1]

    ways = [
        live_through(partial(source, workers), read, seed, batch_size=batch_size, steps=12)
        for workers in (0, 1 + seed % 2)
    ]
    for each in opened:
        each.close()
    assert ways[0] == ways[1]


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_read_ahead_is_the_stream_under_any_schedule(seed: int) -> None:
    dice = random.Random(seed)
    slots, buffer, length = dice.randint(1, 4), dice.randint(0, 9), dice.choice([None, 5])
    documents = [[100 * n + k for k in range(dice.randint(1, 9))] for n in range(slots * dice.randint(2, 9))]
    opened: list[StreamSource] = []

    def source(workers: int) -> StreamSource:
        stream: Any = Numbers(7 * slots) if length is None and seed % 2 else lambda: iter(documents)
        opened.append(
            StreamSource(
                stream,
                batch_size=slots,
                seed=seed,
                shuffle_buffer=buffer,
                packed_length=length,
                collate=lambda samples: {"x": samples},
                workers=workers,
            )
        )
        return opened[-1]

    def ids(batch: BatchSource, first: int, count: int) -> list[Any]:
        return [str(sample) for sample in batch.samples(first, count)["x"]]

    ways = [live_through(partial(source, workers), ids, seed, batch_size=slots, steps=12) for workers in (0, 1)]
    for each in opened:
        each.close()
    assert ways[0] == ways[1]


def test_only_the_first_step_is_read_by_the_rank_itself_and_each_process_reads_its_own_samples_only() -> None:
    source = DatasetSource(dataset=Drawn(30), batch_size=6, seed=0, workers=2)
    readers = []
    before = torch.get_rng_state()
    for step in range(6):
        batch = source.batch(step)
        readers.append({*batch.samples(0, 2)["process"].tolist(), *batch.samples(2, 1)["process"].tolist()})
    assert torch.equal(before, torch.get_rng_state()), "torch draws a seed for its processes"
    assert readers[0] == {os.getpid()}
    assert all(len(each) == 1 for each in readers)
    assert len(set.union(*readers[1:])) == 2
    assert os.getpid() not in set.union(*readers[1:])
    again = source.batch(2).samples(1, 3)  # back, and other places
    assert again["x"].tolist() == source.batch_at(12, 6).samples(1, 3)["x"].tolist()
    processes = [psutil.Process(pid) for pid in set.union(*readers[1:])]
    source.close()
    assert not psutil.wait_procs(processes, timeout=20)[1]


def test_a_stream_that_is_closed_goes_on_where_it_was() -> None:
    for stream in (Numbers(20), lambda: iter(range(20))):
        source = StreamSource(stream, batch_size=3, seed=0, shuffle_buffer=6, workers=1)
        plain = StreamSource(range(20), batch_size=3, seed=0, shuffle_buffer=6)
        for step in range(16):
            if step % 5 == 4:
                source.close()
            assert source.batch(step).samples(0, 3).tolist() == plain.batch(step).samples(0, 3).tolist()  # type: ignore[attr-defined]
        source.close()


class Broken(Drawn):
    def __init__(self, count: int, way: str) -> None:
        super().__init__(count)
        self.way = way

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 17 and self.way == "raises":
            raise RuntimeError("the file is gone")
        if index == 17 and self.way == "dies":
            time.sleep(0.3)  # until the rank waits for it: a handler of the script may raise anywhere else
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_sample_that_raises_is_named_with_its_line_when_its_step_comes() -> None:
    source = DatasetSource(dataset=Broken(20, "raises"), batch_size=4, seed=0, shuffle=False, workers=2)
    for step in range(4):
        source.batch(step).samples(0, 4)
    with pytest.raises(DataError, match=r"(?s)sample 17 .*RuntimeError: the file is gone\n.*test_read_ahead") as caught:
        source.batch(4).samples(0, 4)
    assert "Traceback" not in str(caught.value)
    source.close()


@pytest.mark.parametrize("theirs", [False, True], ids=["alone", "beside a loader of the script"])
def test_a_process_that_dies_is_told_of_with_the_sample_that_it_was_reading(theirs: bool) -> None:
    handler = signal.getsignal(signal.SIGCHLD)
    if theirs:  # a DataLoader of the script leaves such a handler behind
        signal.signal(signal.SIGCHLD, lambda *_: torch._C._error_if_any_worker_fails())
    source = DatasetSource(dataset=Broken(20, "dies"), batch_size=4, seed=0, shuffle=False, workers=1)
    for step in range(2):
        source.batch(step).samples(0, 4)

    def go_on() -> None:
        for step in range(2, 5):
            source.batch(step).samples(0, 4)

    with pytest.raises(DataError, match="was killed by SIGKILL while it read sample 17 of the dataset"):
        go_on()
    source.close()
    signal.signal(signal.SIGCHLD, handler)


def test_faults_of_a_stream_come_in_words_after_what_was_read_before() -> None:
    def broken() -> Iterator[int]:
        yield from range(5)
        raise RuntimeError("no connection")

    source = StreamSource(broken, batch_size=2, seed=0, workers=1)
    assert [source.batch(step).samples(0, 2).tolist() for step in (0, 1)] == [[0, 1], [2, 3]]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"(?s)^sample 5 of the stream cannot be read: RuntimeError: no connection"):
        source.batch(2)
    source.close()
    with pytest.raises(DataError, match="no parts that 2 workers could read: set workers to 1"):
        StreamSource([1], batch_size=1, seed=0, workers=2)


def test_shared_memory_that_is_full_or_missing_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError(
            "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)"
        )

    sources = [
        DatasetSource(dataset=Drawn(30), batch_size=6, seed=0, collate=collate, workers=2)
        for collate in (full, default_collate)
    ]
    with pytest.raises(DataError, match=r"(?s)No space left on device .*--shm-size=8g.* or set workers to 0"):
        sources[0].batch(0).samples(0, 2)
    sources[1].batch(0).samples(0, 2)  # shows what the rank reads
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with pytest.raises(DataError, match=r"(?s)cannot be started: .*No space left on device .*--shm-size=8g"):
        sources[1].batch(1).samples(0, 2)


def test_what_cannot_be_pickled_is_refused_in_words_where_processes_are_not_forked() -> None:
    samples = [lambda: 1]
    source = DatasetSource(
        dataset=samples,
        batch_size=1,
        seed=0,
        collate=lambda found: {"x": torch.ones(1)},
        workers=1,
        start_method="spawn",
    )
    source.batch(0).samples(0, 1)
    with pytest.raises(DataError, match=r"(?s)cannot be started: .*define their classes and functions at the top"):
        source.batch(1).samples(0, 1)


def rank_with_readers(told: Callable[[Iterable[int]], None]) -> None:
    """Tells the ids of its processes, which then read on."""
    source = DatasetSource(dataset=Drawn(30), batch_size=6, seed=0, workers=2)
    found: set[int] = set()
    for step in range(4):
        found |= set(source.batch(step).samples(0, 6)["process"].tolist())
    told(found - {os.getpid()})


ENDS = """
import sys
sys.path.insert(0, sys.argv[1])
from runtime.test_read_ahead import rank_with_readers
rank_with_readers(print)
"""


def test_no_process_outlives_a_rank_that_ends() -> None:
    command = [sys.executable, "-c", ENDS, str(Path(__file__).resolve().parents[1])]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert_both_end([int(pid) for pid in re.findall(r"\d+", told)])


def test_no_process_outlives_a_rank_that_is_killed() -> None:
    ours, theirs = multiprocessing.Pipe()

    def told(readers: Iterable[int]) -> None:
        theirs.send(readers)
        signal.pause()  # while the source is there, whose end would be theirs

    rank = multiprocessing.get_context("fork").Process(target=rank_with_readers, args=(told,))
    rank.start()
    assert rank.pid is not None
    try:
        readers = sorted(ours.recv())
        assert all(psutil.pid_exists(pid) for pid in readers)
        assert all(os.getpgid(pid) != os.getpgid(rank.pid) for pid in readers), "signals of the run are for the rank"
    finally:
        rank.kill()
        rank.join()
    assert_both_end(readers)


def assert_both_end(readers: Sequence[int]) -> None:
    assert len(readers) == 2
    until = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in readers):
        assert time.monotonic() < until, "a process outlived its rank"
        time.sleep(0.02)
