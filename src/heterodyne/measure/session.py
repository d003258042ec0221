"""Measuring a model on a cluster: every rank measures itself, all learn everything."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from heterodyne.cluster.profile import WHOLE, BlockSample, DeviceProfile, LinkSample, Profile
from heterodyne.cluster.spec import Cluster, Device
from heterodyne.errors import MeasureError
from heterodyne.graph.ir import Block, ModelGraph
from heterodyne.measure.block_run import BlockProgram, Halves, Precision, Surroundings
from heterodyne.measure.cache import Cache, profile_key
from heterodyne.measure.clock import Stopwatch
from heterodyne.measure.collectives import MESSAGE_BYTES, measure_all_reduce, measure_exchanges, measure_overlap
from heterodyne.measure.confirm import Cores, busy, changes, taken_by_others
from heterodyne.measure.host_memory import host_context_bytes
from heterodyne.measure.kernels import measure_blocks
from heterodyne.measure.links import measure_host_copies, measure_sends
from heterodyne.measure.notes import told_once
from heterodyne.measure.optimizer_step import measure_optimizer
from heterodyne.measure.peers import Peers, ProcessGroup
from heterodyne.measure.sampling import Sampling
from heterodyne.measure.step_overhead import LoneSteps, measure_step_overhead
from heterodyne.measure.workbench import Workbench
from heterodyne.processes.heap import give_back_memory

__all__ = ["Request", "bytes_to_run", "measure"]

_BUDGET = {"blocks": 0.6, "optimizer": 0.05, "overhead": 0.05, "all-reduce": 0.12, "transfers": 0.12, "exchanges": 0.06}
_PART = 0.25
"""Of the training: unequal devices gain more than that by shares of their own, as a rule."""
_LEAST_S = 10.0
"""In less, what every plan needs (the smallest sizes, two messages a link) is not measured."""
_MUCH_LONGER = 2.0
"""How many times as long as a kept profile was measured may be allowed before it is measured again."""
_OPTIMIZER_BYTES = 256 * 2**20
_OVERLAP_S = 0.05  # the collective under which computation is timed: long enough to matter, short enough to repeat


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured, equal on every rank (but for the device).

    Args:
        graph: the model, for its fingerprint, its parameters and what each block needs.
        programs: each kind of block of the graph, and the whole model as ``*`` if wanted.
        cluster: the device of each rank, in order.
        device: where the tensors of this rank live.
        micro_batch_sizes: sizes to measure.
        while_faster: larger sizes are left out once no device gains by them.
        optimizer: ``adamw``, ``adamw8bit``, ``sgd`` or ``adafactor``.
        budget_s: about the seconds that all of it may take.
        training_samples: of all the training that is asked for; measuring then takes no more than a part of it. None: not known.
        halves: makes what splits a backward into halves; None: backwards are measured as a whole only.
        compile: lets blocks and model run compiled; None: they run as they are.
        around: what training puts around a forward and a backward; None: nothing.
        lone_steps: trains the whole model on this device alone; None: what a step takes besides passes and update is not measured.
        model_bytes: of the weights that the model has in the memory of this process.
    """

    graph: ModelGraph
    programs: Mapping[str, BlockProgram]
    cluster: Cluster
    device: torch.device
    micro_batch_sizes: Sequence[int]
    while_faster: bool = False
    precision: Precision = "fp32"
    optimizer: str = "adamw"
    budget_s: float = 60.0
    training_samples: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    halves: Callable[[], Halves] | None = None
    compile: Callable[[nn.Module], None] | None = None
    around: Surroundings | None = None
    lone_steps: LoneSteps | None = None
    model_bytes: int = 0

    def __post_init__(self) -> None:
        missing = [kind for kind in self.graph.kinds if kind not in self.programs]
        if missing or not self.micro_batch_sizes or min(self.micro_batch_sizes) < 1:
            what = (
                f"blocks without a program: {', '.join(missing)}" if missing else "micro-batch sizes must be at least 1"
            )
            raise MeasureError(what)

    def needs(self, kind: str, size: int) -> float:
        """About the bytes that measuring a block takes."""
        return bytes_to_run(self.graph, None if kind == WHOLE else self.graph.kinds[kind], size)


def measure(
    request: Request,
    peers: Peers,
    *,
    cache: Cache | None = None,
    refresh: bool = False,
    say: Callable[[str], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    clock: Stopwatch | None = None,
    now: Callable[[], float] = time.monotonic,
    cores: Callable[[], Cores] = Cores.now,
) -> Profile:
    """The profile of a model on a cluster, the same on every rank.

    Collective: every rank calls it with the same request. A profile that rank 0 has in its cache is confirmed by timing one
    block on every device and one collective again; if they differ, everything is measured again, and that is said.

    Args:
        cache: None: nothing is kept, nothing is read.
        refresh: measure even if there is a profile.
        say: informed, on every rank alike, what was found or left out.
        progress: (what is measured now, the how manyth of, how many), of this rank.
        clock: of the device; None: the right one for it.
        now: wall time, for the budget.
        cores: what has been done on this host so far, by us and by others.

    Raises MeasureError, on every rank alike, for a device that cannot be measured.
    """
    if len(request.cluster.devices) != peers.world_size:
        raise MeasureError(
            f"the cluster has {len(request.cluster.devices)} devices and there are {peers.world_size} workers; "
            "start one worker a device"
        )
    session = _Session(request, peers, say, progress, clock, now, cores)
    try:
        return session.profile(cache, refresh=refresh)
    finally:
        session.close()


def bytes_to_run(graph: ModelGraph, block: Block | None, size: int) -> float:
    """About what a block, or the whole model, takes by itself: weights, gradients, and what is kept for backward, with some air."""
    weights = graph.parameters if block is None else graph.parameters_of(block)
    return 2 * sum(p.bytes for p in weights) + 1.25 * graph.bytes_saved(block)(size)


class _Session:
    def __init__(
        self,
        request: Request,
        peers: Peers,
        say: Callable[[str], None] | None,
        progress: Callable[[str, int, int], None] | None,
        clock: Stopwatch | None,
        now: Callable[[], float],
        cores: Callable[[], Cores],
    ) -> None:
        self._request = request
        self._peers = peers
        self._say = say or (lambda _: None)
        self._notes: list[str] = []
        self._budget_s = request.budget_s
        self._cores = cores
        self._ids = [d.id for d in request.cluster.devices]
        self._process_group: ProcessGroup | None = (
            peers.process_group(range(peers.world_size)) if peers.world_size > 1 else None
        )
        self._bench = Workbench(
            device=request.device,
            precision=request.precision,
            sampling=request.sampling,
            clock=clock,
            now=now,
            gather=peers.all_gather_object,
            devices=self._ids,
            names=request.graph.kind_names,
            say=self._notes.append,
            progress=progress or (lambda _what, _done, _total: None),
            halves=request.halves,
            compile=request.compile,
            around=request.around,
        )

    def close(self) -> None:
        """Give back what the links were measured with."""
        if self._process_group is not None:
            self._process_group.close()

    def profile(self, cache: Cache | None, *, refresh: bool) -> Profile:
        begun = self._cores()
        mine = (torch.__version__, torch.get_num_threads(), self._request.precision)
        versions, threads, precisions = zip(*self._peers.all_gather_object(mine), strict=True)
        request = self._request
        key = profile_key(
            model=request.graph.fingerprint,
            cluster=request.cluster,
            precision=" ".join(precisions),
            micro_batch_sizes=request.micro_batch_sizes,
            while_faster=request.while_faster,
            compiled=request.compile is not None,
            optimizer=request.optimizer,
            torch_versions=versions,
            threads=threads,
        )
        kept = None if cache is None or refresh else self._kept(cache, key)
        if kept is not None:
            self._others_since(begun)
            return kept
        profile = self._measured(key)
        taken = self._others_since(begun)
        devices = {name: replace(own, taken_by_others=taken[name]) for name, own in profile.devices.items()}
        profile = replace(profile, devices=devices, budget_s=self._budget_s)
        if cache is not None and self._peers.rank == 0:
            try:
                cache.save(profile)
            except MeasureError as error:
                self._notes.append(str(error))
        self._tell_notes()
        return profile

    def _others_since(self, begun: Cores) -> dict[str, float]:
        """The part of its host's cores that others took meanwhile, by device; where that is much, it is said."""
        nodes = [device.node for device in self._request.cluster.devices]
        taken = taken_by_others(nodes, self._peers.all_gather_object(self._cores().since(begun)))
        for sentence in busy(taken):
            self._say(sentence)
        return {device: taken[node] for device, node in zip(self._ids, nodes, strict=True)}

    def _kept(self, cache: Cache, key: str) -> Profile | None:
        """The profile in the cache of rank 0, if it is whole and still holds."""
        found: Profile | str | None = None
        if self._peers.rank == 0:
            try:
                found = cache.load(key)
            except MeasureError as error:
                found = str(error)
        found = self._peers.broadcast_object(found, 0)
        if isinstance(found, str):
            self._say(found)
            return None
        if found is None:
            return None
        if set(found.devices) != set(self._ids) or any(
            kind not in device.blocks for device in found.devices.values() for kind in self._request.graph.kinds
        ):
            self._say(f"the kept profile {key} is not complete; measuring again")
            return None
        counts = Counter(block.kind for block in self._request.graph.blocks)
        worth_s = min(self._request.budget_s, self._worth_of(own.sample_s(counts) for own in found.devices.values()))
        if 0 < found.budget_s < worth_s / _MUCH_LONGER:
            self._say(
                f"the kept profile was measured in {found.budget_s:.0f} s, and {worth_s:.0f} s are allowed now: measuring again"
            )
            return None
        try:
            changed = changes(found, self._request.programs, self._ids, self._peers, self._process_group, self._bench)
        except MeasureError as error:
            changed = [str(error)]
        if changed:
            self._say("the kept profile no longer holds, measuring again: " + "; ".join(changed))
            return None
        return found

    def _measured(self, key: str) -> Profile:
        blocks = self._blocks()
        trainable = [p.shape for p in self._request.graph.parameters if p.trainable]
        own = self._request.cluster.devices[self._peers.rank]
        measured = partial(
            measure_optimizer,
            trainable,
            self._request.optimizer,
            self._bench,
            budget_s=self._budget("optimizer"),
            most_bytes=min(_OPTIMIZER_BYTES, own.memory_bytes // 32),
        )
        optimizer = measured()
        # Where all memory is the host's, nothing is gained by keeping state there.
        apart = any(device.backend != "cpu" for device in self._request.cluster.devices)
        overhead = self._overhead(optimizer)
        on_host = measured(on_host=True) if apart else 0.0
        copies = measure_host_copies(self._bench, budget_s=self._budget("optimizer")) if apart else 0.0
        links, overlap = self._links()
        self.close()
        give_back_memory()
        # The weights that the model has are not what a plan finds there: it lets go of them, or counts them as its own.
        context = max(0, self._occupied_bytes() - self._request.model_bytes)
        mine = DeviceProfile(
            blocks=blocks,
            optimizer_s_per_byte=optimizer,
            host_update_s_per_byte=on_host,
            host_copy_s_per_byte=copies,
            step_overhead_s=overhead,
            overlap=overlap,
            context_bytes=context,
            precision=self._request.precision,
        )
        devices = dict(zip(self._ids, self._peers.all_gather_object(mine), strict=True))
        return Profile(key=key, devices=devices, links=links, kinds=self._request.graph.kind_names)

    def _occupied_bytes(self) -> int:
        """Return how much the process has taken of the memory that this rank's device computes in: nothing that is seen, of an
        accelerator's.
        """
        return host_context_bytes() if self._request.device.type == "cpu" else 0

    def _left_bytes(self, own: Device) -> int:
        """Return a device's memory beside what the process occupies; all of it where that is more: no limit is in force then, and what the
        device lacks is said of plans.
        """
        left = own.memory_bytes - self._occupied_bytes()
        return left if left > 0 else own.memory_bytes

    def _blocks(self) -> dict[str, tuple[BlockSample, ...]]:
        own = self._request.cluster.devices[self._peers.rank]
        return measure_blocks(
            self._request.programs,
            self._request.micro_batch_sizes,
            self._bench,
            while_faster=self._request.while_faster,
            budget_s=self._budget("blocks"),
            memory_bytes=self._left_bytes(own),
            needs=self._request.needs,
            counts=Counter(block.kind for block in self._request.graph.blocks),
            worth_s=self._worth_s,
        )

    def _worth_s(self, sample_s: float) -> float:
        """Lowers the budget to what the training is worth, once each rank knows the seconds of a sample; that of the blocks. Collective."""
        if self._request.training_samples is not None:
            self._budget_s = min(self._budget_s, self._worth_of(self._peers.all_gather_object(sample_s)))
        return self._budget("blocks")

    def _worth_of(self, samples_s: Iterable[float]) -> float:
        """Return the seconds that measuring is worth where the devices take so long for a sample in all blocks."""
        rate = sum(1 / seconds for seconds in samples_s if seconds > 0)
        samples = self._request.training_samples
        return math.inf if samples is None or rate == 0 else max(_LEAST_S, _PART * samples / rate)

    def _overhead(self, optimizer_s_per_byte: float) -> float:
        """Measure the overhead of no device, if some rank has no weights to train with: alike devices would differ by where the weights
        are.
        """
        request, own = self._request, self._request.cluster.devices[self._peers.rank]
        if not all(self._peers.all_gather_object(request.lone_steps is not None)):
            return 0.0
        size = min(request.micro_batch_sizes)
        weights = sum(p.bytes for p in request.graph.parameters)
        trained = sum(p.bytes for p in request.graph.parameters if p.trainable)
        whole = request.programs.get(WHOLE)
        # Two copies, of which one is trained: its optimizer keeps two values a weight at most.
        needed = 0.0 if whole is None else 2 * request.needs(WHOLE, size) + 2 * weights
        fits = whole is not None and needed <= self._left_bytes(own)
        assert request.lone_steps is not None  # as on every rank
        return measure_step_overhead(
            whole if fits else None,
            request.lone_steps,
            size,
            self._bench,
            update_s=optimizer_s_per_byte * trained,
            budget_s=self._budget("overhead"),
        )

    def _links(self) -> tuple[tuple[LinkSample, ...], float]:
        if self._process_group is None:
            return (), 0.0
        reduces = measure_all_reduce(
            self._peers, self._process_group, self._ids, self._bench, budget_s=self._budget("all-reduce")
        )
        # Of a link it is a few messages, however short the training: what most plans cannot be predicted without.
        transfers_s = self._request.budget_s * _BUDGET["transfers"]
        sends = measure_sends(self._peers, self._ids, self._bench, budget_s=transfers_s)
        exchanges = measure_exchanges(
            self._peers, self._process_group, self._ids, self._bench, budget_s=self._budget("exchanges")
        )
        quick = {s.bytes: s.seconds for s in reduces if s.seconds <= _OVERLAP_S} or {min(MESSAGE_BYTES): 0.0}
        size, lasting_s = max(quick.items())
        overlap = measure_overlap(
            self._peers, self._process_group, self._bench, message_bytes=size, lasting_s=lasting_s
        )
        # A collective is over when the processor of each has done its part: where one needs longer, it lasts longer for all.
        longer = max(1.0, *self._peers.all_gather_object(overlap))
        reduces = tuple(replace(sample, seconds=longer * sample.seconds) for sample in reduces)
        return reduces + sends + exchanges, overlap / longer

    def _budget(self, what: str) -> float:
        return self._budget_s * _BUDGET[what]

    def _tell_notes(self) -> None:
        for note in told_once(self._ids, self._peers.all_gather_object(self._notes)):
            self._say(note)
