"""Freed memory stays with the process, so that using it again makes no new pages."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from heterodyne.runtime.host_heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def once():
    tensors = [torch.ones(2**18) for _ in range(20)]  # a MiB each
for _ in range(5):
    once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def new_pages(way: str) -> int:
    """Under thresholds that give each large block back at once: left to itself, glibc may or may not."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
    command = [sys.executable, "-c", PROGRAM, way]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_memory_that_was_freed_is_used_again() -> None:
    """Ten times twenty tensors of 256 pages: told, glibc makes few of these pages anew; else all."""
    tenth = 10 * 20 * 256 // 10
    assert new_pages("keep") < tenth
    assert new_pages("as it is") > 9 * tenth
