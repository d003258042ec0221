"""One worker alone: a plain loop of PyTorch, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from heterodyne.errors import CaptureError, DataError, PlanError, WorkerError
from heterodyne.job import OptimizerSection
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.slices import as_source
from heterodyne.runtime.weights.optimizer import learning_rate
from heterodyne.runtime.worker import Worker
from multiprocess.models import Case, build, captured
from multiprocess.pool import Pool, World
from multiprocess.work import PipelineOf, StageOf, staged_worker, worker_of

ALONE = World(rank=0, world_size=1)
SECTION = OptimizerSection(lr=1e-2, warmup_steps=2)


def plain_loop(case: Case, sizes: tuple[int, ...], steps: int, clip: float) -> list[float]:
    """What a user would write: gradient accumulation, each part weighted by its number of labels."""
    trained = [(name, p) for name, p in case.module.named_parameters() if p.requires_grad]
    norms = {id(p) for part in case.module.modules() if "Norm" in type(part).__name__ for p in part.parameters()}
    plain = {id(p) for name, p in trained if name.endswith("bias") or p.dim() < 2} | norms
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in trained if id(p) not in plain], "weight_decay": SECTION.weight_decay},
            {"params": [p for _, p in trained if id(p) in plain], "weight_decay": 0.0},
        ],
        lr=SECTION.lr, betas=SECTION.betas, eps=SECTION.eps, fused=True,
    )  # fmt: skip
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total, first = 0.0, 0
        for size in sizes:
            part = {name: tensor[first : first + size] for name, tensor in case.batch.items()}
            output = case.module(**part)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            weight = size / sum(sizes)
            (loss * weight).backward()
            total += loss.item() * weight
            first += size
        nn.utils.clip_grad_norm_(case.module.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(SECTION, step, 10)
        optimizer.step()
        losses.append(total)
    return losses


@pytest.mark.parametrize("name", [pytest.param("gpt", marks=pytest.mark.tour("law 1", "runtime/")), "llama", "resnet"])
@pytest.mark.parametrize("sizes", [(5,), (2, 2, 1)], ids=str)
def test_a_world_of_one_is_a_plain_loop_bit_for_bit(name: str, sizes: tuple[int, ...]) -> None:
    case = build(captured(name), 5)
    other = copy.deepcopy(case)
    worker = worker_of(ALONE, case, (sizes,), optimizer=SECTION, clip=0.5)
    losses = [worker.step(case.batch).loss for _ in range(3)]
    assert losses == plain_loop(other, sizes, 3, 0.5)
    for (key, found), expected in zip(
        case.module.state_dict().items(), other.module.state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected), key


def test_recomputation_changes_nothing_under_dropout() -> None:
    losses = []
    for recompute in (False, True):
        case = build(captured("gpt2"), 4)
        if recompute:
            _recompute(case.module)
        worker = worker_of(ALONE, case, ((2, 2),), clip=1.0)
        losses.append([worker.step(case.batch).loss for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)  # gradients are added up in another order


def _recompute(module: nn.Module) -> None:
    """Under its newer name where Transformers has it."""
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    enable()


def test_the_result_says_what_was_done() -> None:
    case = build(captured("llama"), 4)
    case.batch["labels"][:, 4:] = -100
    worker = worker_of(ALONE, case, ((3, 1),), optimizer=SECTION, clip=0.1)
    result = worker.step(case.batch, step=1)
    assert (result.step, result.samples, result.count) == (1, 4, 4 * 3)
    assert result.lr == learning_rate(SECTION, 1, 10)
    assert result.grad_norm is not None
    assert result.grad_norm > 0.1
    assert worker.steps_done == 2


def test_bfloat16_stays_near_single_precision_and_keeps_gradients_in_it() -> None:
    losses = []
    for precision in ("fp32", "bf16"):
        case = build(captured("llama"), 4)
        worker = worker_of(ALONE, case, ((2, 2),), precision=precision)
        losses.append(worker.step(case.batch).loss)
        assert {p.grad.dtype for p in case.module.parameters()} == {torch.float32}
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_an_optimizer_of_the_users_keeps_its_rate() -> None:
    case = build(captured("gpt"), 4)
    worker = worker_of(ALONE, case, ((4,),), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.25))
    before = case.module.out.bias.detach().clone()
    result = worker.step(case.batch)
    assert result.lr == 0.25
    torch.testing.assert_close(case.module.out.bias, before - 0.25 * case.module.out.bias.grad)


def test_evaluation_leaves_the_modes_of_the_parts_as_they_were() -> None:
    case = build(captured("gpt2"), 4)
    case.module.transformer.h[0].eval()
    worker = worker_of(ALONE, case, ((4,),))
    first, second = worker.evaluate(case.batch), worker.evaluate(case.batch)
    assert first == second  # no dropout
    assert case.module.training
    assert not case.module.transformer.h[0].training


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda batch: {k: v[:3] for k, v in batch.items()}, "has 3 samples, the plan was made for 4"),
        (lambda batch: {"input_ids": batch["input_ids"]}, "the model was captured with input_ids, labels"),
        (lambda batch: batch | {"labels": batch["labels"][:2]}, "do not agree on its size"),
    ],
)
def test_a_batch_that_does_not_fit_is_told(change: object, told: str) -> None:
    case = build(captured("gpt"), 4)
    worker = worker_of(ALONE, case, ((4,),))
    with pytest.raises(DataError, match=told):
        worker.step(change(case.batch))


def test_a_sequence_of_tensors_is_a_batch_in_the_order_of_the_inputs() -> None:
    case = build(captured("gpt"), 4)
    source = as_source(list(case.batch.values()), case.graph)
    assert source.size == 4
    assert torch.equal(source.samples(1, 2)["labels"], case.batch["labels"][1:3])


def test_a_model_that_changed_since_its_capture_is_told() -> None:
    case = build(captured("gpt"), 4)
    case.module.scale.requires_grad_()
    with pytest.raises(PlanError, match="the capture lacks scale"):
        worker_of(ALONE, case, ((4,),))
    case.module.scale.requires_grad_(False)
    worker = worker_of(ALONE, case, ((4,),))
    case.module.scale.requires_grad_()
    with pytest.raises(PlanError, match=r"scale: no parameter of that name was there when the trainer was made"):
        worker.step(case.batch)


def test_a_weight_that_has_another_name_or_is_gone_is_told_with_what_to_do() -> None:
    case = build(captured("gpt"), 4)
    worker = worker_of(ALONE, case, ((4,),))
    out = case.module.out
    case.module.out = torch.nn.Sequential(out)
    with pytest.raises(PlanError, match=r"out\.0\.weight \(was out\.weight\), .*: modules were put into others"):
        worker.step(case.batch)
    case.module.out = torch.nn.Identity()
    with pytest.raises(PlanError, match=r"'out\.\w+' is not in the model any more"):
        worker.step(case.batch)


def test_rank_0_must_have_the_weights() -> None:
    with torch.device("meta"):
        case = build(captured("gpt"), 4)
    with pytest.raises(WorkerError, match="without weights"):
        worker_of(ALONE, case, ((4,),))


@pytest.mark.tour("law 6")
def test_closing_leaves_the_model_as_plain_as_it_was() -> None:
    case = build(captured("gpt"), 4)
    worker: Worker = worker_of(ALONE, case, ((4,),))
    worker.step(case.batch)
    worker.close()
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in case.module.parameters())


def refusing(*_: object) -> object:
    raise PlanError("no cut here")


def refused(world: World) -> tuple[str, bool, float]:
    """What a rank is told of a plan whose second stage cannot be made, whether its model is as it was, and its next loss."""
    case = build(captured("gpt"), 4)
    cut = len(case.graph.ops) // 2
    stages = (StageOf(cut, (0,), (1,)), StageOf(len(case.graph.ops), (1,), (1,)))
    with Communicator(rank=world.rank, world_size=2, device=torch.device("cpu")) as communicator:
        programs = refusing if world.rank == 1 else None
        with pytest.raises(PlanError) as told:
            staged_worker(
                world, case, [PipelineOf((2, 2), stages)], "1F1B", communicator=communicator, programs=programs
            )
    plain = not any(p._post_accumulate_grad_hooks or p.is_meta for p in case.module.parameters())
    other = build(captured("gpt"), 4)
    worker = worker_of(world, other, ((2,), (2,)))
    loss = worker.step(other.batch).loss
    worker.close()
    return str(told.value), plain, loss


def test_what_one_rank_refuses_all_do_and_the_model_is_as_it_was(pool: Pool) -> None:
    case = build(captured("gpt"), 4)
    expected = case.module(**case.batch)
    expected = (expected if isinstance(expected, torch.Tensor) else expected.loss).item()
    for told, plain, loss in pool.run(2, refused):
        assert "no cut here" in told
        assert plain
        assert loss == pytest.approx(expected, rel=1e-5)


def test_an_optimizer_that_cannot_be_made_leaves_no_hooks_and_a_second_plan_is_told_of_the_first() -> None:
    case = build(captured("gpt"), 4)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        worker_of(ALONE, case, ((4,),), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=-1.0))
    worker = worker_of(ALONE, case, ((4,),))
    with pytest.raises(CaptureError, match=r"still under another plan.* close\(\) the trainer"):
        worker_of(ALONE, case, ((4,),))
    worker.close()
    worker_of(ALONE, case, ((4,),)).close()
