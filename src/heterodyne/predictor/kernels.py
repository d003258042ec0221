"""What a layer launches: matrix products, attention, and kernels that only move memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from heterodyne.predictor.constants import Constants
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.transformer import Transformer

__all__ = ["Attention", "Kernels", "Product", "attention_kernels", "ffn_kernels", "head_kernels", "layer_kernels"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """``count`` matrix products of ``(m, k)`` and ``(k, n)`` in one kernel."""

    m: float
    n: float
    k: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        return 2 * self.m * self.n * self.k * self.count

    @property
    def elements(self) -> float:
        """Read and written."""
        return (self.m * self.k + self.k * self.n + self.m * self.n) * self.count

    def backward(self) -> tuple[Product, Product]:
        """The gradient of the input, and of the weight."""
        return (
            replace(self, n=self.k, k=self.n),
            replace(self, m=self.k, k=self.m),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """One flash kernel.

    Args:
        flops: forward, causal counted; the backward has 2.5 times as many (Dao, 2022).
        bytes: read and written forward.
        seq: tokens of a sequence. Short ones are over before the pipeline of a kernel is full.
        head: the width of a head. ``causal``: blocks on the diagonal are computed whole.
    """

    flops: float
    bytes: float
    seq: float = math.inf
    head: float = 128.0
    causal: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Of a forward on one device.

    Args:
        moved_bytes: of the kernels that only move memory.
        launches: kernels that the host starts.
    """

    products: tuple[Product, ...] = ()
    attention: tuple[Attention, ...] = ()
    moved_bytes: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Kernels) -> Kernels:
        return Kernels(
            products=self.products + other.products,
            attention=self.attention + other.attention,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            launches=self.launches + other.launches,
        )


def attention_kernels(model: Transformer, setup: Setup, tokens: float, known: Constants) -> Kernels:
    """The attention half of a layer for so many tokens of a micro-batch, on one of ``tp`` (and ``cp``) devices."""
    element, software = setup.element_bytes, setup.software
    sequences = tokens * setup.cp / model.seq
    heads = model.heads / setup.tp
    products = [
        Product(m=tokens, n=(model.query_width + 2 * model.key_width) / setup.tp, k=model.hidden),
        Product(m=tokens, n=model.hidden, k=model.query_width / setup.tp),
    ]
    scores = sequences * heads * model.seq * model.seq / setup.cp
    moved = element * (_outside(setup) * tokens * known.fitted.around * model.hidden)
    flash: tuple[Attention, ...] = ()
    if software.flash:
        part = 0.5 if model.causal else 1.0
        touched = tokens * (2 * model.query_width + 2 * model.key_width) / setup.tp
        flops, shape = 4 * scores * model.of_head * part, {"seq": model.seq, "head": model.of_head}
        flash = (Attention(flops=flops, bytes=element * touched, causal=model.causal, **shape),)
    else:
        inner = {"m": model.seq / setup.cp, "count": sequences * heads}
        products.append(Product(n=model.seq, k=model.of_head, **inner))
        products.append(Product(n=model.of_head, k=model.seq, **inner))
        moved += element / 2 * scores * known.fitted.score * known.stated.score_bytes[not software.fused]
    return Kernels(
        products=tuple(products),
        attention=flash,
        moved_bytes=moved * (1.0 if software.fused else known.fitted.unfused),
        launches=known.stated.launches[not software.fused] * 0.6,
    )


def ffn_kernels(model: Transformer, setup: Setup, tokens: float, known: Constants, *, experts: bool) -> Kernels:
    """The feed-forward half of a layer."""
    element, software = setup.element_bytes, setup.software
    width = model.ffn / (setup.etp if experts else setup.tp)
    moved = element * (_outside(setup) * tokens * known.fitted.around * model.hidden)
    launches = known.stated.launches[not software.fused] * 0.4
    if not experts:
        products = _feed_forward(model, tokens, width, 1.0)
        moved += element * tokens * width * (3 if model.gated else 2)
        return _kernels(products, moved, launches, setup, known)
    # Tokens of all that share the experts come to the experts of this device; neighbours in tensor parallelism have a slice each, and
    # those who share an expert have the same tokens.
    routed = tokens * model.topk * model.capacity * setup.etp / setup.tp
    here = model.experts / setup.ep
    products = _feed_forward(model, routed / here, width, here)
    products += (Product(m=tokens, n=model.experts, k=model.hidden),)
    if model.dense_dispatch:  # tokens come to places of experts, and back, by products with one-hot matrices (GShard)
        places = routed / tokens * model.seq
        one_hot = Product(m=model.seq, n=model.hidden, k=places, count=tokens / model.seq)
        products += (one_hot, Product(m=model.seq, n=model.hidden, k=places, count=tokens / model.seq))
    moved += element * routed * width * (3 if model.gated else 2)
    moved += element * 6 * routed * model.hidden  # tokens are sorted by expert, and back
    if model.shared_ffn:
        products += _feed_forward(model, tokens, model.shared_ffn / setup.tp, 1.0)
        moved += element * tokens * model.shared_ffn * (3 if model.gated else 2) / setup.tp
    return _kernels(products, moved, launches + 16, setup, known)


def layer_kernels(model: Transformer, setup: Setup, known: Constants, *, experts: bool = False) -> Kernels:
    """The forward of one layer for one micro-batch, on one device."""
    tokens = setup.micro_batch * model.seq / setup.cp
    return attention_kernels(model, setup, tokens, known) + ffn_kernels(model, setup, tokens, known, experts=experts)


def head_kernels(model: Transformer, setup: Setup, known: Constants) -> Kernels:
    """The head and its loss."""
    tokens = setup.micro_batch * model.seq * model.predicted / setup.cp
    logits, software = tokens * model.vocab / setup.tp, setup.software
    # In place: read twice and written once, in 16 bits, for forward and backward together; a backward counts as two forwards.
    each = setup.element_bytes if software.loss_in_place else known.stated.logit_bytes[not software.fused_loss]
    return Kernels(
        products=(Product(m=tokens, n=model.vocab / setup.tp, k=model.hidden),),
        moved_bytes=logits * each,
        launches=12,
    )


def _feed_forward(model: Transformer, tokens: float, width: float, count: float) -> tuple[Product, ...]:
    up = Product(m=tokens, n=width * (2 if model.gated else 1), k=model.hidden, count=count)
    return up, Product(m=tokens, n=model.hidden, k=width, count=count)


def _kernels(products: tuple[Product, ...], moved: float, launches: float, setup: Setup, known: Constants) -> Kernels:
    unfused = 1.0 if setup.software.fused else known.fitted.unfused
    return Kernels(products=products, moved_bytes=moved * unfused, launches=launches)


def _outside(setup: Setup) -> float:
    """The part of the sequence on which a device has the norms and dropouts."""
    return 1 / setup.tp if setup.sequence_parallel else 1.0
