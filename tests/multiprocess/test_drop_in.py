"""DDP's script with another class: gradients and loss on unequal parts are those of one device with the whole global batch."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import heterodyne as hd
from heterodyne.drop_in import pace as module_of_pace
from heterodyne.runtime.exact.exchange import over_all_losses
from multiprocess.pool import World

WIDTH, CLASSES, WORDS, LENGTH = 6, 5, 11, 7
BARS = {torch.float32: 1e-5, torch.float64: 1e-10}

Batch = Mapping[str, Tensor]


class Residual(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.down.weight = nn.Parameter(self.up.weight.detach().t().contiguous())
            self.again = nn.Linear(WIDTH, 2 * WIDTH)
            self.again.weight = self.up.weight
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        if self.tied:
            x = x + self.down(torch.tanh(self.again(x)))
        return self.head(x)


class Language(nn.Module):
    """It returns its loss; ``shift``: as causal models of Transformers do."""

    def __init__(self, *, shift: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH, sparse=sparse), nn.Linear(WIDTH, WORDS)
        self.shift = shift

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.words(ids)))
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))


class Choosing(nn.Module):
    """One branch for samples with a mark, another for those without, a third for nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.marked, self.plain, self.nobody = (nn.Linear(WIDTH, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        marked = x[:, 0] > 0
        h = torch.tanh(self.body(x))
        out = h.new_zeros(len(x), CLASSES)
        for branch, chosen in ((self.marked, marked), (self.plain, ~marked)):
            if chosen.any():
                out = out.index_put((chosen,), branch(h[chosen]))
        return out


class Normed(nn.Module):
    def __init__(self, *, again: bool = False, sync: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)
        self.second, self.last, self.head = (
            nn.Linear(4, WIDTH),
            nn.BatchNorm1d(WIDTH, affine=False),
            nn.Linear(WIDTH, CLASSES),
        )
        self.again = again
        if sync:
            self.norm = nn.SyncBatchNorm.convert_sync_batchnorm(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(len(x), 2, -1)
        x = torch.tanh(self.norm(self.first(x))).mean(2)
        body: Callable[[Tensor], Tensor] = lambda h: torch.tanh(self.last(self.second(h)))  # noqa: E731
        return self.head(checkpoint(body, x, use_reentrant=False) if self.again else body(x))


def samples(size: int, generator: torch.Generator, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "x": torch.randn(size, WIDTH, generator=generator, dtype=dtype),
        "y": torch.randint(0, CLASSES, (size,), generator=generator),
        "w": torch.rand(size, generator=generator, dtype=dtype),
        "ids": torch.randint(0, WORDS, (size, LENGTH), generator=generator),
        "labels": torch.randint(0, WORDS, (size, LENGTH), generator=generator).masked_fill(
            torch.rand(size, LENGTH, generator=generator) < torch.rand(size, 1, generator=generator), -100
        ),
    }


def classified(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def language(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(batch["ids"], labels=batch["labels"])
    return loss


def summed(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def weighted(model: Any, batch: Batch) -> Tensor:
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["w"]).sum() / batch["w"].sum()


def told(model: Any, batch: Batch) -> Tensor:
    """The count is known behind the forward; on one device there is nothing to tell."""
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    if isinstance(model, hd.DistributedDataParallel):
        model.count(batch["w"].sum())
    return (each * batch["w"]).sum() / batch["w"].sum()


def told_in_a_block(model: Any, batch: Batch) -> Tensor:
    with model.count(batch["w"].sum()) if isinstance(model, hd.DistributedDataParallel) else nullcontext():
        score = model(batch["x"]) + model(2 * batch["x"])
    return (F.cross_entropy(score, batch["y"], reduction="none") * batch["w"]).sum() / batch["w"].sum()


def twice(model: Any, batch: Batch) -> Tensor:
    half = model(batch["x"] * 0.5).square().mean()
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return classified(model, batch) + half + 1e-3 * penalty


def with_penalty(model: Any, batch: Batch) -> Tensor:
    """As critics of WGAN-GP have it: the gradient of the output by the input has norm 1."""
    x = batch["x"].clone().requires_grad_()
    score = model(x).square().sum(1)
    (by_input,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + 10 * (by_input.norm(dim=1) - 1).square().mean()


def gathered(model: Any, rows: Tensor) -> Tensor:
    """The rows of all ranks; on one device they are there."""
    return model.all_gather(rows) if isinstance(model, hd.DistributedDataParallel) else rows


def contrasted(model: Any, batch: Batch) -> Tensor:
    """Own samples against those of all ranks, of which the ones of the same class are near (Khosla et al., 2020)."""
    score = F.normalize(model(batch["x"]), dim=1)
    every, classes = gathered(model, score), gathered(model, batch["y"])
    alike = (batch["y"][:, None] == classes).to(score.dtype)
    scale = next(model.parameters()).mean().exp()  # a weight that is read behind the exchange
    return -((scale * score @ every.t()).log_softmax(1) * alike / alike.sum(1, keepdim=True)).sum(1).mean()


def decorrelated(model: Any, batch: Batch) -> Tensor:
    """The same loss of all samples on every rank (as of Barlow twins), and one of own samples."""
    score = model(batch["x"])
    every = gathered(model, score)
    every = (every - every.mean(0)) / every.std(0)
    return (
        every.t() @ every / len(every) - torch.eye(CLASSES, dtype=score.dtype)
    ).square().sum() + score.square().mean()


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module] = Residual
    loss: Callable[[Any, Batch], Tensor] = classified
    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    synced: bool = False  # every backward, though they are accumulated
    says: Callable[[Batch], Tensor] | None = None  # what counts, before the forward


def frozen() -> nn.Module:
    model = Residual()
    model.up.requires_grad_(False)
    return model


CASES = {
    "samples": Case(),
    "views": Case(options={"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}),
    "static": Case(options={"static_graph": True}),
    "shared": Case(lambda: Residual(tied=True)),
    "frozen": Case(frozen),
    "tokens": Case(Language, language, {"loss_count": "tokens"}),
    "shifted": Case(lambda: Language(shift=True), language, {"loss_count": "shifted tokens"}),
    "sparse": Case(lambda: Language(sparse=True), language, {"loss_count": "tokens"}),
    "sum": Case(loss=summed, options={"loss_count": "sum"}),
    "told": Case(loss=told),
    "told in a block": Case(loss=told_in_a_block),
    "unused": Case(Choosing, options={"find_unused_parameters": True}),
    "unused, views": Case(Choosing, options={"find_unused_parameters": True, "gradient_as_bucket_view": True}),
    "compared": Case(loss=contrasted),
    "compared, batch norm": Case(Normed, contrasted),
    "compared, accumulated": Case(loss=contrasted, micro_batches=3),
    "compared, all on each": Case(loss=decorrelated),
    "compared, sum": Case(
        loss=lambda model, batch: contrasted(model, batch) * len(batch["x"]), options={"loss_count": "sum"}
    ),
    "two forwards": Case(loss=twice),
    "penalty": Case(loss=with_penalty),
    "batch norm": Case(Normed),
    "batch norm again": Case(lambda: Normed(again=True)),
    "batch norm, sync": Case(lambda: Normed(sync=True)),
    "batch norm, told": Case(Normed, told),
    "accumulated": Case(micro_batches=3),
    "accumulated, views": Case(micro_batches=3, options={"gradient_as_bucket_view": True}),
    "accumulated, told": Case(loss=told, micro_batches=3),
    "accumulated, said": Case(loss=weighted, micro_batches=3, says=lambda batch: batch["w"].sum()),
    "accumulated, tokens": Case(Language, language, {"loss_count": "tokens"}, micro_batches=3),
    "accumulated, synced": Case(micro_batches=2, synced=True),
    "accumulated, batch norm": Case(Normed, micro_batches=2),
}


def largest_error(found: nn.Module, wanted: nn.Module) -> float:
    """Of gradients and buffers, relative to the largest entry of each; what is 0 but for rounding is compared with the others."""
    errors = [0.0]
    theirs = dict(wanted.named_parameters())
    least = 0.1 * max(float(p.grad.to_dense().abs().max()) for p in theirs.values() if p.grad is not None)
    for name, parameter in found.named_parameters():
        mine, other = parameter.grad, theirs[name].grad
        assert (mine is None) == (other is None), name
        if mine is not None and other is not None:
            mine, other = mine.to_dense().cpu(), other.to_dense()
            errors.append(float((mine - other).abs().max() / other.abs().max().clamp(min=least)))
    for mine, other in zip(found.buffers(), wanted.buffers(), strict=True):
        errors.append(float((mine.cpu() - other).abs().max()))
    return largest(errors)


def largest(errors: Sequence[float]) -> float:
    """NaN, if there is one."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


@torch.no_grad()
def difference(found: nn.Module, wanted: nn.Module) -> float:
    """Of weights, relative to the largest entry of each."""
    pairs = zip(found.parameters(), wanted.parameters(), strict=True)
    return largest([float((mine - other).abs().max() / other.abs().max()) for mine, other in pairs])


def train(world: World, name: str, seed: int, dtype: torch.dtype, devices: Sequence[str] = ()) -> tuple[float, float]:
    """Three steps with other shares each, against the CPU alone; the largest errors of gradients and buffers, and of the loss."""
    case = CASES[name]
    draw, least = random.Random(seed), 2 if dtype == torch.float64 else 8  # few samples leave BatchNorm few digits
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed + world.rank)  # ranks begin with other weights, which the class makes those of rank 0
    device = devices[world.rank] if devices else "cpu"
    ddp = hd.DistributedDataParallel(case.build().to(device, dtype), **case.options)
    alone = copy.deepcopy(ddp.module).cpu()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.005) for module in (ddp, alone)]
    of_gradients, of_losses = [], []
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number in range(case.micro_batches):
            counts = [draw.randint(least, 3 * least) for _ in range(world.world_size)]
            batch = samples(sum(counts), generator, dtype)
            first = sum(counts[: world.rank])
            mine = {key: value[first : first + counts[world.rank]].to(device) for key, value in batch.items()}
            last = number == case.micro_batches - 1 or case.synced
            if case.says is not None:
                ddp.count(case.says(mine))
            with nullcontext() if last else ddp.no_sync():
                own = case.loss(ddp, mine)
                (own / case.micro_batches).backward()
            whole = case.loss(alone, batch)
            (whole / case.micro_batches).backward()
            together = ddp.mean(own)
            of_losses.append(abs(together - whole.item()) / abs(whole.item()))
        of_gradients.append(largest_error(ddp.module, alone))
        for optimizer in optimizers:
            optimizer.step()
    return largest(of_gradients), largest(of_losses)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_the_gradient_is_that_of_one_device(pool: Any, name: str) -> None:
    for seed, ranks, dtype in ((0, 3, torch.float64), (1, 2, torch.float32)):
        for gradient, loss in pool.run(ranks, train, name, seed, dtype):
            assert gradient <= BARS[dtype]
            assert loss <= BARS[dtype]


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, size: int, dtype: torch.dtype = torch.float64) -> None:
        self.all = samples(size, torch.Generator().manual_seed(5), dtype)

    def __len__(self) -> int:
        return len(self.all["x"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[index] for key, value in self.all.items()} | {"index": torch.tensor(index)}


def through_a_loader(world: World, case: str, shares: list[float] | None) -> list[float]:
    """Three epochs whose last batch has fewer samples than there are ranks, with shares that change; the errors of each step."""
    build, loss, options = {
        "batch norm": (Normed, classified, {}),
        "tokens": (lambda: Language(shift=True), language, {"loss_count": "shifted tokens"}),
        "sum": (Residual, summed, {"loss_count": "sum"}),
        "compared": (Residual, contrasted, {}),
    }[case]
    torch.manual_seed(0)
    data = Samples(26)
    sampler = torch.utils.data.DistributedSampler(data, seed=4)
    # Ranks that read ahead by unlike numbers of batches are no worse.
    ahead: dict[str, Any] = (
        {"num_workers": 1, "multiprocessing_context": "fork"} if world.rank == 0 and case == "sum" else {}
    )
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler, **ahead)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # those of the pool may start none
    ddp = hd.DistributedDataParallel(build().double(), **options)
    loader = hd.prepare_loader(loader, ddp, shares=shares)
    alone = copy.deepcopy(ddp.module)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in (ddp, alone)]
    if world.rank == 0:
        next(iter(loader))  # to look at it
    ddp._pace.__class__ = Paced  # type: ignore[assignment]
    Paced.rank = world.rank
    errors, counts = [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        order = list(torch.utils.data.DistributedSampler(data, 1, 0, seed=4 + epoch))
        for number, batch in enumerate(loader):
            for optimizer in optimizers:
                optimizer.zero_grad()
            whole = {key: value[order[12 * number : 12 * number + 12]] for key, value in data.all.items()}
            counts.append(ddp._dealt.own)  # type: ignore[union-attr]
            own = loss(ddp, batch)
            own.backward()
            wanted = loss(alone, whole)
            wanted.backward()
            errors += [largest_error(ddp.module, alone), abs(ddp.mean(own) - wanted.item()) / abs(wanted.item())]
            for optimizer in optimizers:
                optimizer.step()
        assert number == 2
    assert ddp._dealt is None
    if shares is None:
        assert counts[0] == 4
        assert counts[-2] == (6, 4, 2)[world.rank]
    else:
        assert counts == [*([(7, 3, 2)[world.rank]] * 2), int(world.rank < 2)] * 3
    return errors


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Yields what a rank, or a worker process, is to see of some samples, in another order each epoch."""

    def __init__(self, size: int, rank: int = 0, ranks: int = 1) -> None:
        self.samples, self.epoch, self.rank, self.ranks = Samples(size), 0, rank, ranks

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for index in order[self.rank :: self.ranks][first::stride]:
            yield self.samples[index]


def through_a_stream(world: World, workers: int, shares: list[float] | None) -> list[float]:
    """Three epochs of 103 samples, and what is left of a fourth after a look at it; the errors of each step."""
    torch.manual_seed(0)
    stream = Stream(103)
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # those of the pool may start none
    ddp = hd.DistributedDataParallel(Residual().double())
    plain: Any = torch.utils.data.DataLoader(stream, batch_size=12, **options)  # of one process
    loader = hd.prepare_loader(torch.utils.data.DataLoader(stream, batch_size=4, **options), ddp, shares=shares)
    alone = copy.deepcopy(ddp.module)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in (ddp, alone)]
    if world.rank == 0:
        next(iter(loader))  # to look at it
    ddp._pace.__class__ = Paced  # type: ignore[assignment]
    Paced.rank = world.rank
    errors, counts = [], []
    for epoch in range(3):
        stream.set_epoch(epoch)
        gc.collect()  # the plain loader's workers must not find process groups of other tests
        for batch, whole in zip(loader, plain, strict=True):
            for optimizer in optimizers:
                optimizer.zero_grad()
            counts.append(ddp._dealt.own)  # type: ignore[union-attr]
            own = classified(ddp, batch)
            own.backward()
            wanted = classified(alone, whole)
            wanted.backward()
            errors += [largest_error(ddp.module, alone), abs(ddp.mean(own) - wanted.item()) / abs(wanted.item())]
            for optimizer in optimizers:
                optimizer.step()
    if shares is None:
        assert counts[0] == 4
        assert counts[-3] == (6, 4, 2)[world.rank]
    else:
        assert counts[0] == (7, 3, 2)[world.rank]
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()  # type: ignore[attr-defined]
    assert state["samples"] == 24
    loader.load_state_dict(state)  # type: ignore[attr-defined]
    assert torch.equal(next(iter(loader))["x"], next(batches)["x"])
    lasting = (
        options | {"persistent_workers": True} if workers else {}
    )  # which see the stream as it was when they began
    again = hd.prepare_loader(torch.utils.data.DataLoader(Stream(103), batch_size=4, **lasting), ddp, shares=[7, 3, 2])
    again.load_state_dict(state | {"shares": [1, 1, 1]})  # type: ignore[attr-defined]
    whole_pass = len(list(plain))
    assert [len(list(again)) for _ in range(2)] == [whole_pass - 2, whole_pass]
    return errors


class OneShard(Stream):
    """All samples come from worker process 0, as of a stream with one shard."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        order = torch.randperm(len(self.samples), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for index in order if worker is None or worker.id == 0 else ():
            time.sleep(0.002 if self.rank == 0 else 0)  # so that the others' workers are as far ahead as they may be
            yield self.samples[index]


def through_one_shard(world: World) -> list[int]:
    """Which samples this rank has got in a pass whose shares change while the places of workers without data are in use."""
    options: dict[str, Any] = {"num_workers": 5, "multiprocessing_context": "fork"}
    warnings.simplefilter("ignore")  # of more workers than cores
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # those of the pool may start none
    ddp = hd.DistributedDataParallel(Residual().double())
    loader = hd.prepare_loader(torch.utils.data.DataLoader(OneShard(300, world.rank), batch_size=4, **options), ddp)
    ddp._pace.__class__ = Paced  # type: ignore[assignment]
    Paced.rank = world.rank
    seen: list[int] = []
    for batch in loader:
        seen += batch["index"].tolist()[: ddp._dealt.own]  # type: ignore[union-attr]
        classified(ddp, batch).backward()
    return seen


def test_shares_change_where_one_worker_has_all_samples(pool: Any) -> None:
    of_ranks = pool.run(3, through_one_shard)
    assert sorted(index for seen in of_ranks for index in seen) == list(range(300))
    assert len(of_ranks[0]) != len(of_ranks[2])


def refusal(ddp: Any, loader: Any) -> str:
    """Return what a pass over a loader is refused with."""
    try:
        for batch in loader:
            classified(ddp, batch).backward()
    except hd.HeterodyneError as error:
        return str(error)
    return ""


def through_a_stream_of_global_draws(world: World) -> str:
    """The order of the stream is drawn from the generator that dropout draws from too, so ranks get other ones soon."""
    torch.manual_seed(0)
    ddp = hd.DistributedDataParallel(nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, CLASSES)).double())

    class Drawn(Stream):
        def __iter__(self) -> Iterator[dict[str, Tensor]]:
            for _ in range(len(self.samples)):
                yield self.samples[int(torch.randint(len(self.samples), ()))]

    return refusal(
        ddp, hd.prepare_loader(torch.utils.data.DataLoader(Drawn(200), batch_size=4), ddp, shares=[3.0, 1.0])
    )


def test_streams_that_part_are_refused(pool: Any) -> None:
    for told in pool.run(2, through_a_stream_of_global_draws):
        assert "generator of its own" in told


@pytest.mark.parametrize(("workers", "shares"), [(0, None), (2, None), (0, [7.0, 3.0, 2.0])])
@pytest.mark.filterwarnings("ignore")
def test_streams_are_dealt_as_one_process_reads_them(pool: Any, workers: int, shares: list[float] | None) -> None:
    for errors in pool.run(3, through_a_stream, workers, shares):
        assert largest(errors) <= BARS[torch.float64]


def gather_unlike_rows(world: World) -> list[str]:
    ddp = hd.DistributedDataParallel(Residual())
    told = []
    for rows in (torch.zeros(2, 3 + world.rank), torch.tensor(1.0)):
        with pytest.raises(hd.HeterodyneError) as caught:
            ddp.all_gather(rows)
        told.append(str(caught.value))
    return told


def test_rows_of_unlike_shapes_are_refused_on_all_ranks(pool: Any) -> None:
    for unlike, number in pool.run(2, gather_unlike_rows):
        assert "pad the others" in unlike
        assert "all_gather(value[None])" in number


def through_unlike_streams(world: World) -> str:
    ddp = hd.DistributedDataParallel(Residual().double())
    stream = Stream(103, world.rank, world.world_size)
    return refusal(ddp, hd.prepare_loader(torch.utils.data.DataLoader(stream, batch_size=4), ddp))


def test_streams_that_are_split_already_are_refused(pool: Any) -> None:
    for told in pool.run(2, through_unlike_streams):
        assert "rank 1 reads other samples" in told


class Paced(module_of_pace.Pace):
    """As fast as it is said to be."""

    rank = 0

    @property
    def is_due(self) -> bool:
        return len(self._steps) == 2

    def take(self) -> tuple[float, float]:
        super().take()
        return (1.0, 1.5, 3.0)[self.rank], 1.0


@pytest.mark.parametrize("case", ["batch norm", "tokens", "sum", "compared"])
@pytest.mark.parametrize("shares", [None, [7.0, 3.0, 2.0]])
@pytest.mark.filterwarnings("ignore")
def test_batches_of_a_loader_are_exact_to_the_last(pool: Any, case: str, shares: list[float] | None) -> None:
    for errors in pool.run(3, through_a_loader, case, shares):
        assert largest(errors) <= BARS[torch.float64]


def accumulate_nothing(world: World, options: Mapping[str, Any]) -> float:
    """Micro-batches in which one rank has nothing that counts, whose loss there is 0 / 0; the error of the gradient."""
    torch.manual_seed(0)
    ddp = hd.DistributedDataParallel(Residual().double(), **options)
    alone = copy.deepcopy(ddp.module)
    draw = torch.Generator().manual_seed(1)
    errors = []
    for empty in ([], [0], [1, 2], [3], [0, 3], [2, 3], [0, 1, 2], [0, 2, 3]):  # micro-batches in which rank 0 has none
        ddp.zero_grad()
        alone.zero_grad()
        for number in range(4):
            batch = samples(7, draw, torch.float64)
            if number in empty:
                batch["w"][:3] = 0
            mine = {key: value[:3] if world.rank == 0 else value[3:] for key, value in batch.items()}
            ddp.count(mine["w"].sum())
            with nullcontext() if number == 3 else ddp.no_sync():
                weighted(ddp, mine).backward()
            weighted(alone, batch).backward()
        errors.append(largest_error(ddp.module, alone))
    return largest(errors)


def test_a_micro_batch_in_which_nothing_counts_adds_nothing(pool: Any) -> None:
    for options in ({}, {"gradient_as_bucket_view": True}):
        assert largest(pool.run(2, accumulate_nothing, options)) <= BARS[torch.float64]


def adversaries(world: World) -> float:
    """A generator and a critic with penalty, each with its optimizer, in turns, with gradients that are scaled and clipped."""
    torch.manual_seed(0)
    data = Samples(40, torch.float32)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
    models = [hd.DistributedDataParallel(module) for module in (nn.Linear(WIDTH, WIDTH), Residual())]
    loader = hd.prepare_loader(loader, *models, shares=[1.0, 3.0])
    alone = [copy.deepcopy(model.module) for model in models]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (*models, *alone)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in optimizers]

    def step(number: int, loss: Tensor) -> None:
        optimizer, scaler = optimizers[number], scalers[number]
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)
        scaler.step(optimizer)
        scaler.update()

    def turn(maker: Any, critic: Any, x: Tensor, z: Tensor, first: int) -> None:
        fake = maker(z)
        step(first + 1, with_penalty(critic, {"x": x}) + (critic(x) - critic(fake.detach())).square().mean())
        step(first, -critic(maker(z)).square().mean())

    for batch in loader:
        rows: list[Any] = [None, None]
        torch.distributed.all_gather_object(rows, batch["index"])
        whole = data.all["x"][torch.cat(rows)]
        turn(models[0], models[1], batch["x"], batch["x"].flip(1), 0)
        turn(alone[0], alone[1], whole, whole.flip(1), 2)
    return largest([difference(model.module, single) for model, single in zip(models, alone, strict=True)])


def test_two_models_in_turns_with_penalty_scaled_and_clipped(pool: Any) -> None:
    assert largest(pool.run(2, adversaries)) <= 1e-4  # of weights, behind four steps of Adam


def large(world: World, sharded_state: bool) -> float:
    """Buckets that are reduced in shared memory, from the third step on; with PyTorch's sharded optimizer, which needs no other."""
    torch.manual_seed(0)
    ddp = hd.DistributedDataParallel(nn.Sequential(nn.Linear(400, 700), nn.Tanh(), nn.Linear(700, 3)), bucket_cap_mb=1)
    alone = copy.deepcopy(ddp.module)
    mine: Any = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    if sharded_state:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the module has functions that are deprecated
            from torch.distributed.optim import ZeroRedundancyOptimizer
        mine = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    optimizers = [mine, torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)]
    for _ in range(5):
        x = torch.randn(12, 400, generator=torch.Generator().manual_seed(1))
        part = x[:3] if world.rank == 0 else x[3:]
        for module, inputs, optimizer in ((ddp, part, optimizers[0]), (alone, x, optimizers[1])):
            optimizer.zero_grad()
            module(inputs).square().mean().backward()
            optimizer.step()
    assert ddp._reduction._shared, "it was to try shared memory"
    return difference(ddp.module, alone)


@pytest.mark.parametrize("sharded_state", [False, True])
def test_large_buckets_are_added_up_in_shared_memory(pool: Any, sharded_state: bool) -> None:
    assert largest(pool.run(2, large, sharded_state)) <= BARS[torch.float32]


def refusals(world: World) -> dict[str, str]:
    found = {}

    def refused(what: str, do: Callable[[], object]) -> None:
        with pytest.raises(hd.HeterodyneError) as caught:
            do()
        found[what] = str(caught.value)

    wide = WIDTH + world.rank
    refused("models", lambda: hd.DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 2), nn.Linear(2, wide))))
    group = torch.distributed.new_group([0])
    refused(
        "group",
        lambda: hd.DistributedDataParallel(Residual(), process_group=group if world.rank == 0 else None, device_mesh=1),
    )
    ddp = hd.DistributedDataParallel(Language())
    batch = samples(4, torch.Generator().manual_seed(0), torch.float32)
    refused("count", lambda: ddp(batch["ids"], labels=batch["labels"]))
    refused("hook", lambda: ddp.register_comm_hook(None, None))
    refused("join", ddp.join)
    loader = torch.utils.data.DataLoader(Samples(8 + world.rank), batch_size=2)
    refused("loaders", lambda: hd.prepare_loader(loader, ddp))
    ddp = hd.DistributedDataParallel(Language(), loss_count="tokens")
    refused("nothing", lambda: ddp(batch["ids"], labels=torch.full_like(batch["labels"], -100)).backward())
    refused("labels", lambda: hd.DistributedDataParallel(Residual(), loss_count="tokens")(batch["x"]))
    return found


def lose_what_others_compare(world: World) -> str:
    """The loss of rank 1 counts nothing, though that of rank 0 depends on its samples."""
    ddp = hd.DistributedDataParallel(nn.Linear(1, 1))
    group = ddp.communicator.process_group(range(2))
    assert group is not None
    try:
        over_all_losses(group, torch.ones(2), 1.0 - world.rank, takes_part=True)
    except hd.HeterodyneError as error:
        return str(error)
    return ""


def test_gradients_of_other_ranks_are_not_lost(pool: Any) -> None:
    first, second = pool.run(2, lose_what_others_compare)
    assert not first
    assert "counts nothing" in second


def unfreeze(world: World) -> str:
    ddp = hd.DistributedDataParallel(frozen())
    batch = samples(3, torch.Generator().manual_seed(world.rank), torch.float32)
    classified(ddp, batch).backward()
    ddp.module.up.requires_grad_(True)
    with pytest.raises(hd.HeterodyneError) as caught:
        classified(ddp, batch)
    return str(caught.value)


def test_a_parameter_that_is_unfrozen_later_is_refused(pool: Any) -> None:
    for told in pool.run(2, unfreeze):
        assert "'up.weight' was frozen when the model was wrapped" in told


def read_ahead(world: World) -> float:
    """A loop that reads a batch before it trains on the one before, with BatchNorm and rows of all ranks; the error of the weights."""
    torch.manual_seed(0)
    data = Samples(26)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, shuffle=False)
    ddp = hd.DistributedDataParallel(Normed().double())
    loader = hd.prepare_loader(loader, ddp, shares=[7.0, 3.0, 2.0])
    alone = copy.deepcopy(ddp.module)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in (ddp, alone)]
    batches = iter(loader)
    now, number = next(batches), 0
    while now is not None:
        coming = next(batches, None)
        whole = {key: value[12 * number : 12 * number + 12] for key, value in data.all.items()}
        for optimizer, module, batch in zip(optimizers, (ddp, alone), (now, whole), strict=True):
            optimizer.zero_grad()
            contrasted(module, batch).backward()
            optimizer.step()
        now, number = coming, number + 1
    return difference(ddp.module, alone)


def test_a_loop_may_read_ahead(pool: Any) -> None:
    assert largest(pool.run(3, read_ahead)) <= 1e-8


def test_what_is_wrong_is_named(pool: Any) -> None:
    for found in pool.run(2, refusals):
        assert (
            "rank 1 has trained parameter '1.weight' [7, 2] float32 where rank 0 has trained parameter '1.weight' [6, 2]"
            in found["models"]
        )
        assert "device_mesh: " in found["group"]
        assert "loss_count='tokens'" in found["count"]
        assert "leave it out" in found["hook"]
        assert "prepare_loader" in found["join"]
        assert "rank 1: 9 samples, 4 a step" in found["loaders"]
        assert "on no rank" in found["nothing"]
        assert "'labels'" in found["labels"]


def in_evaluation(world: World) -> tuple[list[float], list[str], int]:
    """Errors of the means of a validation, behind a training whose last batch is small; what is said of loaders of a rank's part; and the
    batches of an epoch of 13 samples of which PyTorch leaves out the rest."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(13, WIDTH), torch.randint(0, CLASSES, (13,)))
    ddp = hd.DistributedDataParallel(nn.Linear(WIDTH, CLASSES))
    alone = copy.deepcopy(ddp.module)
    loader: Any = hd.prepare_loader(torch.utils.data.DataLoader(data, 6), ddp, shares=[3, 1])
    for x, y in loader:
        F.cross_entropy(ddp(x), y).backward()
    errors = []
    with torch.no_grad():
        for (x, y), first in zip(loader, (0, 12), strict=True):
            inputs, targets = (tensor[first : first + 12] for tensor in data.tensors)
            wanted = F.cross_entropy(alone(inputs), targets)
            errors.append(abs(ddp.mean(F.cross_entropy(ddp(x), y)) - wanted.item()))
        own = slice(0, 10) if world.rank == 0 else slice(10, 13)  # of no loader
        mean = ddp.mean(F.cross_entropy(ddp(data.tensors[0][own]), data.tensors[1][own]))
        errors.append(abs(mean - F.cross_entropy(alone(data.tensors[0]), data.tensors[1]).item()))
    part = list(range(world.rank, 12, 2))
    said = []
    for made in (
        torch.utils.data.DataLoader(data, 2, sampler=torch.utils.data.SubsetRandomSampler(part)),
        torch.utils.data.DataLoader(torch.utils.data.Subset(data, part), 2),
    ):
        with pytest.raises(hd.HeterodyneError) as caught:
            hd.prepare_loader(made, ddp)
        said.append(str(caught.value))
    equal = torch.utils.data.DistributedSampler(data, 2, world.rank, drop_last=True)
    return errors, said, len(hd.prepare_loader(torch.utils.data.DataLoader(data, 3, sampler=equal), ddp))


def test_means_of_a_validation_are_those_of_its_own_batches(pool: Any) -> None:
    for errors, said, batches in pool.run(2, in_evaluation):
        assert max(errors) <= 1e-6
        assert "has no sample of that of rank 0" in said[0]
        assert "unlike subsets" in said[1]
        assert batches == 2


def copies(world: World) -> list[str]:
    """A copy and an average of a model with BatchNorm; what is saved has PyTorch's names."""
    torch.manual_seed(0)
    plain = torch.nn.parallel.DistributedDataParallel(Normed())
    ddp = hd.DistributedDataParallel(Normed())
    assert ddp.state_dict().keys() == plain.state_dict().keys()
    ddp.load_state_dict(plain.state_dict())
    x, y = torch.randn(8, WIDTH), torch.randint(0, CLASSES, (8,))
    if world.rank == 0:  # alone: copies wait for nobody
        average = torch.optim.swa_utils.AveragedModel(ddp)
        average.update_parameters(ddp)
        copy.deepcopy(ddp.module)(x)
    again = copy.deepcopy(ddp)
    for model in (ddp, again):
        F.cross_entropy(model(x[: 3 + world.rank]), y[: 3 + world.rank]).backward()
    return [
        name
        for (name, a), b in zip(ddp.named_parameters(), again.parameters(), strict=True)
        if a.grad is None or b.grad is None or not torch.equal(a.grad, b.grad)
    ]


def test_copies_are_whole_and_train_by_themselves(pool: Any) -> None:
    assert pool.run(2, copies) == [[], []]


def leaves_out(world: World) -> str:
    """Rank 1 takes a batch for a bad one."""
    torch.manual_seed(0)
    ddp = hd.DistributedDataParallel(Residual().double())
    loader = hd.prepare_loader(torch.utils.data.DataLoader(Samples(64), batch_size=4), ddp)

    def epoch() -> None:
        for number, batch in enumerate(loader):
            loss = classified(ddp, batch)
            if number != 1 or world.rank != 1:
                loss.backward()

    with pytest.raises(hd.HeterodyneError) as caught:
        epoch()
    return str(caught.value)


def test_a_rank_that_leaves_a_backward_out_is_named(pool: Any) -> None:
    for said in pool.run(2, leaves_out):
        assert said.startswith("rank 1 had a batch without a backward")


def second_alone(world: World) -> list[int]:
    """The samples of each step of this rank, where the first model of the loader is a teacher, which is never trained."""
    teacher, model = (hd.DistributedDataParallel(Residual().double()) for _ in range(2))
    loader = hd.prepare_loader(torch.utils.data.DataLoader(Samples(96), batch_size=4), teacher, model)
    model._pace.__class__ = Paced  # type: ignore[assignment]
    Paced.rank = world.rank
    counts = []
    for batch in loader:
        counts.append(len(batch["x"]))
        with torch.no_grad():
            teacher(batch["x"])
        classified(model, batch).backward()
    return counts


def test_shares_follow_the_model_that_is_trained(pool: Any) -> None:
    for rank, counts in enumerate(pool.run(3, second_alone)):
        assert counts[0] == 4
        assert counts[-1] == (6, 4, 2)[rank]
