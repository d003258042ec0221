"""Seconds of the forward and of the backward of a layer on a device, with all that its group exchanges inside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from heterodyne.predictor.constants import Constants
from heterodyne.predictor.kernels import head_kernels, layer_kernels
from heterodyne.predictor.network import Network
from heterodyne.predictor.roofline import Chip, kernels_s, product_s
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.transformer import Transformer

__all__ = ["Passes"]

Pair = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Of one micro-batch, on one device of a homogeneous plan. Pairs are seconds of a forward and of a backward."""

    model: Transformer
    setup: Setup
    chip: Chip
    network: Network
    known: Constants

    @property
    def tokens(self) -> float:
        return self.setup.micro_batch * self.model.seq / self.setup.cp

    @cached_property
    def layer(self) -> Pair:
        """The mean over all layers: some have experts."""
        part = self.model.expert_layers / self.model.layers
        plain = self.layer_of(experts=False) if part < 1 else (0.0, 0.0)
        routed = self.layer_of(experts=True) if part > 0 else (0.0, 0.0)
        forward, backward = ((1 - part) * a + part * b for a, b in zip(plain, routed, strict=True))
        return forward, backward

    @cached_property
    def head(self) -> Pair:
        """With the loss."""
        return kernels_s(head_kernels(self.model, self.setup, self.known), self.chip, launch=self.setup.software.launch)

    @cached_property
    def send_s(self) -> float:
        """Of what crosses between stages: whole, as parts that are gathered again, or as slices of the sequence that stay slices."""
        s, net = self.setup, self.network
        whole = self.tokens * self.model.hidden * s.element_bytes
        in_parts = s.sequence_parallel or s.software.scatters_sends
        stride = s.dp * s.tp * s.cp
        sent = net.send_s(whole / (s.tp if in_parts else 1), stride=stride, beside=min(stride, net.devices))
        return sent if s.sequence_parallel or not in_parts else sent + net.gather_s(net.group(s.tp), whole)

    @cached_property
    def added_s(self) -> float:
        """Of adding the gradients of a micro-batch to those before it, all of a device."""
        s = self.setup
        if s.micro_batches == 1 or s.zero >= 3:
            return 0.0
        # A gradient is written and read in 16 bits, the sum read and written in 32.
        return self.parameters * 10 / self.chip.memory_bytes_per_s

    @cached_property
    def parameters(self) -> float:
        """Of a device, as many as the average stage has, and the embedding."""
        model, s = self.model, self.setup
        routed = model.expert_layers / s.pp
        layers = (model.layers / s.pp - routed) * self.layer_parameters(experts=False)
        twice = s.pp == 1 and not model.tied
        return (
            layers
            + routed * self.layer_parameters(experts=True)
            + model.embedding_parameters / s.tp * (2 if twice else 1)
        )

    def layer_parameters(self, *, experts: bool) -> float:
        """Of a layer, on one device."""
        model, s = self.model, self.setup
        if not experts:
            return (model.attention_parameters + model.ffn_parameters) / s.tp
        routed = model.experts * model.ffn_parameters / s.ep
        return (model.attention_parameters + model.shared_parameters) / s.tp + routed

    def layer_of(self, *, experts: bool) -> Pair:
        """Of one layer, with experts or without."""
        s, software = self.setup, self.setup.software
        kernels = layer_kernels(self.model, s, self.known, experts=experts)
        forward, backward = kernels_s(kernels, self.chip, launch=software.launch)
        forward += self._exchanged_s(experts=experts)
        backward += self._exchanged_s(experts=experts)
        if s.cp > 1:
            forward += self._round_s()
            backward += 2 * self._round_s()
        if s.recompute == "full":
            again = (
                forward if experts or not software.stops_early else forward - product_s(kernels.products[-1], self.chip)
            )
            backward += s.recompute_layers * again
        elif s.recompute == "selective" and not software.flash:
            backward += self.known.stated.selective * forward
        return self._with_parameters(forward, backward, experts=experts)

    def _exchanged_s(self, *, experts: bool) -> float:
        """Two all-reduces of tensor parallelism (or as many gathers and scatters), tokens to their experts and back."""
        model, s, net = self.model, self.setup, self.network
        element = s.element_bytes
        tensor = 2 * net.all_reduce_s(net.group(s.tp), self.tokens * model.hidden * element)
        found = tensor * (1 - s.software.overlap_tensor)
        if experts:
            travelling = self.tokens / s.tp * model.topk * model.capacity * model.hidden * element
            found += 2 * net.all_to_all_s(net.group(s.ep), travelling)
        return found

    def _round_s(self) -> float:
        """Keys and values of context parallelism, gathered or handed round."""
        s = self.setup
        keys = 2 * self.tokens * self.model.key_width / s.tp * s.element_bytes
        return self.known.stated.ring_shown * self.network.gather_s(self.network.group(s.cp, s.tp), keys * s.cp)

    def _with_parameters(self, forward: float, backward: float, *, experts: bool) -> Pair:
        """ZeRO-2: gradients are scattered behind every backward, which keeps no whole ones; ZeRO-3: parameters are gathered before each
        pass too; both layer by layer.
        """
        s, net, software = self.setup, self.network, self.setup.software
        if s.zero < 2 or s.dp * s.cp == 1:
            return forward, backward
        group, count = net.group(s.dp * s.cp, s.tp), self.layer_parameters(experts=experts)
        if s.zero == 2:
            scatter = net.gather_s(group, count * software.gradient_bytes)
            return forward, max(backward, scatter) if software.overlap_gradients else backward + scatter
        messages = software.gathers
        gather = messages * net.gather_s(group, count * s.element_bytes / messages)
        scatter = messages * net.gather_s(group, count * software.gradient_bytes / messages)
        if software.overlap_parameters:
            return max(forward, gather), max(backward, gather + scatter)
        return forward + gather, backward + gather + scatter
