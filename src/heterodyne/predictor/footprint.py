"""Bytes on the fullest device: weights, gradients, states, activations of the micro-batches under way, buffers, and what is lost.

Activations of a layer follow Korthikanti et al. (2022), "Reducing Activation Recomputation in Large Transformer Models", with their 34
and 5 taken apart for layers of other shapes; dropout masks count where there is dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

from heterodyne.cost.memory import MemoryAssumptions
from heterodyne.predictor.constants import constants
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.transformer import Transformer

__all__ = [
    "Footprint", "context_bytes", "footprint", "layer_activation_bytes", "loss_workspace_bytes", "usable_bytes",
]  # fmt: skip

_MOST_GROUPS = 4
"""All devices, replicas, tensor-parallel neighbours, a pipeline."""
_NEVER = 4
"""No ZeRO stage shards at this level."""


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


def usable_bytes(memory_bytes: int, backend: str = "cuda") -> int:
    """What a plan may fill of a device's memory, whatever its groups."""
    stated = constants().stated
    return max(1, int((memory_bytes - context_bytes(backend)) / (1 + stated.fragments)))


def context_bytes(backend: str = "cuda") -> int:
    """What a process has on its device before it allocates anything, whatever its groups; on a processor the framework alone."""
    return MemoryAssumptions().context("cpu") if backend == "cpu" else round(_kept_bytes(_MOST_GROUPS))


def footprint(model: Transformer, setup: Setup) -> Footprint:
    """Of the fullest of all stages."""
    found = [_of_stage(model, setup, stage) for stage in sorted({0, 1, setup.pp - 1}) if stage < setup.pp]
    return max(found, key=lambda use: use.total)


def layer_activation_bytes(model: Transformer, setup: Setup, *, experts: bool = False) -> tuple[float, float]:
    """Of one layer and one micro-batch: all that its backward needs, and the input of the layer alone."""
    s, tokens, element = setup, setup.micro_batch * model.seq / setup.cp, setup.element_bytes
    around = 1 / s.tp if s.sequence_parallel else 1.0
    mask = 0.5 * element if model.dropout or not s.software.flash else 0.0  # those who write scores drop out
    outside = model.hidden * (4 * element + 2 * mask) * around
    inside = element * (2 * model.query_width + 2 * model.key_width) / s.tp
    if not s.software.flash and s.recompute != "selective":
        inside += model.heads / s.tp * model.seq * 2.5 * element
    width = (model.ffn * model.topk * model.capacity) if experts else model.ffn
    ffn = element * width * (3 if model.gated else 2) / s.tp
    if experts:
        ffn += element * 2 * model.topk * model.capacity * model.hidden * s.etp / s.tp
    entering = tokens * model.hidden * element * (around if s.sequence_parallel else 1.0)
    return tokens * (outside + inside + ffn), entering


def loss_workspace_bytes(model: Transformer, setup: Setup) -> float:
    """Of logits, once as they are, once in 32 bits, and their gradients (and softmax, where it is an op of its own)."""
    logits = setup.micro_batch * model.seq * model.predicted / setup.cp * model.vocab / setup.tp
    if setup.software.loss_in_place:
        return logits * setup.element_bytes
    return logits * (setup.element_bytes + 4 + (4 if setup.software.fused_loss else 8))


def _of_stage(model: Transformer, setup: Setup, stage: int) -> Footprint:
    s, software = setup, setup.software
    layers = s.layers_of_stages(model.layers)
    mine = sum(layers[stage :: s.pp])
    moe = mine * model.expert_layers / model.layers
    first, last = stage == 0, stage == s.pp - 1
    replicas = s.replicas
    dense = mine * model.attention_parameters / s.tp + (mine - moe) * model.ffn_parameters / s.tp
    dense += moe * model.shared_parameters / s.tp
    ends = int(first) + int(last and (s.pp > 1 or not model.tied))
    dense += ends * model.embedding_parameters / s.tp
    expert = moe * model.experts * model.ffn_parameters / (s.ep * s.etp)
    copies = s.expert_replicas if expert else 1

    def held(bytes_each: float, level: int) -> float:
        parts = (replicas, copies) if s.zero >= level else (1, 1)
        if level == 1 and s.zero and s.shards:
            parts = min(s.shards, replicas), min(s.shards, copies)
        return bytes_each * (dense / parts[0] + expert / parts[1])

    element = s.element_bytes
    gradient_bytes = 4 if element == 4 else software.gradient_bytes
    kept = s.zero == 3 and not s.gathers_each_pass
    weights = held(element, _NEVER if kept else 3)
    gradients = held(gradient_bytes, _NEVER if kept or (software.combined and s.zero == 2) else 2)
    states = held(8 if element == 4 else software.state_bytes, 1)
    plain, entering = layer_activation_bytes(model, s)
    largest = max(plain, layer_activation_bytes(model, s, experts=True)[0]) if moe else plain
    each = (mine - moe) * plain + moe * layer_activation_bytes(model, s, experts=True)[0]
    workspace = _gradients_under_way(model, s, experts=moe > 0)
    if s.recompute == "full":
        each = s.recompute_layers * mine * entering + (1 - s.recompute_layers) * each
        workspace += largest
    if software.keeps_outputs and not last:
        each += entering
    if last:
        workspace = max(workspace, loss_workspace_bytes(model, s))
    workspace += software.buffer_bytes
    # Parameters that are sharded come together to be used: two layers and the embedding, or all at once. Gradients that are come whole
    # out of the backward of a layer.
    a_layer = (dense / max(mine, 1) if replicas > 1 else 0.0) + (expert / moe if copies > 1 else 0.0)
    if s.zero >= 2 and not kept:
        workspace += gradient_bytes * a_layer
    if s.gathers_each_pass and software.combined:
        workspace += element * (dense + expert) - weights
    elif s.gathers_each_pass:
        workspace += element * (2 * a_layer + (model.embedding_parameters / s.tp if replicas > 1 else 0.0))
    activations = each * _under_way(s, stage)
    allocated = weights + gradients + states + activations + workspace
    return Footprint(
        stage=stage, weights=weights, gradients=gradients, states=states, activations=activations, workspace=workspace,
        lost=_kept_bytes(_groups(s)) + constants().stated.fragments * allocated,
    )  # fmt: skip


def _gradients_under_way(model: Transformer, s: Setup, *, experts: bool) -> float:
    """Bytes of the gradients of what the widest op of a layer reads and writes, and of the residual stream."""
    tokens = s.micro_batch * model.seq / s.cp
    scores = 0.0 if s.software.flash else 2 * model.heads * model.seq
    activated = model.matrices * model.ffn * (model.topk * model.capacity if experts else 1.0)
    return s.element_bytes * tokens * (max(scores, activated) / s.tp + 2 * model.hidden)


def _groups(s: Setup) -> int:
    """Groups that a device communicates in: all devices, and those of each kind of parallelism."""
    degrees = (s.dp, s.tp, s.pp, s.cp, s.ep)
    return sum(degree > 1 for degree in degrees) + any(degree > 1 for degree in degrees)


def _kept_bytes(groups: int) -> float:
    """What a process has on its device before it allocates anything."""
    stated = constants().stated
    return (stated.context_gib + groups * stated.communicator_gib) * 2**30


def _under_way(s: Setup, stage: int) -> float:
    """Micro-batches whose activations a stage holds at once, in activations of all of its layers."""
    if s.pp == 1:
        return 1.0
    if s.schedule == "GPipe":
        return float(s.micro_batches)
    ahead: float = s.pp - stage
    if s.schedule == "ZBH2":
        ahead = 2 * (s.pp - stage) - 1
    if s.vpp > 1:  # a forward each before the first backward, as Megatron warms up; each of 1 / vpp of the layers
        ahead = (2 * (s.pp - stage - 1) + (s.vpp - 1) * s.pp + 1) / s.vpp
    return min(float(s.micro_batches), ahead)
