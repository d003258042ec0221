"""TrainingArguments of a script in which heterodyne, not Accelerate, connects the ranks."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Self

from accelerate.utils import patch_environment
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from heterodyne.errors import HeterodyneError
from heterodyne.runtime.rendezvous.environment import WorkerEnvironment

__all__ = ["HeterodyneArguments"]

# By these Accelerate finds that a launcher has started it, and opens a process group.
_ALONE = {"local_rank": -1} | dict.fromkeys(
    ("world_size", "pmi_size", "ompi_comm_world_size", "mv2_comm_world_size"), 1
)


@dataclass
class HeterodyneArguments(TrainingArguments):
    """As `transformers.TrainingArguments`. To Accelerate each rank is a process of its own, without an accelerator.

    The session of `hd.distribute` joins the ranks and places the model.
    """

    global_batch_size: int = field(
        default=0,
        metadata={
            "help": "Samples of an optimizer step. 0: per_device_train_batch_size * ranks * gradient_accumulation_steps."
        },
    )

    def __post_init__(self) -> None:
        environment = WorkerEnvironment.read()
        self._rank = 0 if environment is None else environment.rank
        self._local_rank = 0 if environment is None else environment.local_rank
        self._ranks = 1 if environment is None else environment.world_size
        self._wants_cpu = self.use_cpu
        self.use_cpu = True
        with patch_environment(**_ALONE):
            super().__post_init__()  # type: ignore[no-untyped-call]

    @property
    def process_index(self) -> int:
        return self._rank

    @property
    def local_process_index(self) -> int:
        return self._local_rank

    @property
    def place_model_on_device(self) -> bool:
        return False

    def of_one_process(self) -> Self:
        """The same for a Trainer whose every batch is a global one and whose Accelerate leaves the model as it is.

        Raises HeterodyneError if the batch size is impossible.
        """
        made = copy.copy(self)
        config: Any = copy.deepcopy(self.accelerator_config)
        made.accelerator_config = config
        ranks = 1 if config.split_batches else self._ranks
        made.per_device_train_batch_size = self.global_batch_size or (
            self.per_device_train_batch_size * ranks * self._accumulated(config)
        )
        if made.per_device_train_batch_size < 1:
            raise HeterodyneError(f"a global batch of {made.per_device_train_batch_size} samples: at least 1 is needed")
        made.per_device_eval_batch_size = self.per_device_eval_batch_size * ranks
        made.gradient_accumulation_steps = 1
        made.mixed_precision = "no"  # the plan casts, not Accelerate
        made.activation_checkpointing = made.gradient_checkpointing = False  # the plan says what is computed again
        return made

    def _accumulated(self, config: AcceleratorConfig) -> int:
        """Return how many batches make a step, and take that out of what Accelerate is given.

        Raises HeterodyneError if it is said in two ways.
        """
        options = config.gradient_accumulation_kwargs or {}
        steps = options.pop("num_steps", None)
        if steps is not None and self.gradient_accumulation_steps > 1:
            raise HeterodyneError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}, and num_steps={steps} in accelerator_config's "
                "gradient_accumulation_kwargs: say it once, by gradient_accumulation_steps"
            )
        return int(steps or self.gradient_accumulation_steps)
