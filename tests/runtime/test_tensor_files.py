"""Files of tensors are what safetensors reads, and take no memory to write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heterodyne.processes.heap import forget_high_water_mark, high_water_mark_bytes, trim_heap
from heterodyne.runtime.checkpoint.tensor_files import read_tensors, write_tensors


def test_what_is_written_is_read_whatever_it_shares_and_however_it_lies(tmp_path: Path) -> None:
    table = torch.randn(5, 6)
    tensors = {
        "whole": table,
        "tied": table,
        "turned": table.t(),
        "part": table[1:3, 2:4],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "half": torch.randn(3).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "count": torch.arange(7),
        "grad ä": torch.nn.Parameter(torch.randn(2, 2)),
    }
    found, others = read_tensors(tmp_path, write_tensors(tmp_path, 3, tensors), lambda name: name != "count")
    assert others == {"count"}
    for name, value in found.items():
        assert (value.dtype, value.shape) == (tensors[name].dtype, tensors[name].shape)
        assert torch.equal(value, tensors[name])


def test_a_dtype_that_the_format_lacks_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"phase is torch\.complex64"):
        write_tensors(tmp_path, 0, {"phase": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.skipif(not forget_high_water_mark(), reason="this system counts no peak of a process anew")
def test_a_worker_whose_memory_is_full_can_write_what_it_holds(tmp_path: Path) -> None:
    tensors = {str(number): torch.ones(2**22) for number in range(4)}  # 16 MiB each
    trim_heap()
    forget_high_water_mark()
    before = high_water_mark_bytes()
    write_tensors(tmp_path, 0, tensors)
    after = high_water_mark_bytes()
    assert before is not None
    assert after is not None
    assert after - before < 2**22
