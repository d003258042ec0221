"""For one's own training loop: a model in, the same mathematics out, spread over whatever devices there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from heterodyne.api.loop.average import Average
from heterodyne.api.loop.batches import BatchFormat, BatchLike, require_like_example
from heterodyne.api.loop.callbacks import Callback
from heterodyne.api.loop.calls import Calls
from heterodyne.api.loop.inside import Inside
from heterodyne.api.loop.model_with_loss import names_of
from heterodyne.api.loop.prediction import BatchPredictor, Metric, gathered_outputs
from heterodyne.api.loop.validation import KeptMetric, validated
from heterodyne.api.loop.weights_back import WeightsAtEnd, gathered_weights
from heterodyne.api.loop.whole_weights import WholeWeights
from heterodyne.api.memory_ends import rescued_if_memory_ends
from heterodyne.api.run_files import write_summary
from heterodyne.api.session import LONGEST_PHASE_S, Session
from heterodyne.api.settings import Prepared
from heterodyne.arguments import checked_arguments
from heterodyne.cluster.profile import Profile
from heterodyne.errors import CheckpointError, HeterodyneError
from heterodyne.graph.ir import ModelGraph
from heterodyne.plan.plan import Plan
from heterodyne.processes.signals import StopRequest, finished_first, orderly_stop
from heterodyne.run_directory import RunDirectory
from heterodyne.runtime.checkpoint.checkpoints import Checkpoints, taken_from
from heterodyne.runtime.checkpoint.export import export_model
from heterodyne.runtime.engine import EXTRA, Engine
from heterodyne.runtime.records.progress import SilentReporter
from heterodyne.runtime.records.recorder import Recorder
from heterodyne.runtime.records.run_records import RunRecords
from heterodyne.runtime.slices import BatchSource, as_source, is_source
from heterodyne.runtime.weights.average import WeightAverage
from heterodyne.runtime.weights.materialise import fill_in
from heterodyne.runtime.worker import StepResult, Worker
from heterodyne.search.explain import paragraph
from heterodyne.timeline import Timeline
from heterodyne.tracker_options import TrackerOptions

__all__ = ["Distributed"]


class Distributed:
    """A model spread over the devices of a session. Made by `distribute`; every rank makes the same calls in the same order.

    Left by an exception it leaves the model as it is; else the trained weights are back in the model (``weights_at_end``).
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        format: BatchFormat,
        session: Session,
        prepared: Prepared,
        worker: Worker,
        recorder: Recorder,
        run: RunDirectory | None,
        trackers: Sequence[TrackerOptions],
        callbacks: Sequence[Callback],
        weights_at_end: WeightsAtEnd,
        closing: ExitStack,
    ) -> None:
        self._model = model
        self._format = format
        self._session = session
        self._prepared = prepared
        self._worker = worker
        self._recorder = recorder
        self._run = run
        self._callbacks = list(callbacks)
        self._weights_at_end = weights_at_end
        self._closing = closing
        self._closed = False
        self.extra: dict[str, Any] = {}
        """What was kept beside the checkpoint that was loaded last."""
        self._names = names_of(worker.module)
        self._unheld = worker.unheld(self._names.own)
        self._calls = Calls(session, self._unheld)
        self._predictor = BatchPredictor(worker, session.say)
        self._inside = Inside(model, worker, session)
        planned = prepared.planned
        records = RunRecords(
            run=run,
            reporter=SilentReporter(0),
            samples=self.plan.global_batch_size,
            ideal_samples_per_s=None if planned is None else sum(planned.rates.values()),
            trackers=trackers,
            config={"model": self.graph.name, "global_batch_size": self.plan.global_batch_size},
            say=session.say,
        )
        self._engine = Engine(
            worker=worker,
            agreement=session.agreement,
            plan=self.plan,
            identity={"loop": {"model": self.graph.name, "parameters": self.graph.parameter_count}},
            records=records,
            say=session.say,
            names=self._names,
            phase=self.phase,
        )
        self._stop: StopRequest | None = None
        self._stops = False
        self._checkpoints_in: dict[Path, Checkpoints] = {}

    @property
    def plan(self) -> Plan:
        """Return who does what."""
        return self._prepared.lowered.plan

    @property
    def graph(self) -> ModelGraph:
        """Return what was captured of the model."""
        return self._prepared.captured.graph

    @property
    def profile(self) -> Profile:
        """Return what was measured of the model on each device."""
        return self._prepared.profile

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._session.rank

    @property
    def module(self) -> nn.Module:
        """The user's own module (the one inside, if it is compiled). Parameters and buffers that not every rank holds whole tell their
        shapes and types, and raise PlanError for any other use until the end; see `whole_weights`."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the parameters that this rank holds, perhaps none. A scheduler made of it is stepped on every rank."""
        return self._worker.optimizer

    @optimizer.setter
    def optimizer(self, _: object) -> NoReturn:
        raise HeterodyneError(
            "trainer.optimizer cannot be another one: plan and state are made for that which optimizer= has made. Change its options "
            "(trainer.optimizer.param_groups), or close this trainer and distribute the model again with the other one"
        )

    @property
    def steps_done(self) -> int:
        """Also those before a checkpoint that was loaded."""
        return self._worker.steps_done

    def _named(self, batch: BatchLike, *, without_target: bool = False) -> Mapping[str, Tensor] | BatchSource:
        named = self._format.named(batch, without_target=without_target)
        if not is_source(named):
            require_like_example(named, self.graph)
        return named

    def step(self, batch: BatchLike) -> StepResult:
        """One optimizer step on a global batch, the same on every rank; each works on its share of it.

        A step whose loss or gradient is not finite updates nothing; its result has a ``fault``. Raises NumericsError after more than
        five of them in a row; DataError for a batch of another size than the plan's, one in which nothing counts, or batches that differ
        between ranks; HeterodyneError after `close`.
        """
        self._require_open()
        with self._calls.named("step()"), rescued_if_memory_ends(self._session, self._engine.rescue):
            with self._inside.trained() as add_gradients:
                result = self._engine.step(lambda: self._named(batch), self._stop)
                add_gradients(result.scale)
            self._unheld.note_step()
            self._predictor.forget()
        self._tell(lambda callback: callback.on_step_end(self, result))
        return result

    @property
    def should_stop(self) -> bool:
        """Return whether any rank was asked to stop (Ctrl-C, SIGTERM), the same on all of them; to be read on every rank after each step.

        From the first time that it is read until `close` a signal no longer ends the script at once: the step under way is finished, and
        this is true after it, on every rank after the same step, so that the script can save a checkpoint and leave its loop. A second
        signal ends the process at once.
        """
        if self._closed:
            return self._stops
        with self._calls.named("should_stop"):
            if self._stop is None:
                words = "the step, and what the script does when it reads should_stop,"
                self._stop = self._closing.enter_context(orderly_stop(words, LONGEST_PHASE_S, self._session.say))
            self._stops = self._stops or self._engine.stopping(self._stop)
            return self._stops

    def evaluate(self, batch: BatchLike) -> float:
        """The loss of a batch of any size in eval mode, without training on it."""
        with self._calls.named("evaluate()"):
            return self._worker.evaluate(self._named(batch))

    @checked_arguments
    def validate(self, batches: Iterable[BatchLike], metrics: Mapping[str, Any] | None = None) -> dict[str, float]:
        """``loss`` and each metric over all samples of the batches, which may have any sizes; the same on every rank.

        Args:
            metrics: by name a function ``(outputs, batch) -> (sum, count)``. It is called with parts of the batches, in the form in
                which they are given, on the rank that runs them; sums and counts are added up and divided at the end, so that each
                sample counts once, also in an uneven last batch. Or a metric of torchmetrics, which is updated with the outputs and the
                last tensor of a tuple, or ``(metric, function)`` with what it is updated with: ``function(outputs, batch)``.
        """
        with self._calls.named("validate()"):
            communicator = self._session.communicator
            own = {name: self._own_metric(name, metric) for name, metric in (metrics or {}).items()}
            found = validated(batches, own, self._format, self._worker, self._predictor, communicator)
            self._engine.validated(found["loss"])
        self._tell(lambda callback: callback.on_evaluate(self, found))
        return found

    @checked_arguments
    def predict(self, batch: BatchLike, *, on: Literal["all", "rank0"] = "all") -> Any:
        """Return what the model returns for the samples of a batch, in eval mode: tensors on the host, the samples in order.

        What has no row for each sample (a loss, a cache) is None. The batch may lack what only the loss reads. None on the ranks that
        are not to have it.

        Raises DataError if the model returns its loss alone.
        """
        with self._calls.named("predict()"):
            named = self._named(batch, without_target=True)
            return gathered_outputs(list(self._predictor.parts(named)), self._session.communicator, on)

    @checked_arguments
    def activations(
        self,
        modules: str | Sequence[str],
        batch: BatchLike,
        *,
        gather: bool = True,
        on: Literal["all", "rank0"] = "all",
    ) -> dict[str, Any]:
        """Return by path what modules inside of the model return for a batch, in eval mode, as forward hooks see it on one device.

        A module that is called several times in a forward has a list. In the place of tuples and lists are tuples, of other classes that
        hold tensors dicts. The plan stays as it is; the model is captured once more, with these modules' outputs in its graph.

        Args:
            modules: paths, as ``named_modules()`` has them; ``*`` stands for anything ("blocks.*.mlp").
            gather: bring the outputs together, on the host, the samples in order; False: a list of `OutputShard` of this rank, which may be
                empty.
            on: the ranks that are to have what is brought together; the others get an empty dict.

        Raises HeterodyneError for a path that matches nothing, PlanError for a module whose output nothing computes under a plan, or of
        which parts of a batch do not make up the whole.
        """
        self._require_open()
        with self._calls.named("activations()"):
            patterns = [modules] if isinstance(modules, str) else modules
            named = self._named(batch)
            return self._inside.activations(patterns, named, on if gather else None)

    @checked_arguments
    @contextmanager
    def edit(self, functions: Mapping[str, Callable[[Any], Any]]) -> Iterator[None]:
        """Let modules inside of the model return something else while the block runs, in steps, evaluation, prediction and `activations`.

        Args:
            functions: by path, as in `activations`, a function or module that is called with what the module returns, for parts of the
                batch, and gives what it returns instead: the same shape and type, or None for no change. Autograd goes through it. Tensors
                of its own that require gradients (a probe, a steering vector) have that of the batch in ``.grad`` after a step, on all
                ranks; another optimizer, of the script, may update them.

        Each function is called with random numbers in the place of three samples before the block begins. Raises PlanError if it fails
        there, changes the shape, makes something else of samples together than of each alone, or is another on another rank.
        """
        self._require_open()
        with self._calls.named("edit()"):
            edits = self._inside.edits(functions)
            edits.__enter__()
        try:
            yield
        finally:
            self._predictor.forget()
            edits.__exit__(None, None, None)

    @checked_arguments
    def loss_weights(self, parts: Sequence[Mapping[str, Tensor]]) -> list[float]:
        """By what the losses of the parts of a batch are multiplied to be, together, the loss of the batch; each part by name."""
        count, buffers = self._worker.loss_count, dict(self._worker.module.named_buffers())
        with self._unheld.lifted():
            own = [count.statistics(part, as_source(part, self.graph).size, buffers) for part in parts]
            whole = torch.stack(own).sum(0)
            return [count.weight(part, whole) for part in own]

    def gathered_weights(self) -> dict[str, Tensor] | None:
        """Return every parameter and buffer, on the host of every rank, where the plan cuts the model; else None, and those of `module` are
        up to date.
        """
        with self._calls.named("gathered_weights()"):
            tensors = self._worker.state.tensors()
            if self._worker.ownership.whole:
                return None
            return self._names.own_model({name: tensor.cpu() for name, tensor in tensors.items()})

    @checked_arguments
    @contextmanager
    def whole_weights(self, *names: str) -> Iterator[nn.Module]:
        """Bring all parameters and buffers together in the model of every rank while the block runs; in host memory if the plan cuts it.

        They may be read, used (``model(x)``) and changed in place there, alike on every rank. At the end the ranks are compared, and what
        was changed goes to those that hold it; the optimizer's state stays as it is. An error in the block, on any rank, leaves the weights
        as they were. Gradients that are computed in the block are gone at its end. Nothing else of the trainer may be called in it.

        Args:
            names: of the parameters and buffers that are needed, as the model names them; none: all of them.

        Raises PlanError where a host has no room for them, or ranks have changed them differently.
        """
        wanted = [self._names.captured(name) for name in names]
        with self._calls.named("whole_weights()"):
            loan = WholeWeights(self._worker, self._session, self._unheld, wanted)
        try:
            with self._calls.block("'with trainer.whole_weights()'"):
                yield self._model
        except BaseException as error:
            with self._calls.named("whole_weights()"):
                loan.give_up(error)
            raise
        with self._calls.named("whole_weights()"):
            loan.give_back()
            self._predictor.forget()

    @checked_arguments
    def average(self, decay: float = 0.999) -> Average:
        """Keep an exponential moving average of the parameters from now on: ``decay * average + (1 - decay) * weights`` after each step
        that updates them, beginning with the weights as they are.

        Each rank averages what it updates, fp32 masters where there are any; buffers are not averaged. States and checkpoints have all
        averages of a trainer, in the order in which they were made; one that was loaded before goes on when it is asked for.
        """
        with self._calls.named("average()"):
            kept = self._worker.state.average(decay)
        return Average(self, self._calls, lambda: self._with_average(kept), self._whole_model)

    @contextmanager
    def _with_average(self, kept: WeightAverage) -> Iterator[None]:
        try:
            with self._worker.state.applied(kept):
                self._predictor.forget()
                yield
        finally:
            self._predictor.forget()

    def _whole_model(self) -> dict[str, Any]:
        return self._names.own_model(self._worker.state.weights(on=None))

    def state_dict(self) -> dict[str, Any]:
        """Model, optimizer (both by the names of the user's model) and step; the same on every rank, and copies that later steps leave."""
        with self._calls.named("state_dict()"):
            state = self._names.own_state(self._worker.state.state_dict())
            copied: dict[str, Any] = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)
            return copied

    @checked_arguments
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`. Raises CheckpointError."""
        with (
            self._calls.named("load_state_dict()"),
            taken_from("it is a state", "pass what state_dict() returned, of this model"),
        ):
            self._worker.state.load_state_dict(self._names.captured_state(state))
            self._predictor.forget()

    @checked_arguments
    def save_pretrained(self, path: Path | str) -> Path:
        """Write the weights into a directory: a Transformers model by its own ``save_pretrained``, others as ``model.safetensors``.

        Raises CheckpointError on every rank if rank 0, which writes, cannot.
        """
        with self._calls.named("save_pretrained()"), self.phase("writing the weights"):
            weights = self._names.own_model(self._worker.state.weights())
            written = self._session.agreement.on_rank0(lambda: export_model(self._model, Path(path), weights))
        self._tell(lambda callback: callback.on_save(self, written))
        return written

    @checked_arguments
    def save_checkpoint(
        self, directory: Path | str | None = None, *, extra: Mapping[str, Any] | None = None, keep: int = 2
    ) -> Path:
        """Write everything that a later `load_checkpoint` needs to go on, whole or not at all; where it is.

        Args:
            directory: of the checkpoints; None: that of the run directory. Where hosts share no disk behind it, each keeps there what its
                ranks write.
            extra: what else shall be kept, the same on every rank; see `register_for_checkpointing` for objects.
            keep: so many of the newest stay.

        A signal that asks to stop is obeyed when the checkpoint is whole. Raises CheckpointError on every rank if any of them cannot write,
        NumericsError if the last step was skipped or the state is not
        finite: it would take the place of one that is.
        """
        first = finished_first("the checkpoint", LONGEST_PHASE_S, self._session.say)
        with first, self._calls.named("save_checkpoint()"):
            path = self._engine.save(self._checkpoints(directory, keep), {EXTRA: dict(extra)} if extra else {})
        self._tell(lambda callback: callback.on_save(self, path))
        return path

    @checked_arguments
    def register_for_checkpointing(self, **objects: Any) -> None:
        """Keep the state of these objects in checkpoints, under the names that are given: `batches`, schedulers, anything that has
        ``state_dict()`` and ``load_state_dict()``, the same on every rank.

        An object takes over the state that a checkpoint has of it, whether that is loaded later or was loaded before. Schedulers and what
        deals batches go on rightly, too, where the run goes on from what was kept when memory ended; with other objects nothing is kept
        then. Raises CheckpointError for an object without these methods.
        """
        with self._calls.named("register_for_checkpointing()"):
            self._engine.registered.add(objects)

    @checked_arguments
    def load_checkpoint(self, directory: Path | str | None = None) -> dict[str, Any] | None:
        """Go on from the newest whole checkpoint, also one that was written under another plan or by other ranks.

        Returns its ``extra``, empty if it had none; None if there is no checkpoint yet. Raises CheckpointError, also for a ``directory``
        that is not there.
        """
        there = self._session.agreement.gather_or_raise(lambda: directory is None or Path(directory).is_dir())
        self._session.agreement.only_on_rank0(lambda: _require_there(directory, there))
        with self._calls.named("load_checkpoint()"), self.phase("reading a checkpoint"):
            checkpoints = self._checkpoints(directory, 2)
            found = checkpoints.latest()
            if found is None:
                return None
            beside = self._engine.restore(checkpoints, found, same_plan=found.plan == self.plan.dump())
            self._predictor.forget()
            self.extra = dict(beside.get(EXTRA, {}))
        self._session.say(f"going on after step {self.steps_done} from {found.path}")
        return self.extra

    @checked_arguments
    def phase(self, words: str, limit_s: float = LONGEST_PHASE_S) -> AbstractContextManager[Any]:
        """A context manager around long work of one rank between two calls, such as an upload. The other ranks wait for it in their next
        call, for up to ``limit_s`` seconds, and do not take it for stuck. It is not collective.
        """
        return self._session.phase(words, limit_s)

    def explain(self) -> str:
        """The plan in words, and why it was chosen; on rank 0, empty elsewhere."""
        planned = self._prepared.planned
        return "" if planned is None else paragraph(planned)

    def predicted(self) -> Timeline | None:
        """Return what should happen in a step; on rank 0, None elsewhere."""
        planned = self._prepared.planned
        return None if planned is None else planned.simulation.timeline(self._device_ids)

    def measured(self) -> Timeline | None:
        """Return what happened in the latest steps; on rank 0, None elsewhere. Collective."""
        with self._calls.named("measured()"):
            return self._recorder.timeline(self._session.communicator, self._device_ids)

    def close(self) -> None:
        """Bring the weights back into the model, finish the run directory, take the hooks off the model, and leave the session if it was
        opened by `distribute`. Every rank calls it, as any other method; a second call does nothing.
        """
        self._close(self._weights_at_end)

    def _close(self, weights_at_end: WeightsAtEnd) -> None:
        if self._closed:
            return
        with self._calls.named("close()"), self.phase("bringing the weights back"):
            self._engine.prune()
            self._summarise()
            weights = gathered_weights(self._worker, self._session, weights_at_end)
            self._leave()
            if weights:
                fill_in(self._worker.module, weights)
        if self._session.watchdog is not None:
            self._session.watchdog.before_out_of_memory(lambda: None)
        self._closing.close()

    def _summarise(self) -> None:
        measured = self.measured()
        if self._run is None:
            return
        outcome = self._engine.outcome(interrupted=self._stops)
        if self.rank == 0:
            if measured is not None and outcome.loss is not None:
                measured.save(self._run.timeline("measured"))
            write_summary(self._run, self.graph, outcome)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:  # the other ranks may not come to any collective any more
            self._leave()
            self._closing.__exit__(kind, error, trace)

    def _leave_with_script(self, error: BaseException | None) -> None:
        """Leave at the end of a script that has not closed the trainer; what it died of, None: nothing, and nobody reads its model now."""
        if error is None:
            self._close("none")
        else:
            self.__exit__(type(error), error, error.__traceback__)

    def _leave(self) -> None:
        self._closed = True
        self._unheld.release()
        self._engine.close()
        self._worker.close()

    def _own_metric(self, name: str, metric: Any) -> Metric | KeptMetric:
        of, reads = metric if isinstance(metric, tuple) else (metric, None)
        if hasattr(of, "update") and hasattr(of, "compute"):
            return KeptMetric(name, of, reads)
        return self._as_own_code(of)

    def _as_own_code(self, metric: Metric) -> Metric:
        def called(outputs: Any, batch: Any) -> Any:
            with self._unheld.guarded():
                return metric(outputs, batch)

        return called

    def _tell(self, call: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            call(callback)

    def _require_open(self) -> None:
        if self._closed:
            raise HeterodyneError(
                "the trainer is closed: its 'with' block has ended, or close() was called, and the gradients of the ranks are no longer "
                "reduced. Step inside of the 'with' block, or distribute the model again"
            )

    def _checkpoints(self, directory: Path | str | None, keep: int) -> Checkpoints:
        if directory is not None:
            place = Path(directory)
        elif self._run is not None:
            place = self._run.checkpoints
        else:
            raise CheckpointError(
                "there is no run directory to keep checkpoints in: pass one to distribute (run=), or a directory here"
            )
        found = self._checkpoints_in.setdefault(
            place, Checkpoints(place, agreement=self._session.agreement, say=self._session.say)
        )
        found.keep = keep
        return found

    @property
    def _device_ids(self) -> list[str]:
        return [device.id for device in self._session.cluster.devices]


def _require_there(directory: Path | str | None, there: Sequence[bool]) -> None:
    if not any(there):
        raise CheckpointError(
            f"load_checkpoint: there is no directory {directory}; correct the path. For a first run, which has no checkpoint yet, make it "
            "before: Path(...).mkdir(parents=True, exist_ok=True)"
        )
