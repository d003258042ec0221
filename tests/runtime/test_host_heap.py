"""Freed memory stays with the process, so that using it again makes no new pages."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
import weakref

import pytest

from heterodyne.processes.heap import give_back_memory, only_new_garbage

PROGRAM = """
import resource, torch
from heterodyne.processes.heap import keep_freed_memory
def once():
    tensors = [torch.ones(2**18) for _ in range(20)]  # a MiB each
def new_pages():
    for _ in range(5):
        once()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        once()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
as_it_is = new_pages()
assert keep_freed_memory()
print(as_it_is, new_pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_memory_that_was_freed_is_used_again() -> None:
    """Ten times twenty tensors of 256 pages: told, glibc makes few of these pages anew; else all.

    As it is means: under thresholds that give each large block back at once. Left to itself, glibc may or may not.
    """
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    as_it_is, kept = map(int, run.stdout.split())
    tenth = 10 * 20 * 256 // 10
    assert kept < tenth
    assert as_it_is > 9 * tenth


class Circle:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_looked_for_among_what_is_new() -> None:
    gc.unfreeze()  # what stays of the tests before
    old = Circle()
    with only_new_garbage():
        new = Circle()
        old_one, new_one = weakref.ref(old), weakref.ref(new)
        del old, new
        give_back_memory()
        assert new_one() is None
        assert old_one() is not None
    give_back_memory()
    assert old_one() is None


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with only_new_garbage():
        pass
    assert gc.get_freeze_count() > 0
