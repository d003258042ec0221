"""Bytes on the fullest device: weights, gradients, states, activations of the micro-batches under way, buffers, and what is lost.

Activations of a layer follow Korthikanti et al. (2022), "Reducing Activation Recomputation in Large Transformer Models", with their 34
and 5 taken apart for layers of other shapes; dropout masks count where there is dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

from heterodyne.predictor.setup import Setup
from heterodyne.predictor.transformer import Transformer

__all__ = ["Footprint", "footprint", "layer_activation_bytes", "loss_workspace_bytes", "usable_bytes"]

_CONTEXT_BYTES = 2.0 * 2**30
"""Of a driver's context and the buffers of a communication library: a GPU process of several groups has 1 to 3 GiB before it allocates
anything. (`cost.memory` counts less: this library's own processes have fewer groups.)"""
_FRAGMENTS = 0.1
"""Of what is allocated: lost between blocks of the allocator; long runs with many sizes of tensors lose more than measured stages do."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes, of the stage that needs most (``stage``). ``allocated`` is what a framework reports of its own allocator."""

    stage: int
    weights: float
    gradients: float
    states: float
    activations: float
    workspace: float
    lost: float

    @property
    def allocated(self) -> float:
        return self.weights + self.gradients + self.states + self.activations + self.workspace

    @property
    def total(self) -> float:
        return self.allocated + self.lost


def usable_bytes(memory_bytes: int) -> int:
    """What a plan may fill of a device's memory."""
    return max(1, int((memory_bytes - _CONTEXT_BYTES) / (1 + _FRAGMENTS)))


def footprint(model: Transformer, setup: Setup) -> Footprint:
    """Of the fullest of all stages."""
    found = [_of_stage(model, setup, stage) for stage in sorted({0, 1, setup.pp - 1}) if stage < setup.pp]
    return max(found, key=lambda use: use.total)


def layer_activation_bytes(model: Transformer, setup: Setup, *, experts: bool = False) -> tuple[float, float]:
    """Of one layer and one micro-batch: all that its backward needs, and the input of the layer alone."""
    s, tokens, element = setup, setup.micro_batch * model.seq / setup.cp, setup.element_bytes
    around = 1 / s.tp if s.sequence_parallel else 1.0
    mask = 0.5 * element if not s.software.flash else 0.0  # those who drop out are those who write scores
    outside = model.hidden * (4 * element + 2 * mask) * around
    inside = element * (2 * model.query_width + 2 * model.key_width) / s.tp
    if not s.software.flash and s.recompute != "selective":
        inside += model.heads / s.tp * model.seq * 2.5 * element
    width = (model.ffn * model.topk * model.capacity) if experts else model.ffn
    ffn = element * width * (3 if model.gated else 2) / s.tp
    if experts:
        ffn += element * 2 * model.topk * model.capacity * model.hidden / s.tp
    entering = tokens * model.hidden * element * (around if s.sequence_parallel else 1.0)
    return tokens * (outside + inside + ffn), entering


def loss_workspace_bytes(model: Transformer, setup: Setup) -> float:
    """Of logits, once as they are, once in 32 bits, and their gradients (and softmax, where it is an op of its own)."""
    logits = setup.micro_batch * model.seq * model.predicted / setup.cp * model.vocab / setup.tp
    return logits * (setup.element_bytes + 4 + (4 if setup.software.fused_loss else 8))


def _of_stage(model: Transformer, setup: Setup, stage: int) -> Footprint:
    s, software = setup, setup.software
    layers = s.layers_of_stages(model.layers)
    mine = sum(layers[stage :: s.pp])
    moe = mine * model.expert_layers / model.layers
    first, last = stage == 0, stage == s.pp - 1
    replicas = s.dp * s.cp
    dense = mine * model.attention_parameters / s.tp + (mine - moe) * model.ffn_parameters / s.tp
    dense += moe * model.shared_parameters / s.tp
    ends = int(first) + int(last and (s.pp > 1 or not model.tied))
    dense += ends * model.embedding_parameters / s.tp
    expert = moe * model.experts * model.ffn_parameters / s.ep
    copies = max(1.0, replicas * s.tp / s.ep) if expert else 1.0

    def held(bytes_each: float, level: int) -> float:
        parts = (replicas, copies) if s.zero >= level else (1, 1)
        return bytes_each * (dense / parts[0] + expert / max(1.0, min(parts[1], copies)))

    element = s.element_bytes
    weights = held(element, 3)
    gradients = held(4 if element == 4 else software.gradient_bytes, 2)
    states = held(8 if element == 4 else software.state_bytes, 1)
    plain, entering = layer_activation_bytes(model, s)
    whole = (mine - moe) * plain + moe * layer_activation_bytes(model, s, experts=True)[0]
    each = whole
    workspace = 0.0
    if s.recompute == "full":
        kept = s.recompute_layers * mine * entering
        each = kept + (1 - s.recompute_layers) * whole
        workspace = max(plain, layer_activation_bytes(model, s, experts=bool(model.experts))[0])
    if last:
        workspace = max(workspace, loss_workspace_bytes(model, s))
    if s.zero == 3:  # two layers gathered at a time, and the embedding
        workspace += element * (2 * (dense / max(mine, 1)) + model.embedding_parameters / s.tp)
    workspace += software.buffer_bytes
    activations = each * _under_way(s, stage)
    allocated = weights + gradients + states + activations + workspace
    return Footprint(
        stage=stage, weights=weights, gradients=gradients, states=states, activations=activations, workspace=workspace,
        lost=_CONTEXT_BYTES + _FRAGMENTS * allocated,
    )  # fmt: skip


def _under_way(s: Setup, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, in activations of all of its layers."""
    if s.pp == 1:
        return 1.0
    if s.schedule == "GPipe":
        return float(s.micro_batches)
    ahead: float = s.pp - stage
    if s.schedule == "ZBH2":
        ahead = 2 * (s.pp - stage) - 1
    if s.vpp > 1:
        ahead = s.pp - stage + (s.pp - 1) / s.vpp * 1.0 if stage == 0 else s.pp - stage + (s.pp - stage - 1) / s.vpp
    return float(min(s.micro_batches, max(1.0, ahead)))
