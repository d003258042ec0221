"""The cost of one stage on one rank: seconds and bytes of each pass of each micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

__all__ = ["StageCosts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts:
    """Each field has one value a micro-batch, seconds of that device when nothing disturbs it, or bytes. Empty: it costs nothing.

    Args:
        forward_s, backward_s: of F and B.
        input_s, weight_s: of I and W. Empty: what this stage does not run in halves.
        halved_forward_s: of F where backwards come in halves, which it prepares. Empty: it takes what F does otherwise.
        recompute_s: of R; inside B or I where a micro-batch has no R.
        kept_bytes: what F adds, and what is gone when the backward is over.
        recomputed_bytes: what R adds to that.
        redone_bytes: the most that comes and goes inside a B or I that makes again what was not kept.
        weight_bytes: what is left of all that between I and W.
        made_bytes: of gradients that the first backward leaves behind (W, where it comes in halves, but for ``input_made_bytes`` of I).
        first_bytes: the most that comes and goes inside the first backward, ``made_bytes`` and ``redone_bytes`` among that, on top of what
            was there before.
        last_bytes, summed_bytes: the same for the last backward, of sums that are made apart from the gradients.
        gradient_bytes: gradients that come from other ranks and leave for other ranks, while B or I runs.
        reloaded_bytes: what RELOAD adds to ``kept_bytes``, of activations that wait on the host.
        leaving_s: of copies there that go on when F is over; OFFLOAD waits for them.
        fetch_s: what a backward waits for copies back, among its seconds, where it has no RELOAD.
        reload_s, lead_s: of all copies back, and of the first part of them, after which the backward waits for none.
        host_bytes: what is in the memory of the host from F to B or I.
        together: the ranks that hold parts of this stage and meet inside of F, B, I and R, this one included; their seconds are then those
            from the moment at which the last of them begins until all are done. Empty: this rank needs nobody.
        exchanges: of the seconds above those in which they exchange something.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_s: tuple[float, ...] = ()
    weight_s: tuple[float, ...] = ()
    halved_forward_s: tuple[float, ...] = ()
    recompute_s: tuple[float, ...] = ()
    kept_bytes: tuple[int, ...] = ()
    recomputed_bytes: tuple[int, ...] = ()
    redone_bytes: tuple[int, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    gradient_bytes: tuple[int, ...] = ()
    reloaded_bytes: tuple[int, ...] = ()
    leaving_s: tuple[float, ...] = ()
    fetch_s: tuple[float, ...] = ()
    reload_s: tuple[float, ...] = ()
    lead_s: tuple[float, ...] = ()
    host_bytes: tuple[int, ...] = ()
    made_bytes: int = 0
    input_made_bytes: int = 0
    first_bytes: tuple[int, ...] = ()
    summed_bytes: int = 0
    last_bytes: tuple[int, ...] = ()
    together: tuple[int, ...] = ()
    exchanges: StageCosts | None = None

    def repeated(self, batches: int) -> StageCosts:
        """Return the costs of so many batches, one behind the other."""
        of_each = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "together"}
        longer: dict[str, Any] = {n: values * batches for n, values in of_each.items() if isinstance(values, tuple)}
        return replace(self, **longer, exchanges=self.exchanges and self.exchanges.repeated(batches))

    @property
    def compute_s(self) -> float:
        """Seconds of all passes: no order of them takes less. What a micro-batch has counts whole or in halves, whatever is less."""
        halves = [a + b for a, b in zip(self.input_s, self.weight_s, strict=True)] or self.backward_s
        backward = sum(min(whole, split) for whole, split in zip(self.backward_s, halves, strict=True))
        forward = min(sum(self.forward_s), sum(self.halved_forward_s or self.forward_s))
        return forward + backward + sum(self.recompute_s)
