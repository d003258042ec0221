"""A job with a stream of the user's own: packed, shuffled, stopped, and gone on with by another number of ranks, which
read ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from multiprocess.cli_job import make_place

DATA = """
import torch

def documents():
    dice = torch.Generator().manual_seed(0)
    sizes = torch.randint(3, 30, (60,), generator=dice).tolist()
    texts = [torch.randint(0, 50, (size,), generator=dice).tolist() for size in sizes]
    return lambda: iter(texts)
"""

JOB = """
model: {factory: "model.py:build"}
data: {dataset: "own.py:documents", packing: true, shuffle_buffer: 20, sequence_length: 16, validation: "own.py:documents"}
training: {steps: 24, global_batch_size: 8, seed: 3, validation_samples: 8}
parallelism: {strategy: equal, micro_batch_sizes: [4], measure_s: 2}
checkpoint: {every: 8}
metrics: {tensorboard: false}
"""


def test_a_stream_goes_on_in_the_middle_under_another_number_of_workers(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    (tmp_path / "own.py").write_text(DATA)
    (tmp_path / "job.yaml").write_text(JOB)
    for count, name in ((1, "one"), (3, "three")):
        (tmp_path / f"{name}.yaml").write_text(
            (tmp_path / "two.yaml").read_text().replace("count: 2", f"count: {count}")
        )
    short = ("--set", "training.steps=13", "--set", "optimizer.schedule_steps=24")
    for ranks, arguments in (
        (1, ("--cluster", "one.yaml", "--run-dir", "whole")),
        (2, ("--cluster", "two.yaml", "--run-dir", "parts", *short)),
        (3, ("--cluster", "three.yaml", "--run-dir", "parts", "--resume", "--set", "data.workers=1")),
    ):
        status, said = place.run_on(ranks, "train", "job.yaml", *arguments)
        assert status == 0, said
    assert "resuming after step 13" in said
    whole = {at: loss for at, loss in place.losses("whole").items() if at != (13, "validation_loss")}
    parts = {at: loss for at, loss in place.losses("parts").items() if at != (13, "validation_loss")}
    assert parts == pytest.approx(whole, rel=1e-5)
