"""Bytes of one layer and one micro-batch on one device: what its backward needs, and what comes and goes inside a pass.

Activations follow Korthikanti et al. (2022), "Reducing Activation Recomputation in Large Transformer Models", with their 34 and 5 taken
apart for layers of other shapes; dropout masks count where there is dropout.
"""

from __future__ import annotations

from heterodyne.predictor.setup import Setup
from heterodyne.predictor.transformer import Transformer

__all__ = ["gradients_under_way_bytes", "layer_activation_bytes", "loss_workspace_bytes"]


def layer_activation_bytes(model: Transformer, setup: Setup, *, experts: bool = False) -> tuple[float, float]:
    """All that the backward of the layer needs, and the input of the layer alone."""
    s, tokens, element = setup, setup.micro_batch * model.seq / setup.cp, setup.element_bytes
    around = 1 / s.tp if s.sequence_parallel else 1.0
    mask = 0.5 * element if model.dropout or not s.software.flash else 0.0  # those who write scores drop out
    outside = model.hidden * (4 * element + 2 * mask) * around
    inside = element * (2 * model.query_width + 2 * model.key_width) / s.tp
    if not s.software.flash and not s.selective:
        inside += model.heads / s.tp * model.seq * 2.5 * element
    width = (model.ffn * model.topk * model.capacity) if experts else model.ffn
    ffn = element * width * (3 if model.gated else 2) / s.tp
    if experts:
        ffn += element * 2 * model.topk * model.capacity * model.hidden * s.etp / s.tp
    entering = tokens * model.hidden * element * (around if s.sequence_parallel else 1.0)
    return tokens * (outside + inside + ffn), entering


def gradients_under_way_bytes(model: Transformer, setup: Setup, *, experts: bool) -> float:
    """Of the gradients of what the widest op of a layer reads and writes, and of the residual stream."""
    s, tokens = setup, setup.micro_batch * model.seq / setup.cp
    scores = 0.0 if s.software.flash else 2 * model.heads * model.seq
    activated = model.matrices * model.ffn * (model.topk * model.capacity if experts else 1.0)
    return s.element_bytes * tokens * (max(scores, activated) / s.tp + 2 * model.hidden)


def loss_workspace_bytes(model: Transformer, setup: Setup) -> float:
    """Of logits, once as they are, once in 32 bits, and their gradients (and softmax, where it is an op of its own)."""
    logits = setup.micro_batch * model.seq * model.predicted / setup.cp * model.vocab / setup.tp
    if setup.software.loss_in_place:
        return logits * setup.element_bytes
    return logits * (setup.element_bytes + 4 + (4 if setup.software.fused_loss else 8))
