"""Processes that enter the network of an emulated host."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from heterodyne.emulate.network import WorkerNetwork

__all__ = ["enter"]


def enter(network: WorkerNetwork | None) -> None:
    """Move this process into a network; None: it stays where it is."""
    if network is not None:
        with Path("/run/netns", network.namespace).open() as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        os.environ.update(network.environment)
