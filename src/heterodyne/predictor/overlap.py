"""What of the exchanges at the end of a step computing hides: frameworks reduce the gradients of a layer while those of earlier ones are
computed.

So do PyTorch's DistributedDataParallel (Li et al., VLDB 2020), Megatron-LM and FSDP. All figures are seconds.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from heterodyne.predictor.constants import constants
from heterodyne.predictor.software import Software

__all__ = ["last_bucket_s", "returned_s", "shown_s"]

Seconds = TypeVar("Seconds", float, NDArray[np.float64])
"""Of one exchange, or of many."""


def shown_s(gradients_s: Seconds, updated_s: Seconds | float, backward_s: Seconds, software: Software) -> Seconds:
    """Of an exchange of gradients and of updated parameters on their way back, what nothing hides: all of it where software exchanges
    gradients after the backward, else what is left of them beside a last backward of ``backward_s``, and `returned_s`.
    """
    if not software.overlap_gradients:
        return gradients_s + updated_s
    stated = constants().stated
    hidden: Seconds = np.minimum(stated.hidden * gradients_s, backward_s)
    return gradients_s - hidden + stated.returned * updated_s


def last_bucket_s(exchange_s: Seconds) -> Seconds:
    """Of an exchange of gradients, what nothing hides however long the backward takes."""
    return (1 - constants().stated.hidden) * exchange_s


def returned_s(exchange_s: Seconds) -> Seconds:
    """Of updated parameters on their way back, what shows."""
    return constants().stated.returned * exchange_s
