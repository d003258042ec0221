"""The table of layer costs that a search over fleets reads, filled from datasheets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import gcd

from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.predictor.constants import Constants, constants
from heterodyne.predictor.devices import chip_of, networks_of
from heterodyne.predictor.layer_bytes import gradients_under_way_bytes, layer_activation_bytes, loss_workspace_bytes
from heterodyne.predictor.network import Network
from heterodyne.predictor.passes import Passes
from heterodyne.predictor.roofline import Chip
from heterodyne.predictor.setup import Precision, Setup
from heterodyne.predictor.software import Software
from heterodyne.predictor.transformer import Transformer

__all__ = ["PredictedLayers", "predicted_layers"]

EMBEDDING, BLOCK, EXPERTS, HEAD = "embedding", "block", "block with experts", "head"


_LEAST_POSITIONS = 1024
"""Of the sequence, on a device, by hand: attention over fewer waits for keys and values longer than it computes."""


@dataclass(frozen=True, kw_only=True)
class PredictedLayers:
    """Implements `cost.layers.LayerCosts`.

    The devices of a stage are numbered as those of a `Setup`: tensor-parallel neighbours, then parts of the sequence, then of the
    micro-batch. Experts lie whole on them: on all, as far as their number can be divided; where there are more devices, those that
    are left hold copies.

    Args:
        reach: devices of each kind that are joined; stages wider than a node stay within them.
    """

    model: Transformer
    precision: Precision
    chips: Mapping[str, Chip]
    networks: Mapping[str, Network]
    reach: Mapping[str, int] = field(default_factory=dict)
    software: Software = field(default_factory=Software)
    known: Constants = field(default_factory=constants)
    _made: dict[tuple[str, str, Widths, int], LayerCost] = field(default_factory=dict, repr=False, compare=False)
    _offered: dict[str, tuple[Widths, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        every = self.model.moe_every if self.model.experts else 0
        blocks = (EXPERTS if every and number % every == every - 1 else BLOCK for number in range(self.model.layers))
        return (EMBEDDING, *blocks, HEAD)

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        """Powers of two. Tensor parallelism divides heads and stays in a node; parts of the sequence are in two halves, so that all
        have as much causal attention to do, and have some positions left.

        Beyond a node a stage has parts of the sequence, or gives each device experts of its own: parts of a micro-batch alone would be
        further replicas.
        """
        if device_kind not in self.networks:
            return ()
        if device_kind not in self._offered:
            self._offered[device_kind] = tuple(self._widths(device_kind))
        return self._offered[device_kind]

    def _widths(self, device_kind: str) -> Iterator[Widths]:
        model, node = self.model, self.networks[device_kind].devices
        most = max(node, self.reach.get(device_kind, node))
        for tensor in _powers(min(node, model.kv_heads or model.heads)):
            if (model.kv_heads or model.heads) % tensor:
                continue
            for context in _powers(min(most // tensor, max(1, model.seq // _LEAST_POSITIONS))):
                if context > 1 and model.seq % (2 * context):
                    continue
                for data in _powers(most // (tensor * context)):
                    widths = Widths(tensor=tensor, context=context, data=data)
                    beyond = widths.devices > node
                    if not beyond or data == 1 or self._expert_width(widths) == widths.devices:
                        yield widths

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        """None for a kind of device, widths or a layer that there is not, and where samples would be divided."""
        if layer_kind not in self.layers or widths not in self.widths(device_kind) or micro_batch % widths.data:
            return None
        key = (device_kind, layer_kind, widths, micro_batch)
        if key not in self._made:
            self._made[key] = self._cost(device_kind, layer_kind, widths, micro_batch)
        return self._made[key]

    def _expert_width(self, widths: Widths) -> int:
        """Devices over which one set of the experts is sharded."""
        return gcd(self.model.experts, widths.devices) if self.model.experts else 1

    def _setup(self, widths: Widths, micro_batch: int, *, routed: bool) -> Setup:
        """Of the devices of one stage."""
        return Setup(
            micro_batch=micro_batch // widths.data,
            tp=widths.tensor,
            cp=widths.context,
            ep=self._expert_width(widths) if routed else 1,
            sequence_parallel=widths.tensor > 1,
            precision=self.precision,
            software=self.software,
        )

    def _cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost:
        model, chip, software = self.model, self.chips[device_kind], self.software
        routed = layer_kind == EXPERTS
        setup = self._setup(widths, micro_batch, routed=routed)
        passes = Passes(model=model, setup=setup, chip=chip, network=self.networks[device_kind], known=self.known)
        output = micro_batch * model.seq * model.hidden * setup.element_bytes
        own = output / widths.devices
        # Where no device has just a slice of the sequence, and neighbours do not divide what they send, each sends all of it.
        sent = output if setup.sequence_parallel or software.scatters_sends else output * widths.tensor
        experts = 0.0
        if layer_kind in (BLOCK, EXPERTS):
            dense, experts = passes.layer_held(experts=routed)
            parameters = dense + experts
            forward, backward = passes.layer_of(experts=routed)
            again = passes.again_s(experts=routed)
            kept, entering = layer_activation_bytes(model, setup, experts=routed)
            workspace = gradients_under_way_bytes(model, setup, experts=routed)
        else:
            parameters = model.embedding_parameters / widths.tensor
            head = layer_kind == HEAD
            moved = 2 * own / chip.memory_bytes_per_s  # rows of the table that are read and written
            forward, backward = passes.head if head else (moved, 2 * moved)
            again = forward
            _, entering = layer_activation_bytes(model, setup)
            kept = entering = entering if head else 0.0
            workspace = loss_workspace_bytes(model, setup) if head else 0.0
        # A gradient is written and read in 16 bits, the sum read and written in 32.
        added = parameters * 10 / chip.memory_bytes_per_s if setup.accumulates else 0.0
        gradient, state = setup.gradient_bytes, setup.state_bytes
        return LayerCost(
            forward_s=forward,
            backward_s=backward + added,
            forward_again_s=again,
            update_s=parameters * software.optimizer_bytes / chip.memory_bytes_per_s,
            parameter_bytes=round(parameters * setup.element_bytes),
            gradient_bytes=round(parameters * gradient),
            optimizer_bytes=round(parameters * state),
            kept_bytes=round(kept),
            kept_bytes_recomputed=round(entering),
            output_bytes=0 if layer_kind == HEAD else round(sent),
            workspace_bytes=round(workspace),
            expert_bytes=round(experts * gradient),
            expert_copies=widths.devices // (setup.ep * setup.etp) if routed else 1,
            tied_bytes=round(parameters * gradient) if model.tied and layer_kind in (EMBEDDING, HEAD) else 0,
        )


@cache
def _powers(most: int) -> tuple[int, ...]:
    """Of two."""
    return tuple(2**n for n in range(most.bit_length()))


def predicted_layers(
    model: Transformer, fleet: Fleet, *, precision: Precision = "bf16", software: Software | None = None
) -> PredictedLayers:
    """For all kinds of a fleet. A kind whose pools differ is as in the first of them.

    Raises ClusterError for a kind whose datasheet lacks a number that is needed.
    """
    software = software or Software()
    chips = {kind: chip_of(fleet.accelerator(kind), precision, software) for kind in fleet.kinds}
    reach: dict[str, int] = {}
    for pool in fleet.pools:
        wire = fleet.wire(pool, pool)
        joined = pool.devices if wire is not None else pool.devices_per_node
        reach[pool.kind] = max(joined, reach.get(pool.kind, 0))
    return PredictedLayers(
        model=model, precision=precision, chips=chips, networks=networks_of(fleet), reach=reach, software=software
    )
