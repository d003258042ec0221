"""Dropout whose masks belong to the samples, not to the plan.

`SampleDropout` is a function mode: while it is active, dropout takes its masks from an integer hash of (seed, step, call in
the forward, global sample, element of the sample). So a sample gets the same masks on one device, under any plan, on CPU and
CUDA alike, and after a resume; which makes dropout as exact as everything else. The hash is the 32-bit mixer "lowbias32" of
Chris Wellons (hash-prospector), fed with two 32-bit keys a row.

It covers `dropout`, `dropout1d` to `dropout3d`, `alpha_dropout`, `scaled_dot_product_attention` (computed in its mathematical
form), `nn.MultiheadAttention`, and the noise of `exact.noise`. Dim 0 of what is dropped out must be the samples, or k rows a
sample, sample by sample, as [B*T, C] is. A model with other random ops is refused (`heterodyne.graph.draws`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.exact.interception import Interception
from heterodyne.runtime.exact.noise import SampleNoise

__all__ = [
    "Draws",
    "SampleDropout",
    "draw_call_number",
    "draws_call_number",
    "in_part",
    "splitmix64",
    "turn_to",
]

_MASK = 2**64 - 1
_CALL_NUMBERS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class _Part:
    """A slice of a dim of what numbers are drawn for: from ``first`` on, of ``full``."""

    dim: int
    first: int
    full: int


_PARTS: ContextVar[tuple[_Part, ...]] = ContextVar("parts", default=())
_SOME: ContextVar[range | None] = ContextVar("some", default=None)


@contextmanager
def in_part(dim: int, first: int, full: int) -> Iterator[None]:
    """Draw for a tensor inside a slice of what the whole tensor would be given: in ``dim`` (counted from 0), from place ``first`` on of
    ``full`` places. One in another: a slice in several dims.
    """
    token = _PARTS.set((*_PARTS.get(), _Part(dim, first, full)))
    try:
        yield
    finally:
        _PARTS.reset(token)


def turn_to(some: range | None) -> None:
    """Draw from here on for these samples of the micro-batch only, counted from 0; None: for all of them.

    The parts of a micro-batch may take turns. It holds in this thread, until the next forward, recomputation or backward begins.
    """
    _SOME.set(some)


def splitmix64(*numbers: int) -> int:
    """A 64-bit hash of whole numbers (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The masks of one micro-batch: which samples it holds, int64 [b], and the calls that its forward has made so far.

    ``first_call``: how many calls are made before, in parts of the model that other ranks run.
    """

    step: int
    samples: Tensor
    first_sample: int  # on the host: to read it from the device would wait for all that this has to do
    first_call: int = 0
    calls: dict[int, int] = field(default_factory=dict)
    _some: dict[range, Draws] = field(default_factory=dict, repr=False)

    def of(self, some: range) -> Draws:
        """Those of some of the samples, counted from 0. They make all calls of the forward, and so count for themselves."""
        if some not in self._some:
            self._some[some] = Draws(
                step=self.step,
                samples=self.samples[some.start : some.stop],
                first_sample=self.first_sample,
                first_call=self.first_call,
            )
        return self._some[some]


class SampleDropout(Interception):
    """While active (`forward`, `backward`), dropout is a function of the samples.

    Recomputation (`torch.utils.checkpoint`) gets the masks of its forward: a call is known again by the state of torch's
    generator, which checkpointing restores. So the mode is kept active in the backward too.

    ``first_sample``: the place in the global batch at which the batch of this run begins, where that is a part of it.
    """

    def __init__(self, *, seed: int, device: torch.device, first_sample: int = 0) -> None:
        super().__init__(
            {
                F.dropout: self._dropout,
                torch.dropout: _by_torch_names(self._dropout),
                torch.feature_dropout: _by_torch_names(self._dropout_of_channels),
                torch.alpha_dropout: _by_torch_names(self._alpha_dropout),
                F.dropout1d: self._dropout_of_channels,
                F.dropout2d: self._dropout_of_channels,
                F.dropout3d: self._dropout_of_channels,
                F.alpha_dropout: self._alpha_dropout,
                F.scaled_dot_product_attention: self._attention,
                **SampleNoise(self._bits).handlers(),
            }
        )
        self._seed = seed
        self._device = device
        self._first = first_sample
        self._of_all = Draws(step=0, samples=torch.zeros(0, dtype=torch.int64), first_sample=0)
        self._positions = torch.empty(0, dtype=torch.int32, device=device)

    def draws(self, step: int, samples: Sequence[int], first_call: int = 0) -> Draws:
        """For the micro-batch of these samples (places in the batch of this run) of that step."""
        of = self._first + (
            torch.arange(samples.start, samples.stop, samples.step, device=self._device)
            if isinstance(samples, range)
            else torch.tensor(samples, dtype=torch.int64, device=self._device)
        )
        first = self._first + samples[0] if samples else 0
        return Draws(step=step, samples=of, first_sample=first, first_call=first_call)

    @contextmanager
    def forward(self, draws: Draws) -> Iterator[None]:
        """Active for the forward of a micro-batch; torch's generators are seeded for it, and given back as they were."""
        self._now(draws)
        accelerators = [self._device] if self._device.type != "cpu" else []
        with torch.random.fork_rng(accelerators, device_type=self._device.type if accelerators else "cuda"):
            torch.manual_seed(splitmix64(self._seed, draws.step, draws.first_sample) >> 1)
            with self:
                yield

    @contextmanager
    def backward(self, draws: Draws) -> Iterator[None]:
        """Active for the backward of a micro-batch."""
        self._now(draws)
        with self:
            yield

    def _now(self, draws: Draws) -> None:
        self._of_all = draws
        turn_to(None)

    @property
    def _draws(self) -> Draws:
        some = _SOME.get()
        return self._of_all if some is None else self._of_all.of(some)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        return _scaled(input, self._kept(input.shape, p).to(input.dtype), p, inplace)

    def _dropout_of_channels(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0.0:
            return input
        kept = self._kept(input.shape[:2], p).to(input.dtype)
        return _scaled(input, kept.view(*kept.shape, *([1] * (input.dim() - 2))), p, inplace)

    def _alpha_dropout(self, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        """Keeps mean and variance of a SELU network (Klambauer et al., "Self-Normalizing Neural Networks", 2017)."""
        if not training or p == 0.0:
            return input
        saturated = -1.7580993408473766
        scale = (1 - p + p * (1 - p) * saturated**2) ** -0.5 if p < 1 else 0.0
        kept = self._kept(input.shape, p)
        output = torch.where(kept, input, saturated) * scale - scale * p * saturated
        return input.copy_(output) if inplace else output

    def _attention(
        self,
        query: Tensor,  # [B, ..., H, L, E]
        key: Tensor,  # [B, ..., H, S, E]
        value: Tensor,  # [B, ..., H, S, V]
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = (query * scale) @ key.transpose(-2, -1)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        weights = scores.softmax(-1) if attn_mask is None else _masked_softmax(scores, attn_mask)
        kept = self._kept(weights.shape, dropout_p).to(weights.dtype)
        return _scaled(weights, kept, dropout_p, False).to(value.dtype) @ value

    def _kept(self, shape: torch.Size, p: float) -> Tensor:
        """Return which elements stay: bool of that shape, True with probability 1 - p."""
        bits = self._bits(shape)
        # As signed 32-bit numbers, hashes lie evenly in [-2^31, 2^31); the lowest p of them are dropped.
        threshold = round(p * 2**32) - 2**31
        return bits >= threshold if threshold < 2**31 else torch.zeros_like(bits, dtype=torch.bool)

    def _bits(self, shape: torch.Size) -> Tensor:
        """A hash for each element of a tensor that begins with the samples: int32 of that shape."""
        parts = _PARTS.get()
        if parts:
            return self._bits_of_part(shape, parts)
        samples = len(self._draws.samples)
        if samples == 0 or not shape or shape[0] % samples:
            raise HeterodyneError(
                f"random numbers for a tensor of shape {list(shape)} in a micro-batch of {samples} samples: its first dim must be the "
                "samples (or a multiple, sample by sample), so that each sample keeps its draws under any plan. Move the batch to dim 0"
            )
        return self._hashes(self._call_number(), math.prod(shape) // samples).view(shape)

    def _bits_of_part(self, shape: torch.Size, parts: Sequence[_Part]) -> Tensor:
        """The same, of a slice of the tensor."""
        full = list(shape)
        for part in parts:
            full[part.dim] = part.full
        token = _PARTS.set(())
        try:
            bits = self._bits(torch.Size(full))
        finally:
            _PARTS.reset(token)
        for part in parts:
            bits = bits.narrow(part.dim, part.first, shape[part.dim])
        return bits

    def _call_number(self) -> int:
        drawn = draw_call_number()
        return self._draws.calls.setdefault(drawn, self._draws.first_call + len(self._draws.calls))

    def _hashes(self, call: int, elements: int) -> Tensor:
        """A hash of each element of each sample: int32 [samples, elements]."""
        keys = _splitmix64_of(self._draws.samples ^ _signed(splitmix64(self._seed, self._draws.step, call)))
        low = ((keys & 0xFFFFFFFF) ^ 2**31) - 2**31  # within int32, so that the conversion is defined on every device
        first, second = low.to(torch.int32).view(-1, 1), (keys >> 32).to(torch.int32).view(-1, 1)
        if elements > len(self._positions):  # of the largest sample so far: shorter ones are beginnings of it
            self._positions = torch.arange(elements, dtype=torch.int32, device=self._device)
        mixed = self._positions[:elements] ^ first
        mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D).add_(second)
        mixed.bitwise_xor_((mixed >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
        return mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF))


def draw_call_number() -> int:
    """Return the number by which a call is known again when it is recomputed, from torch's generator on the CPU.

    The operator itself is called: ``torch.randint`` stands for what a model draws, and a mode may be active twice.
    """
    return int(torch.ops.aten.randint.default(_CALL_NUMBERS, (), dtype=torch.int64).item())


def draws_call_number(func: object, args: Sequence[object]) -> bool:
    """Return whether an operator is that of `draw_call_number`."""
    return func is torch.ops.aten.randint.default and bool(args) and args[0] == _CALL_NUMBERS


def _by_torch_names(handler: Callable[..., Tensor]) -> Callable[[Tensor, float, bool], Tensor]:
    """For the functions of torch itself, which call the flag ``train``."""

    def named(input: Tensor, p: float, train: bool) -> Tensor:
        return handler(input, p, train)

    return named


def _scaled(input: Tensor, kept: Tensor, p: float, inplace: bool) -> Tensor:
    noise = kept if p == 1.0 else kept.div_(1 - p)
    return input.mul_(noise) if inplace else input * noise


def _masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last dim; rows in which nothing is allowed are zero, as torch's own attention has it."""
    scores = scores.masked_fill(mask.logical_not(), -math.inf) if mask.dtype == torch.bool else scores + mask
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def _splitmix64_of(state: Tensor) -> Tensor:
    """One round of `splitmix64` on int64; products wrap, and shifts bring in zeros."""
    state = state + _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the same 64 bits."""
    return number - 2**64 if number >= 2**63 else number
