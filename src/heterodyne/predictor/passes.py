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
    """Of one micro-batch, on one device of a stage. Pairs are seconds of a forward and of a backward."""

    model: Transformer
    setup: Setup
    chip: Chip
    network: Network
    known: Constants

    @property
    def tokens(self) -> float:
        return self.setup.micro_batch * self.model.seq / self.setup.cp

    @cached_property
    def head(self) -> Pair:
        """With the loss. Those who train in 8 bits keep the head in 16 (Transformer Engine's and torchao's recipes)."""
        kernels = head_kernels(self.model, self.setup, self.known)
        return kernels_s(kernels, self.chip.wide, launch=self.setup.software.launch)

    def layer_held(self, *, experts: bool) -> Pair:
        """Parameters of a layer on one device: those that every token passes, and those of experts."""
        model, s = self.model, self.setup
        if not experts:
            return (model.attention_parameters + model.ffn_parameters) / s.tp, 0.0
        routed = model.experts * model.ffn_parameters / (s.ep * s.etp)
        return (model.attention_parameters + model.shared_parameters) / s.tp, routed

    def layer_of(self, *, experts: bool) -> Pair:
        """Of one layer, with experts or without."""
        s, software = self.setup, self.setup.software
        kernels = layer_kernels(self.model, s, self.known, experts=experts)
        forward, backward = kernels_s(kernels, self.chip, launch=software.launch)
        forward_exchanged, backward_exchanged = self.exchanged_s(experts=experts)
        forward += forward_exchanged
        backward += backward_exchanged
        if s.cp > 1:
            forward += self._round_s()
            backward += 2 * self._round_s()
        if s.selective and not software.flash:
            backward += self.known.stated.selective * forward
        return forward, backward

    def again_s(self, *, experts: bool) -> float:
        """Of computing the forward of a layer again in its backward."""
        forward, _ = self.layer_of(experts=experts)
        if experts or not self.setup.software.stops_early:
            return forward
        kernels = layer_kernels(self.model, self.setup, self.known, experts=experts)
        return forward - product_s(kernels.products[-1], self.chip)

    def exchanged_s(self, *, experts: bool) -> Pair:
        """What nothing hides. Of tensor parallelism, an all-reduce (or a gather and a scatter) behind attention and one behind the
        feed-forward layer. To experts go slices of the tokens and back; where neighbours share an expert, each gathers for it what came to
        all of them.
        """
        model, s, net = self.model, self.setup, self.network
        a_token = model.hidden * s.element_bytes
        halves = 2 if not experts or model.shared_ffn else 1
        tensor = halves * net.all_reduce_s(net.group(s.tp), self.tokens * a_token)
        found = 0.0
        if experts:
            travelling = self.tokens * model.topk * model.capacity * a_token
            copies = model.topk if s.software.sends_once else 1
            found += 2 * net.all_to_all_s(net.group(s.ep, s.etp), travelling / s.tp / copies, copies)
            found += 2 * net.gather_s(net.group(s.etp), travelling * s.etp / s.tp)
        forward, backward = (tensor * (1 - hidden) for hidden in s.software.overlap_tensor)
        return found + forward, found + backward

    def _round_s(self) -> float:
        """Keys and values of context parallelism, gathered or handed round."""
        s = self.setup
        keys = 2 * self.tokens * self.model.key_width / s.tp * s.element_bytes
        return self.known.stated.ring_shown * self.network.gather_s(self.network.group(s.cp, s.tp), keys * s.cp)
