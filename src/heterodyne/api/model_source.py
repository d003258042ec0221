"""The model that public functions are given, with its loss, example batch and optimizer, and what planning needs of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heterodyne.api.as_it_is import AsItIs
from heterodyne.api.capturing import capture_everywhere
from heterodyne.api.compiled import uncompiled, with_compiled
from heterodyne.api.loop.batches import BatchFormat, BatchLike, batch_format
from heterodyne.api.loop.model_with_loss import LossFunction, names_of, with_loss
from heterodyne.api.loop.remade_optimizer import remade
from heterodyne.api.optimizer_reach import reach_everywhere, reach_of_section
from heterodyne.api.options import AnyOptimizer, LossOptions, PlanOptions, chosen_optimizer, loss_options, wanted_plan
from heterodyne.api.precision import Asked, resolved
from heterodyne.api.session import Session
from heterodyne.api.settings import Settings
from heterodyne.errors import CaptureError
from heterodyne.frontend import CapturedModel, loss_of, require_initialised, require_own_memory
from heterodyne.job import OptimizerSection, Strategy
from heterodyne.measure.whole_model import WholeModel, resident_bytes, without_weights
from heterodyne.model_copy import copied
from heterodyne.plan.plan import Plan
from heterodyne.plan.precision import precision_of
from heterodyne.runtime.slices import BatchSource, as_source
from heterodyne.runtime.weights.optimizer import OptimizerFactory, require_optimizer_library
from heterodyne.runtime.weights.trainable import trainable_parameters

__all__ = ["CapturedSource", "ModelSource", "copies_of", "whole_model"]


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Made of arguments alone, the same on every rank, before a session is there.

    Args:
        model: the user's, without what torch.compile has put around it.
        module: the same with its loss.
        running: what of that is called where it runs whole, compiled if the user has compiled it.
        example, size: tensors by name; the number of samples where the batch says it.
        optimizer: an optimizer, a function that makes one, or a section.
        options, strategy, given: how a plan is found, or the one that is given.
    """

    model: nn.Module
    module: nn.Module
    running: nn.Module
    format: BatchFormat
    example: Mapping[str, Tensor]
    size: int | None
    loss: LossOptions
    shared: Sequence[str]
    optimizer: AnyOptimizer
    total_steps: int | None
    options: PlanOptions
    strategy: Strategy
    given: Plan | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example_batch: BatchLike,
        *,
        loss: LossFunction | LossOptions | None,
        shared: Sequence[str],
        optimizer: AnyOptimizer | None,
        plan: PlanOptions | Plan | Path | str,
        total_steps: int | None = None,
    ) -> ModelSource:
        """Return the source that these arguments describe.

        Raises HeterodyneError for arguments that do not go together, DataError for an example that is no batch.
        """
        of_loss = loss_options(loss)
        chosen = chosen_optimizer(optimizer, total_steps)
        plan_options, strategy, given = wanted_plan(plan)
        inside = uncompiled(model)
        format = batch_format(inside, example_batch, has_loss=of_loss.function is not None)
        example, size = _example(format.named(example_batch))
        module = (
            inside
            if of_loss.function is None
            else with_loss(inside, of_loss.function, format, example, withheld=of_loss.only)
        )
        return cls(
            model=inside,
            module=module,
            running=with_compiled(module, model),
            format=format,
            example=example,
            size=size,
            loss=of_loss,
            shared=shared,
            optimizer=chosen,
            total_steps=total_steps,
            options=plan_options,
            strategy=strategy,
            given=given,
        )

    @property
    def section(self) -> OptimizerSection:
        """Return what the planner takes the optimizer for."""
        return self.optimizer if isinstance(self.optimizer, OptimizerSection) else OptimizerSection()

    def capture(
        self, session: Session, *, precision: Asked, global_batch_size: int | None, compile: bool
    ) -> CapturedSource:
        """Capture the model, and try what its optimizer must see at once. Collective.

        Raises CaptureError or HeterodyneError, on every rank.
        """
        session.together(lambda: require_optimizer_library(self.section))
        precisions = resolved(session, precision)
        as_it_is = AsItIs(
            build=copies_of(self.module),
            loss_count=self.loss.loss_count,
            strategy="auto" if self.given else self.strategy,
            precision=precision_of(precisions, session.cluster.devices[session.rank].kind),
        )
        name = type(self.model).__name__
        captured = capture_everywhere(session, self.module, self.example, as_it_is, name=name, shared=self.shared)
        self._tell_weights_of_loss(session)
        factory: OptimizerFactory | None = None
        if isinstance(self.optimizer, Optimizer):
            factory = remade(self.optimizer, self.module)
        elif not isinstance(self.optimizer, OptimizerSection):
            factory = names_of(self.module).of_factory(self.optimizer)
        settings = Settings(
            global_batch_size=global_batch_size or self.size or as_source(self.example, captured.graph).size,
            precision=precisions,
            optimizer=self.section,
            parallelism=self.options.section(self.strategy),
            compile=compile,
            training_steps=self.total_steps,
            reach=reach_of_section(self.section)
            if factory is None
            # Nothing here holds on to the parameters: those that the plan has elsewhere go when the worker is made.
            else reach_everywhere(session, factory, trainable_parameters(self.module, captured.graph)),
        )
        return CapturedSource(
            captured=captured,
            whole=whole_model(self.running, captured, self.example),
            settings=settings,
            optimizer=factory or self.section,
        )

    def _tell_weights_of_loss(self, session: Session) -> None:
        function = self.loss.function
        own = [n for n, p in function.named_parameters() if p.requires_grad] if isinstance(function, nn.Module) else []
        if own:
            session.say(
                f"the loss has weights of its own ({', '.join(own[:3])}): the optimizer gets them with those of the model, and no other "
                "optimizer is needed for them"
            )


@dataclass(frozen=True, kw_only=True)
class CapturedSource:
    """A model that is captured, and what measuring, planning and training need of it."""

    captured: CapturedModel
    whole: WholeModel
    settings: Settings
    optimizer: OptimizerFactory | OptimizerSection


def _example(batch: Mapping[str, Tensor] | BatchSource) -> tuple[Mapping[str, Tensor], int | None]:
    """The tensors of an example, and its size where it states one."""
    return (batch.samples(0, batch.size), batch.size) if isinstance(batch, BatchSource) else (batch, None)


def copies_of(model: nn.Module) -> Callable[[torch.device], nn.Module]:
    """Copies of the model, so that measuring leaves the user's own as it is; ones without weights where it has none.

    Raises CaptureError for a model that cannot be copied, whose weights no forward has made yet, or are in the memory of others.
    """
    require_initialised(model)
    require_own_memory(model)
    _require_copies(model)

    def build(device: torch.device) -> nn.Module:
        twin = copied(model)
        meta = any(p.is_meta for p in twin.parameters())
        return twin.to_empty(device=device) if meta else twin.to(device)

    return build


def _require_copies(model: nn.Module) -> None:
    try:
        without_weights(model)
    except Exception as error:  # a module may hold anything
        said = str(error).strip().partition("\n")[0]
        raise CaptureError(
            f"{type(model).__name__} cannot be copied, and it is checked and measured on copies: {said}. Keep open files, locks and "
            "process groups out of its attributes"
        ) from error


def whole_model(model: nn.Module, captured: CapturedModel, example_batch: Mapping[str, Tensor]) -> WholeModel:
    """Made of `copies_of` the model, compiled ones where the compiled code will run."""
    # What is replaced for dropout and BatchNorm is replaced in Python code, so that is what runs then.
    replaces = captured.graph.random or captured.graph.batch_statistics
    model = uncompiled(model) if replaces else model
    return WholeModel(
        build=copies_of(model),
        inputs=captured.graph.inputs,
        example=example_batch,
        loss=loss_of,
        build_empty=lambda: without_weights(model),
        weightless=any(p.is_meta for p in model.parameters()),
        resident_bytes=resident_bytes(model),
    )
