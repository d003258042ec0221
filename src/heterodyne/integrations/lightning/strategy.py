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
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from heterodyne.api import Distributed, distribute
from heterodyne.api.loop.remade_optimizer import by_name, by_number, follow, remade
from heterodyne.api.options import LossOptions, loss_options
from heterodyne.api.session import LONGEST_PHASE_S, Session, open_session
from heterodyne.errors import CheckpointError
from heterodyne.integrations.lightning.refusals import require_even_batches, require_honoured
from heterodyne.integrations.lightning.training_step import (
    BatchForm,
    Logged,
    TrainingStep,
    joined,
    require_mean,
    size_of,
    what_it_logs,
)
from heterodyne.runtime.checkpoint.random_state import random_state, restore_random_state, unchanged_random_state
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
else:
    Strategy = object

__all__ = ["PlanStrategy"]

_MODULE = "module."
"""What the names of the LightningModule begin with in a `TrainingStep`."""


class PlanStrategy(Strategy):
    """What a strategy of Lightning is under a plan; made one by inheriting from the `Strategy` of the package whose Trainer it is for.

    Args:
        distribution: more arguments of `hd.distribute`, such as ``plan`` or ``loss=LossOptions(loss_count=...)``.

    Raises HeterodyneError at the start of a fit for what no plan can honour, with what to write instead.
    """

    def __init__(self, **distribution: Any) -> None:
        super().__init__()
        environment = WorkerEnvironment.read()
        self.global_rank = 0 if environment is None else environment.rank
        self.local_rank = 0 if environment is None else environment.local_rank
        self.node_rank = 0 if environment is None else environment.node_rank
        self._distribution = distribution
        self._session: Session | None = distribution.get("session")
        self._closing = ExitStack()
        self._precision = "fp32"
        self._begin()

    def _begin(self) -> None:
        """Set what a fit begins with."""
        self._distributed: Distributed | None = None
        self._step: TrainingStep | None = None
        self._logged: Mapping[str, Logged] = {}
        self._told = False  # what of that is left out
        self._groups: list[list[str]] = []  # the names of the parameters in each group of the optimizer
        self._restored: Mapping[int, Any] | None = None
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
            for group, rates in zip(
                script.param_groups, self.broadcast([g["lr"] for g in script.param_groups]), strict=True
            ):
                group["lr"] = rates
        follow(distributed.optimizer, script)
        with unchanged_random_state(), step.notes() as notes:
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
        script, count = self.optimizers[0], loss_options(self._distribution.get("loss")).loss_count
        names = {id(parameter): name for name, parameter in step.named_parameters()}
        self._groups = [[names[id(p)] for p in group["params"]] for group in script.param_groups]
        with unchanged_random_state():
            self._logged = what_it_logs(step, batch)
            kinds = self.broadcast({name: logged.of for name, logged in self._logged.items()})
            self._logged = {name: replace(self._logged[name], of=kind) for name, kind in kinds.items()}
            self._distributed = distribute(
                step,
                batch,
                **{
                    "optimizer": remade(script, step),
                    "precision": self._precision,
                    "clip_grad_norm": self._trainer.gradient_clip_val or 0.0,
                    **self._distribution,
                    "session": self._session,
                    "loss": LossOptions(
                        loss_count=(lambda named: count(form.batch(named))) if callable(count) else count
                    ),
                },
            )
        if self._session is not None and (told := self._distributed.explain()):
            self._session.say(told)
        if all(parameter.device == self.root_device for parameter in step.parameters()):
            module.to(self.root_device)  # its metrics; the weights are there
        for group in script.param_groups:
            group["params"] = []  # they are the plan's to update, and it may have left them to other ranks
        if self._restored is not None or self._trainer.global_step:
            state = self._distributed.state_dict()
            state["optimizer"] = by_name(self._restored or {}, self._groups)
            self._distributed.load_state_dict(state | {"step": self._trainer.global_step})
        return self._distributed, step

    def _log(self, loss: float, notes: Mapping[str, Logged], samples: int) -> None:
        """Log what training_step logs, for all samples of the step."""
        assert self._session is not None
        assert self._step is not None
        module: Any = self.lightning_module
        found: list[Mapping[str, Logged]] = [notes]
        if any(logged.of == "mean" for logged in self._logged.values()):
            found = self._session.communicator.all_gather_object(
                {name: Logged(values=noted.values, arguments=((), {})) for name, noted in notes.items()}
            )
        missing = []
        for name, logged in self._logged.items():
            parts = [pair for noted in found if name in noted for pair in noted[name].values]
            if logged.of != "loss" and (logged.of != "mean" or not parts):
                missing.append(name)  # in a later step: training_step has not logged it this time
                continue
            value = loss if logged.of == "loss" else sum(v * n for v, n in parts) / sum(n for _, n in parts)
            others, options = logged.arguments
            module.log(
                name, value, *others, **(options | ({"batch_size": samples} if options.get("batch_size") else {}))
            )
        if missing and not self._told:
            self._session.say(
                f"training_step logs {', '.join(missing)}, which is no mean over samples or is not computed under this plan: left out; "
                "validation_step logs everything"
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
            return functional_call(_Validation(self.lightning_module), dict(self._weights), args)

    # What is kept

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole model, on every rank. Collective."""
        if self._distributed is None:
            return super().lightning_module_state_dict()
        return {name.removeprefix(_MODULE): value for name, value in self._distributed.state_dict()["model"].items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As torch has it, of the whole model, on every rank. Collective."""
        if self._distributed is None:
            return super().optimizer_state(optimizer)
        return by_number(self._distributed.state_dict()["optimizer"], self._groups, self.optimizers[0])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Rates now, the state with the plan. Raises CheckpointError if it is of another optimizer."""
        saved = checkpoint["optimizer_states"][0]
        script = self.optimizers[0]
        if [len(g["params"]) for g in saved["param_groups"]] != [len(g["params"]) for g in script.param_groups]:
            raise CheckpointError(
                "the checkpoint's optimizer has other parameter groups: resume with the one that wrote it"
            )
        script.load_state_dict({**saved, "state": {}})
        self._restored = saved["state"]

    def teardown(self) -> None:
        """Weights and optimizer state are back, on every rank. Collective."""
        if self._distributed is not None and self._step is not None:
            script = self.optimizers[0]
            state = by_number(self._distributed.state_dict()["optimizer"], self._groups, script)
            self._distributed.close()
            self._distributed = None
            back = dict(self._step.named_parameters())
            for group, names in zip(script.param_groups, self._groups, strict=True):
                group["params"] = [back[name] for name in names]
            script.load_state_dict(state)
        assert self.lightning_module is not None
        if not any(
            p.is_meta for p in self.lightning_module.parameters()
        ):  # else an error has ended a plan that cuts it
            super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        """The other ranks are to hear of an error now, not when the script has ended."""
        told = (type(error), error, error.__traceback__) if error else (None, None, None)
        self._validating.close()
        distributed, self._distributed, self._session = self._distributed, None, None
        if distributed is not None:
            distributed.__exit__(*told)
        self._closing.__exit__(*told)


class _Validation(nn.Module):
    """``validation_step`` as the forward of a module, so that it can be called with other weights."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module.validation_step(*args)
