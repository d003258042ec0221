"""An even arrangement of alike devices: what other frameworks can run, in the field's own words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from heterodyne.errors import PlanError

__all__ = ["EvenPlan", "ModelShape", "Precision"]

Precision: TypeAlias = Literal["fp32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Numbers of a transformer as far as they are known; None: not known."""

    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    sequence_length: int | None = None


@dataclass(frozen=True, kw_only=True)
class EvenPlan:
    """Every device in one mesh of ``dp x pp x cp x tp``, every replica the same.

    Args:
        dp, tp, pp, cp, ep: data, tensor, pipeline, context and expert parallel; the experts lie whole over ``dp x cp x tp``.
        vpp: stages on each place of the pipeline.
        zero_stage: 0: all replicas hold all; 1: optimizer states are shared out; 2: gradients too; 3: weights too.
        micro_batch_size: samples of a micro-batch in each replica.
        global_batch_size: samples of a step, over all replicas.
        layers_per_stage: ``pp x vpp`` numbers in the order of the model; the embedding is with the first, the head with the last.
        recomputed_layers: for each stage how many of its layers compute their activations again; (): none.
        schedule: as in PyTorch.
        notes: what is not quite the same in the other framework, for whoever reads the export.

    Raises PlanError that lists all that does not fit together.
    """

    layers_per_stage: tuple[int, ...]
    micro_batch_size: int
    global_batch_size: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    recomputed_layers: tuple[int, ...] = ()
    schedule: str = "1F1B"
    precision: Precision = "bf16"
    shape: ModelShape = ModelShape()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        broken = [f"{name} is {getattr(self, name)}" for name in _DEGREES if getattr(self, name) < 1]
        if not broken:
            broken = list(self._broken())
        if broken:
            raise PlanError(f"not an even plan: {'; '.join(broken)}")

    def _broken(self) -> list[str]:
        broken, stages = [], self.pp * self.vpp
        if len(self.layers_per_stage) != stages:
            broken.append(f"{len(self.layers_per_stage)} stages for pp {self.pp} x vpp {self.vpp}")
        broken += [f"stage {i} has {n} layers" for i, n in enumerate(self.layers_per_stage) if n < 0]
        broken += [f"stage {i} has no layers" for i, n in enumerate(self.layers_per_stage[1:-1], start=1) if n == 0]
        if self.global_batch_size % (self.dp * self.micro_batch_size):
            broken.append(
                f"a global batch of {self.global_batch_size} is no multiple of dp {self.dp} x micro-batches of {self.micro_batch_size}"
            )
        if (self.dp * self.cp * self.tp) % self.ep:
            broken.append(f"ep {self.ep} does not divide dp {self.dp} x cp {self.cp} x tp {self.tp}")
        if self.vpp > 1 and self.pp == 1:
            broken.append(f"vpp is {self.vpp} where there is no pipeline")
        if self.recomputed_layers and len(self.recomputed_layers) != len(self.layers_per_stage):
            broken.append(f"{len(self.recomputed_layers)} recomputed_layers for {len(self.layers_per_stage)} stages")
        for stage, (again, layers) in enumerate(zip(self.recomputed_layers, self.layers_per_stage, strict=False)):
            if not 0 <= again <= layers:
                broken.append(f"stage {stage} computes {again} of its {layers} layers again")
        return broken

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def layers(self) -> int:
        return sum(self.layers_per_stage)

    @property
    def num_microbatches(self) -> int:
        """Of each replica in a step."""
        return self.global_batch_size // (self.dp * self.micro_batch_size)

    @property
    def alike_stages(self) -> bool:
        """Whether each stage has as many layers as any other."""
        return len(set(self.layers_per_stage)) == 1

    @property
    def stage_layout(self) -> str:
        """Layers of each stage, as ``[12, 10, 6, 4]``."""
        return str(list(self.layers_per_stage))


_DEGREES = ("dp", "tp", "pp", "vpp", "cp", "ep", "micro_batch_size", "global_batch_size")
