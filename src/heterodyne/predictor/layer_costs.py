"""The table of layer costs that a search over fleets reads, filled from datasheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from heterodyne.cluster.fleet import Fleet
from heterodyne.cost.layers import LayerCost, Widths
from heterodyne.predictor.constants import Constants, constants
from heterodyne.predictor.devices import chip_of, network_of
from heterodyne.predictor.footprint import layer_activation_bytes, loss_workspace_bytes
from heterodyne.predictor.network import Network
from heterodyne.predictor.passes import Passes
from heterodyne.predictor.roofline import Chip
from heterodyne.predictor.setup import Precision, Setup
from heterodyne.predictor.software import Software
from heterodyne.predictor.transformer import Transformer

__all__ = ["PredictedLayers", "predicted_layers"]

EMBEDDING, BLOCK, EXPERTS, HEAD = "embedding", "block", "block with experts", "head"


@dataclass(frozen=True, kw_only=True)
class PredictedLayers:
    """Implements `cost.layers.LayerCosts`. Experts are spread over the devices that share a layer."""

    model: Transformer
    precision: Precision
    chips: Mapping[str, Chip]
    networks: Mapping[str, Network]
    software: Software = field(default_factory=Software)
    known: Constants = field(default_factory=constants)
    _made: dict[tuple[str, str, Widths, int], LayerCost] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        every = self.model.moe_every if self.model.experts else 0
        blocks = (EXPERTS if every and number % every == every - 1 else BLOCK for number in range(self.model.layers))
        return (EMBEDDING, *blocks, HEAD)

    def widths(self, device_kind: str) -> tuple[Widths, ...]:
        """Powers of two up to a node, as far as heads (and experts) can be divided."""
        if device_kind not in self.networks:
            return ()
        model, most = self.model, self.networks[device_kind].devices
        units = [model.kv_heads or model.heads, *([model.experts] if model.experts else [])]
        powers = (2**n for n in range(most.bit_length()) if 2**n <= most)
        return tuple(Widths(tensor=width) for width in powers if all(unit % width == 0 for unit in units))

    def cost(self, device_kind: str, layer_kind: str, widths: Widths, micro_batch: int) -> LayerCost | None:
        """None for a kind of device, widths or a layer that there is not."""
        if layer_kind not in self.layers or widths not in self.widths(device_kind):
            return None
        key = (device_kind, layer_kind, widths, micro_batch)
        if key not in self._made:
            self._made[key] = self._cost(device_kind, layer_kind, widths.tensor, micro_batch)
        return self._made[key]

    def _cost(self, device_kind: str, layer_kind: str, width: int, micro_batch: int) -> LayerCost:
        model, chip, software = self.model, self.chips[device_kind], self.software
        setup = Setup(
            global_batch=2 * micro_batch,  # gradients are added up
            micro_batch=micro_batch,
            tp=width,
            ep=width if layer_kind == EXPERTS else 1,
            sequence_parallel=width > 1,
            precision=self.precision,
            software=software,
        )
        passes = Passes(model=model, setup=setup, chip=chip, network=self.networks[device_kind], known=self.known)
        tokens = micro_batch * model.seq
        output = tokens * model.hidden * setup.element_bytes
        if layer_kind in (BLOCK, EXPERTS):
            parameters = passes.layer_parameters(experts=layer_kind == EXPERTS)
            forward, backward = passes.layer_of(experts=layer_kind == EXPERTS)
            kept, entering = layer_activation_bytes(model, setup, experts=layer_kind == EXPERTS)
            workspace = 0.0
        else:
            parameters = model.embedding_parameters / width
            head = layer_kind == HEAD
            moved = 2 * output / width / chip.memory_bytes_per_s  # rows of the table that are read and written
            forward, backward = passes.head if head else (moved, 2 * moved)
            kept, entering = (output / width, output / width) if head else (0.0, 0.0)
            workspace = loss_workspace_bytes(model, setup) if head else 0.0
        added = parameters * 10 / chip.memory_bytes_per_s
        gradient = 4 if setup.element_bytes == 4 else software.gradient_bytes
        state = 8 if setup.element_bytes == 4 else software.state_bytes
        return LayerCost(
            forward_s=forward,
            backward_s=backward + added,
            update_s=parameters * software.optimizer_bytes / chip.memory_bytes_per_s,
            parameter_bytes=round(parameters * setup.element_bytes),
            gradient_bytes=round(parameters * gradient),
            optimizer_bytes=round(parameters * state),
            kept_bytes=round(kept),
            kept_bytes_recomputed=round(entering),
            output_bytes=0 if layer_kind == HEAD else round(output),
            workspace_bytes=round(workspace),
        )


def predicted_layers(
    model: Transformer, fleet: Fleet, *, precision: Precision = "bf16", software: Software | None = None
) -> PredictedLayers:
    """For all kinds of a fleet. A kind whose pools differ is as in the first of them.

    Raises ClusterError for a kind whose datasheet lacks a number that is needed.
    """
    software = software or Software()
    chips, networks = {}, {}
    for pool in fleet.pools:
        if pool.kind not in chips:
            device = fleet.accelerator(pool.kind)
            inside = None if pool.inside is None else pool.inside.bandwidth_bytes_per_s
            chips[pool.kind] = chip_of(device, precision, software)
            networks[pool.kind] = network_of(device, pool.devices_per_node, inside_bytes_per_s=inside)
    return PredictedLayers(model=model, precision=precision, chips=chips, networks=networks, software=software)
