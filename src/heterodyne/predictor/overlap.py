"""What of the exchanges at the end of a step computing hides: frameworks reduce the gradients of a layer while those of earlier ones are
computed.

So do PyTorch's DistributedDataParallel (Li et al., VLDB 2020), Megatron-LM and FSDP. All figures are seconds.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from heterodyne.predictor.constants import Stated

__all__ = ["exposed_s", "last_bucket_s", "returned_s"]

Seconds = TypeVar("Seconds", float, NDArray[np.float64])
"""Of one exchange, or of many."""


def exposed_s(exchange_s: Seconds, backward_s: Seconds, stated: Stated) -> Seconds:
    """Of an exchange of gradients, what nothing hides, where the last backward takes ``backward_s``."""
    hidden: Seconds = np.minimum(stated.hidden * exchange_s, backward_s)
    return exchange_s - hidden


def last_bucket_s(exchange_s: Seconds, stated: Stated) -> Seconds:
    """Of an exchange of gradients, what nothing hides however long the backward takes."""
    return (1 - stated.hidden) * exchange_s


def returned_s(exchange_s: Seconds, stated: Stated) -> Seconds:
    """Of updated parameters on their way back, what shows."""
    return stated.returned * exchange_s
