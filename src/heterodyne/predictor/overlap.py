"""What of an exchange of gradients computing hides: frameworks reduce the gradients of a layer while those of earlier ones are computed.

So do PyTorch's DistributedDataParallel (Li et al., VLDB 2020), Megatron-LM and FSDP.
"""

from __future__ import annotations

__all__ = ["HIDDEN", "RETURNED", "exposed_s"]

HIDDEN = 0.9
"""Of the reduction of gradients; the last bucket waits for the last layer."""
RETURNED = 0.5
"""Of updated parameters on their way back, the part that shows: the other one hides behind the next forward."""


def exposed_s(exchange_s: float, backward_s: float) -> float:
    """Seconds of an exchange of gradients that nothing hides, where the last backward takes ``backward_s``."""
    return exchange_s - min(HIDDEN * exchange_s, backward_s)
