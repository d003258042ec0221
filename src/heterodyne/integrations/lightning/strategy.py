"""A strategy for the Trainer of Lightning: its loop, callbacks, logs and checkpoints as they are, its steps by a plan.

Every rank runs Lightning's own loop over global batches, as one process alone would. ``training_step`` is what `hd.distribute` is given
as a model, so any that torch.export can hold is cut, and any other is trained by data parallelism as it is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from heterodyne.api import Distributed, distribute
from heterodyne.api.loop.remade_optimizer import follow, remade
from heterodyne.api.options import LossOptions, loss_options
from heterodyne.api.session import LONGEST_PHASE_S, Session, open_session
from heterodyne.errors import CaptureError, DataError, HeterodyneError, VerifyError
from heterodyne.integrations.lightning.refusals import require_even_batches, require_honoured
from heterodyne.integrations.lightning.script_optimizer import ScriptOptimizer
from heterodyne.integrations.lightning.training_step import (
    BatchForm,
    Logged,
    TrainingStep,
    ValidationStep,
    joined,
    log_of_all,
    require_mean,
    size_of,
    what_it_logs,
)
from heterodyne.runtime.checkpoint.random_state import random_state, restore_random_state, unchanged_random_state
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment
from heterodyne.runtime.weights.materialise import called_with

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
else:
    Strategy = object

__all__ = ["PlanStrategy"]

_REFUSALS = (CaptureError, DataError, VerifyError)
_MODULE = "module."  # what the names of the LightningModule begin with in a `TrainingStep`


class PlanStrategy(Strategy):
    """What a strategy of Lightning is under a plan; made one by inheriting from the `Strategy` of the package whose Trainer it is for.

    Args:
        distribution: more arguments of `hd.distribute`, such as ``plan`` or ``loss=LossOptions(loss_count=...)``.

    Raises HeterodyneError at the start of a fit for what no plan can honour, with what to write instead.
    """

    def __init__(self, **distribution: Any) -> None:
        super().__init__()
        found = WorkerEnvironment.read()
        place = (0, 0, 0) if found is None else (found.rank, found.local_rank, found.node_rank)
        self.global_rank, self.local_rank, self.node_rank = place
        self._distribution = distribution
        self._session: Session | None = distribution.get("session")
        self._closing = ExitStack()
        self._begin()

    def _begin(self) -> None:
        """Set what a fit begins with."""
        self._distributed: Distributed | None = None
        self._step: TrainingStep | None = None
        self._logged: Mapping[str, Logged] = {}
        self._told = False  # what of that is left out
        self._optimizer: ScriptOptimizer | None = None
        self._waiting: list[dict[str, Tensor]] = []
        self._updates = False
        self._weights: Mapping[str, Tensor] | None = None
        self._validating = ExitStack()

    # The ranks: to Lightning each is alone, since all of them see all samples

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu") if self._session is None else self._session.device

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup_environment(self) -> None:
        if self._session is None:
            self._session = self._closing.enter_context(open_session())
        restore_random_state(self.broadcast(random_state()))  # samplers shall draw the same on every rank
        warnings.filterwarnings("ignore", ".*sync_dist=True.*")  # every rank logs the value of all samples already

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def all_gather(self, tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return bool(self.broadcast(decision))  # unequal devices may differ in the last bit of what is compared

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._session is None else self._session.communicator.broadcast_object(obj, src)

    def barrier(self, name: str | None = None) -> None:
        self.broadcast(None)

    def phase(self, words: str, limit_s: float = LONGEST_PHASE_S) -> AbstractContextManager[Any]:
        """Around long work of one rank (a callback that uploads), as `Distributed.phase`: ``with trainer.strategy.phase("uploading")``."""
        return nullcontext() if self._session is None else self._session.phase(words, limit_s)

    # The model

    def setup(self, trainer: Any) -> None:
        self._begin()
        super().setup(trainer)
        module: Any = self.lightning_module
        if self._is_fit:
            self._precision = require_honoured(trainer, module, self.optimizers)
            self._optimizer = ScriptOptimizer(self.optimizers[0])
        for part in module.modules():
            if hasattr(part, "sync_on_compute"):  # a metric: every rank updates it with all samples
                part.sync_on_compute = False

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _is_fit(self) -> bool:
        return str(self._trainer.state.fn.value) == "fit"

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        if not self._is_fit:  # else the plan says what of it is where
            self.lightning_module.to(self.root_device)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        assert self.lightning_module is not None
        on_host = self._trainer.training or self._weights is not None
        here = torch.device("cpu") if on_host else self.lightning_module.device
        return super().batch_to_device(batch, device or here, dataloader_idx)

    def on_train_start(self) -> None:
        require_even_batches(self._trainer)

    # A step

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of the step if the optimizer steps now, not a number as long as batches are accumulated for it."""
        batch, *more = args
        form = BatchForm(batch) if self._step is None else self._step.surroundings.form
        self._waiting.append(form.named(batch))
        if not self._updates:
            return torch.tensor(math.nan)
        batches, self._waiting = self._waiting, []
        whole = joined(batches)
        distributed, step = self._opened(form, whole, tuple(more))
        require_mean(distributed, batches)
        step.surroundings.more = tuple(more)
        script = self.optimizers[0]
        if any(config.reduce_on_plateau for config in self.lr_scheduler_configs):
            rates = self.broadcast([group["lr"] for group in script.param_groups])
            for group, rate in zip(script.param_groups, rates, strict=True):
                group["lr"] = rate
        follow(distributed.optimizer, script)
        with unchanged_random_state(), step.without_trainer(), step.notes() as notes:
            loss = distributed.step(whole).loss
        script.step()  # of no parameters: schedulers want to see it
        self._log(loss, notes, size_of(whole))
        return torch.tensor(loss)

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *_: Any, **__: Any) -> Any:
        self._updates = True
        try:
            return closure()
        finally:
            self._updates = False

    def _opened(
        self, form: BatchForm, batch: Mapping[str, Tensor], more: tuple[Any, ...]
    ) -> tuple[Distributed, TrainingStep]:
        """The model under its plan, made of the first batch. Collective."""
        if self._distributed is not None and self._step is not None:
            return self._distributed, self._step
        module: Any = self.lightning_module
        step = self._step = TrainingStep(module, form, self._trainer, more)
        held, count = self._optimizer, loss_options(self._distribution.get("loss")).loss_count
        of_batch = (lambda named: count(form.batch(named))) if callable(count) else count
        assert held is not None
        held.name(step)
        clip = self._trainer.gradient_clip_val
        with unchanged_random_state(), step.without_trainer():
            self._logged = what_it_logs(step, batch)
            kinds = self.broadcast({name: logged.of for name, logged in self._logged.items()})
            self._logged = {name: replace(self._logged[name], of=kind) for name, kind in kinds.items()}
            self._distributed = distribute(
                step,
                batch,
                **{
                    "optimizer": remade(held.script, step),
                    "precision": self._precision,
                    "clip_grad_norm": clip or 0.0,
                    **self._distribution,
                    "session": self._session,
                    "loss": LossOptions(loss_count=of_batch),
                },
            )
        if self._session is not None and (told := self._distributed.explain()):
            self._session.say(told)
        if all(parameter.device == self.root_device for parameter in step.parameters()):
            module.to(self.root_device)  # its metrics; the weights are there
        held.hand_over(self._distributed, self._trainer.global_step)
        return self._distributed, step

    def _log(self, loss: float, notes: Mapping[str, Logged], samples: int) -> None:
        """Log what training_step logs, for all samples of the step."""
        assert self._session is not None
        every = self._session.communicator.all_gather_object
        missing = log_of_all(self.lightning_module, self._logged, notes, loss=loss, samples=samples, every=every)
        if missing and not self._told:
            self._session.say(
                f"training_step logs {', '.join(missing)}, which is no mean over samples or is not computed under this plan: left out; "
                f"validation_step logs everything; {self._eagerly()}"
            )
        self._told = True

    # Validation, on every rank with all samples

    def on_validation_start(self) -> None:
        if self._session is not None:
            self._validating.enter_context(self._session.phase("validation"))
        if self._distributed is not None:
            self._weights = self._distributed.gathered_weights()

    def on_validation_end(self) -> None:
        self._weights = None
        self._validating.close()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._weights is None:
            return super().validation_step(*args, **kwargs)
        with self.precision_plugin.val_step_context():
            return called_with(ValidationStep(self.lightning_module), self._weights, args)

    # What is kept

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model, on every rank. Collective."""
        if self._distributed is None:
            return super().lightning_module_state_dict()
        return {name.removeprefix(_MODULE): value for name, value in self._distributed.state_dict()["model"].items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As torch has it, of the whole model, on every rank. Collective."""
        if self._distributed is None or self._optimizer is None:
            return super().optimizer_state(optimizer)
        return self._optimizer.state(self._distributed)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Set the rates now, and the state with the plan. Raises CheckpointError if it is of another optimizer."""
        assert self._optimizer is not None
        self._optimizer.restore(checkpoint["optimizer_states"][0])

    def teardown(self) -> None:
        """Weights and optimizer state are back, on every rank. Collective."""
        if self._distributed is not None and self._step is not None and self._optimizer is not None:
            state = self._optimizer.state(self._distributed)
            self._distributed.close()
            self._distributed = None
            self._optimizer.take_back(state, self._step)
        module: Any = self.lightning_module
        if not any(parameter.is_meta for parameter in module.parameters()):  # else an error has ended a plan
            super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks of an error now, and not when the script has ended."""
        if type(exception) is HeterodyneError or isinstance(exception, _REFUSALS):
            exception.add_note(self._eagerly())
        told = (type(exception), exception, exception.__traceback__)
        self._validating.close()
        distributed, self._distributed, self._session = self._distributed, None, None
        if distributed is not None:
            distributed.__exit__(*told)
        self._closing.__exit__(*told)

    def _eagerly(self) -> str:
        """Return what to write for a script that no plan can honour."""
        return f"strategy=DDPStrategy(), of {type(self).__module__}, runs any training_step as it is, eagerly, with unequal shares"
