"""PyTorch's DistributedDataParallel, with gradients of the mean over the global batch, whatever each rank's share of it is.

Everything else is PyTorch's own: buckets, hooks, ``no_sync``, unused parameters, static graphs, names in ``state_dict``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from heterodyne.drop_in.asked_for import communicator_for, honoured
from heterodyne.drop_in.batch_norm import batch_norms_of, join_batch_norms, without_sync
from heterodyne.drop_in.gathering import Gathering
from heterodyne.drop_in.loss_check import loss_in, require_count
from heterodyne.drop_in.loss_weight import LossCount, LossWeight, count_of, samples_in
from heterodyne.drop_in.pace import Pace, better_counts
from heterodyne.drop_in.reduction import GradientReduction
from heterodyne.drop_in.same_model import compared, require_same_model
from heterodyne.drop_in.sampler import Dealt, DistributedSampler, dealt_of
from heterodyne.errors import HeterodyneError, WorkerError
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.comm.process_group import ProcessGroup
from heterodyne.runtime.exact.batch_norm import GlobalBatchNorm

__all__ = ["DistributedDataParallel"]

_SUMS = ("sum", "ranks")  # words for a loss that is a part of a sum over the global batch
_BY_SAMPLES = (None, "samples", *_SUMS)  # what counts is known from what the loader deals
_OF_CONNECTION = ("_reduction", "_communicator", "_norm", "_pace", "_count", "_gathering")


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """A `torch.nn.parallel.DistributedDataParallel` for devices of unlike speed.

    Each rank's gradient is weighted by what its loss divides by, so that the sum is the gradient of the mean over the global batch.
    BatchNorm takes its statistics over all samples of it. ``hd.prepare_loader(loader, model)`` deals each rank what it can do in the same
    time.

    Args:
        module: as PyTorch takes it.
        arguments, options: PyTorch's, by place or by name. ``mixed_precision``, delayed parameters, ``device_mesh`` and process groups of
            some ranks only are refused by name, as are ``join`` and communication hooks.
        loss_count: what the loss of a rank divides by: its ``"samples"``, ``"tokens"`` (entries of the argument ``labels`` that are not
            -100), ``"shifted tokens"`` (all labels but the first of each row), nothing (``"sum"``), nothing, where the script has
            multiplied it by the number of ranks (``"ranks"``), or a function of the arguments of forward. None: samples, which is
            compared with the loss of two parts of the first batch where forward returns the loss.

    Raises:
        HeterodyneError: there is no process group, or an argument that cannot be honoured.
        WorkerError: the ranks have different models; which parameter is named.
        VerifyError: in the first forward: the loss divides by something else.
    """

    can_repeat_forward = True
    """Whether forward may run again on parts of the first batch, so that the count is compared with the loss."""

    def __init__(self, module: nn.Module, *arguments: Any, loss_count: LossCount | None = None, **options: Any) -> None:
        given = honoured(module, arguments, options)
        count_of(loss_count or "samples", module.forward)  # a word that is not known is told before anything is made
        communicator = communicator_for(module, given.arguments.get("process_group"))
        require_same_model(communicator, module)
        without_sync(module)
        alike = given.arguments.get("init_sync", True)
        given.arguments["init_sync"] = False  # between devices of several kinds it goes through the host, as below
        super().__init__(*given.args, **given.kwargs)
        self._loss_count: LossCount | None = loss_count
        self._dealt: Dealt | None = None
        self._in_work: Dealt | None = None  # of the last forward
        self._evaluated: Callable[[], float] | None = (
            None  # what the last forward counts, if it was one without gradients
        )
        self._checked = False
        self._frozen = [(name, p) for name, p in self.module.named_parameters() if not p.requires_grad]
        self._samplers: list[DistributedSampler] = []
        process_group = self._connect(communicator)
        kind = nn.Parameter if given.arguments.get("broadcast_buffers") is False else Tensor
        for tensor in compared(module).values() if alike else ():
            if isinstance(tensor, kind):
                process_group.broadcast(tensor.detach(), 0)

    def _connect(self, communicator: Communicator) -> ProcessGroup:
        """Give the model its process groups and hooks; the one for gradients. Collective."""
        everyone = range(communicator.world_size)
        gradients = communicator.process_group(everyone)
        assert gradients is not None
        trained = [
            tensor
            for tensor in compared(self.module).values()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        ]
        self._communicator = communicator
        self._count = count_of(self._loss_count or "samples", self.module.forward)
        scale = {"sum": 1.0, "ranks": 1 / communicator.world_size}.get(cast(str, self._loss_count))
        reduction = self._reduction = GradientReduction(gradients, trained, scale=scale)
        self._pace = reduction.pace
        self._gathering: Gathering | None = None
        self._norm: GlobalBatchNorm | None = None
        if communicator.world_size > 1 and batch_norms_of(self.module):
            statistics = communicator.process_group(everyone)
            assert statistics is not None
            self._norm = GlobalBatchNorm(statistics, reduction.factor, self._takes_part, reduction.pace)
            join_batch_norms(self.module, self._norm)
        super().register_comm_hook(reduction, lambda state, bucket: state.reduce(bucket))
        return gradients

    def _takes_part(self) -> bool:
        """Return whether this rank has samples of the batch, and not one that only keeps it in step."""
        return self._in_work is None or self._in_work.own > 0

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module on this rank's samples, as PyTorch's DDP does."""
        self._in_work = dealt_of((inputs, kwargs)) or self._dealt
        self._require_still_frozen()
        if not torch.is_grad_enabled():
            dealt = self._in_work
            self._evaluated = lambda: self._own_count(dealt, inputs, kwargs)
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._evaluated = None
        if not hasattr(self, "_reduction"):  # a copy
            self._connect(communicator_for(self.module))
        if self.require_backward_grad_sync:
            self._reduction.prepare()
            if self._samplers and self._pace.is_due:
                self._renew_shares()
        self._weigh(inputs, kwargs)
        if self._norm is not None:
            self._norm.begin_forward()
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if not self._checked:
            self._checked = True
            self._check(inputs, kwargs, output)
        return output

    def _require_still_frozen(self) -> None:
        """Raise HeterodyneError for a parameter that is trained since the model was wrapped: nobody reduces its gradient."""
        late = next((name for name, parameter in self._frozen if parameter.requires_grad), None)
        if late is not None:
            raise HeterodyneError(
                f"{late!r} was frozen when the model was wrapped, and requires a gradient now, which nobody reduces: unfreeze it "
                "before the model is wrapped, or wrap model.module again"
            )

    def _weigh(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Say what the loss of this forward counts, unless the script has."""
        reduction, dealt = self._reduction, self._in_work
        samples = dealt.own if dealt is not None else samples_in((*inputs, *kwargs.values())) or 0
        self._pace.note_forward(samples)
        if reduction.told and reduction.weight is not None:
            weight = reduction.weight
        else:
            total = 1.0 if self._loss_count in _SUMS else None
            if dealt is not None and self._loss_count in _BY_SAMPLES:
                total = dealt.total
            weight = LossWeight(self._own_count(dealt, inputs, kwargs), total, self._communicator.control)
        reduction.follow(weight, accumulates=not self.require_backward_grad_sync)

    def count(self, own: float | Tensor, total: float | None = None) -> _Counted:
        """Say by what this rank's loss divides, instead of ``loss_count``: until the gradients are reduced, or inside of ``with``.

        Every rank says it, before the backward; under ``no_sync`` for each micro-batch. Collective, unless all say the ``total`` of them.
        """
        number = float(own)
        if not 0 <= number < float("inf"):
            raise HeterodyneError(f"count({number:g}): what a loss divides by is finite and not negative")
        if self._dealt is not None and not self._dealt.own:
            number = 0.0  # a sample that only keeps this rank in step
        weight = LossWeight(number, total, self._communicator.control)
        self._reduction.follow(weight, accumulates=not self.require_backward_grad_sync)
        self._reduction.told = True
        return _Counted(self._reduction)

    def _own_count(self, dealt: Dealt | None, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Return what this rank's loss of a forward divides by, of whose batch that was dealt."""
        if dealt is not None and (not dealt.own or self._loss_count in _BY_SAMPLES):
            return dealt.own
        return self._count(inputs, kwargs)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks in the order of the global batch, for a loss that compares samples with each other. Collective.

        Each rank computes its loss from all rows: of its own samples against those of all ranks, or the same loss of all samples on every
        rank. Gradients flow back to the rank that each row is from. Call it behind the forward whose loss it is for.

        Args:
            tensor: [samples, ...], with as many samples as this rank has; other dimensions and the dtype are the same on all ranks.
        """
        if self._gathering is None:
            group = self._communicator.process_group(range(self._communicator.world_size))
            assert group is not None
            self._gathering = Gathering(group, self._reduction.factor, lambda: self._pace)
        return self._gathering.rows(tensor, takes_part=self._takes_part())

    @property
    def loss_weight(self) -> float:
        """Return by what the gradients of this rank's last forward with gradients are multiplied. Raises HeterodyneError before it."""
        if self._reduction.weight is None:
            raise HeterodyneError("the weight of a loss is that of a forward of this model, and there was none yet")
        return self._reduction.factor()

    @torch.no_grad()
    def mean(self, loss: Tensor | float) -> float:
        """Return the loss of the global batch, from each rank's loss of the last forward, with gradients or without. Collective."""
        if self._evaluated is not None:
            own = self._evaluated()
            factor = own if self._reduction.scale is None else self._reduction.scale * (own > 0)
        elif self._reduction.weight is not None:
            own = factor = self._reduction.factor()
        else:
            raise HeterodyneError("mean(loss) is of the last forward of this model, and there was none yet")
        sums = torch.tensor([factor * float(loss) if factor else 0.0, own], dtype=torch.float64)
        self._communicator.control.all_reduce(sums).wait()
        total, counted = sums.tolist()
        mean: float = total / counted if self._evaluated is not None and self._reduction.scale is None else total
        return mean

    def deal(self, dealt: Dealt | None) -> None:
        """Called by the loader: whose samples the next forward gets; None: its samples are not known."""
        self._dealt = dealt
        if dealt is None:
            self._in_work = None

    def follow_samplers(self, sampler: DistributedSampler, first: DistributedDataParallel) -> None:
        """Let the pace of this model, and of others that train in turns with ``first``, set the shares of a sampler."""
        self._pace = self._reduction.pace = first._pace
        if self._norm is not None:
            self._norm.waiting = self._pace
        self._samplers.append(sampler)  # of each: the first one may be a teacher that is never trained

    def leave_sampler(self, sampler: DistributedSampler) -> None:
        """Set the shares of that sampler no more."""
        self._samplers.remove(sampler)

    @property
    def communicator(self) -> Communicator:
        """Joins the ranks of this model."""
        return self._communicator

    def _renew_shares(self) -> None:
        """Tell the other ranks this one's pace, and set new shares on all of them where a step gains by it. Collective."""
        own = (self._pace.take(), [(each.drawn, each.handed_out, each.digest) for each in self._samplers])
        found = self._communicator.all_gather_object(own)
        sample_s = [pace[0] for pace, _ in found]
        self._require_same_steps([[batches for _, batches, _ in of] for _, of in found])
        self._require_same_streams([[digest for _, _, digest in of] for _, of in found])
        if max(pace[1] for pace, _ in found) < Pace.LEAST_S:
            return
        lines = []
        for number, sampler in enumerate(self._samplers):
            better = None if sampler.fixed else better_counts(sampler.deal(sampler.global_batch_size), sample_s)
            if better is not None:
                self._pace.look_again_soon()
                sampler.renew([1 / each for each in sample_s], max(of[number][0] for _, of in found))
                lines.append(f"{sampler.global_batch_size} samples a step are dealt as {', '.join(map(str, better))}")
        for line in dict.fromkeys(lines):
            self._say(line)

    @staticmethod
    def _require_same_steps(batches: list[list[int]]) -> None:
        """Raise WorkerError, on every rank, if some have reduced as many gradients as others from more batches."""
        ahead = [str(rank) for rank, of in enumerate(batches) if of != min(batches)]
        if ahead:
            raise WorkerError(
                f"rank {', '.join(ahead)} had a batch without a backward where others had one, so gradients of unlike steps were added up: "
                "leave a batch out on all ranks or on none (torch.distributed.all_reduce tells the others), or give it a loss of 0"
            )

    @staticmethod
    def _require_same_streams(digests: list[list[str | None]]) -> None:
        """Raise WorkerError, on every rank, if some read other samples from a stream of which each has its share."""
        other = [str(rank) for rank, of in enumerate(digests) if of != digests[0]]
        if other:
            raise WorkerError(
                f"rank {', '.join(other)} reads other samples from its IterableDataset than rank 0, so samples are left out: give every "
                "rank the whole stream, shuffled by a generator of its own with the same seed; or leave prepare_loader out, and let each "
                "rank take batches of its own"
            )

    def _check(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        words = (
            self._loss_count if isinstance(self._loss_count, str) else "the function" if self._loss_count else "samples"
        )
        sums = self._loss_count == "sum"
        if self.can_repeat_forward and self._loss_count not in ("samples", "ranks"):
            before = torch.get_rng_state()
            checked, *_ = (
                self._communicator.agreement.gather_or_raise(  # a score of one sample may look like a loss on a rank
                    lambda: (
                        loss_in(output) is not None
                        and require_count(self.module, inputs, kwargs, self._count, words=words, sums=sums)
                    )
                )
            )
            torch.set_rng_state(before)
            if checked:
                return
        if self._loss_count is None:
            self._say(
                "gradients are averaged by samples, for a loss that is a mean over them; say loss_count= of any other"
            )

    def _say(self, text: str) -> None:
        if self._communicator.rank == 0:
            sys.stderr.write(f"heterodyne: {text}\n")

    def register_comm_hook(self, state: object, hook: object) -> NoReturn:
        """Refuse: gradients are weighted where such a hook would average them."""
        del state, hook
        raise HeterodyneError(
            "a communication hook averages gradients as if all ranks had as many samples, so none can be registered here: leave it out"
        )

    def join(self, *arguments: Any, **options: Any) -> NoReturn:
        """Refuse: it is not needed, since the loader gives every rank as many batches."""
        del arguments, options
        raise HeterodyneError(
            "join() is for ranks with unlike numbers of batches: pass the loader through hd.prepare_loader(loader, model), which gives "
            "each rank as many, and leave join() out"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: it joins the ranks by itself when it is trained."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        kept = {name: value for name, value in state.items() if name not in _OF_CONNECTION}
        return kept | {"_samplers": [], "_dealt": None, "_in_work": None, "_comm_hooks": []}


class _Counted:
    """What `DistributedDataParallel.count` returns: in a ``with``, the count holds to its end."""

    def __init__(self, reduction: GradientReduction) -> None:
        self._reduction = reduction

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._reduction.told = False
