"""Seconds of the forward and of the backward of a layer on a device, with all that its group exchanges inside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from heterodyne.predictor.constants import Constants
from heterodyne.predictor.kernels import head_kernels, layer_kernels
from heterodyne.predictor.network import Group, Network
from heterodyne.predictor.roofline import Chip, kernels_s, product_s
from heterodyne.predictor.setup import Setup
from heterodyne.predictor.transformer import Transformer

__all__ = ["Passes"]

Pair = tuple[float, float]
Collective = Callable[[Network, Group, float], float]


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
        if s.micro_batches == 1 or s.gathers_each_pass:
            return 0.0
        # A gradient is written and read in 16 bits, the sum read and written in 32.
        return self.parameters * 10 / self.chip.memory_bytes_per_s

    @cached_property
    def parameters(self) -> float:
        """Of a device, as many as the average stage has, and the embedding."""
        return sum(self.held)

    @cached_property
    def held(self) -> Pair:
        """The same, experts told apart."""
        model, s = self.model, self.setup
        routed = model.expert_layers / s.pp
        twice = s.pp == 1 and not model.tied
        plain, moe = self.layer_held(experts=False), self.layer_held(experts=True)
        layers = (model.layers / s.pp - routed) * plain[0] + routed * moe[0]
        return layers + model.embedding_parameters / s.tp * (2 if twice else 1), routed * moe[1]

    def layer_held(self, *, experts: bool) -> Pair:
        """Parameters of a layer on one device: those that every token passes, and those of experts."""
        model, s = self.model, self.setup
        if not experts:
            return (model.attention_parameters + model.ffn_parameters) / s.tp, 0.0
        routed = model.experts * model.ffn_parameters / (s.ep * s.etp)
        return (model.attention_parameters + model.shared_parameters) / s.tp, routed

    def over_replicas_s(self, held: Pair, element: float, collective: Collective) -> float:
        """Of a collective over so many parameters, each among the devices that hold the same."""
        s, net = self.setup, self.network
        groups = net.group(s.replicas, s.tp), net.group(s.expert_replicas, s.ep * s.etp)
        return sum(collective(net, group, count * element) for group, count in zip(groups, held, strict=True))

    def layer_of(self, *, experts: bool) -> Pair:
        """Of one layer, with experts or without."""
        s, software = self.setup, self.setup.software
        kernels = layer_kernels(self.model, s, self.known, experts=experts)
        forward, backward = kernels_s(kernels, self.chip, launch=software.launch)
        forward += self.exchanged_s(experts=experts)
        backward += self.exchanged_s(experts=experts)
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

    def exchanged_s(self, *, experts: bool) -> float:
        """Of tensor parallelism, an all-reduce (or a gather and a scatter) behind attention and one behind the feed-forward layer. To
        experts go slices of the tokens and back; where neighbours share an expert, each gathers for it what came to all of them.
        """
        model, s, net = self.model, self.setup, self.network
        a_token = model.hidden * s.element_bytes
        halves = 2 if not experts or model.shared_ffn else 1
        tensor = halves * net.all_reduce_s(net.group(s.tp), self.tokens * a_token)
        found = tensor * (1 - s.software.overlap_tensor)
        if experts:
            travelling = self.tokens * model.topk * model.capacity * a_token
            copies = model.topk if s.software.sends_once else 1
            found += 2 * net.all_to_all_s(net.group(s.ep, s.etp), travelling / s.tp / copies, copies)
            found += 2 * net.gather_s(net.group(s.etp), travelling * s.etp / s.tp)
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
        s, software = self.setup, self.setup.software
        held = self.layer_held(experts=experts)
        if s.zero == 2:
            scatter = self.over_replicas_s(held, software.gradient_bytes, Network.gather_s)
            return forward, max(backward, scatter) if software.overlap_gradients else backward + scatter
        if not s.gathers_each_pass:
            return forward, backward
        messages = software.gathers
        gather = messages * self.over_replicas_s(held, s.element_bytes / messages, Network.gather_s)
        scatter = messages * self.over_replicas_s(held, software.gradient_bytes / messages, Network.gather_s)
        if software.overlap_parameters:
            return max(forward, gather), max(backward, gather + scatter)
        return forward + gather, backward + gather + scatter
