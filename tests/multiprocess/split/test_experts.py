"""Experts on several processes give what they give on one: outputs and all gradients, wherever experts and tokens lie."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from heterodyne.experts import swiglu_experts
from heterodyne.frontend import trace
from heterodyne.runtime.comm import communicator as communicators
from heterodyne.runtime.comm.communicator import Communicator
from heterodyne.runtime.comm.shared_memory import neighbourhood
from heterodyne.runtime.split import experts as functions
from heterodyne.runtime.split.group import Group
from heterodyne.runtime.stages.stage_builder import Channels, _group
from multiprocess.pool import Pool, World
from multiprocess.split import moe_model

WIDTH, INNER = 6, 5
HOSTS = ((), (), (0, 1), (0, 0, 1), (0, 1, 0), (0, 1, 2), (0, 0, 0, 1), (0, 1, 1, 0), (0, 1, 2, 1))

quick = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A case: experts and tokens of each member, k choices, seed and dtype; the host of each, where tokens go once to each host."""

    experts: tuple[int, ...]
    tokens: tuple[int, ...]
    k: int = 2
    normalise: bool = True
    seed: int = 0
    dtype: torch.dtype = torch.float64
    hosts: tuple[int, ...] = ()

    def values(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Tokens [N, H], router [E, H], gate_up [E, 2 I, H], down [E, H, I], and what weighs the outputs [N, H]."""
        generator = torch.Generator().manual_seed(self.seed)
        n, e = sum(self.tokens), sum(self.experts)
        shapes = ((n, WIDTH), (e, WIDTH), (e, 2 * INNER, WIDTH), (e, WIDTH, INNER), (n, WIDTH))
        tokens, router, gate_up, down, upstream = (
            torch.randn(s, generator=generator, dtype=torch.float64).to(self.dtype) for s in shapes
        )
        router[0] += tokens.mean(0)  # the first expert is liked best
        return tokens, router, gate_up, down, upstream


def gated(logits: Tensor, k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """The k best experts of each token, and how much they count."""
    weights, indices = logits.softmax(-1).topk(k)
    return indices, weights / weights.sum(-1, keepdim=True) if normalise else weights


# ---- one device, as plainly as possible --------------------------------------------------------------------------------


def on_one_device(case: Mixture) -> dict[str, Tensor]:
    """Token by token, choice by choice."""
    tokens, router, gate_up, down, upstream = case.values()
    leaves = [t.requires_grad_() for t in (tokens, router, gate_up, down)]
    indices, weights = gated(tokens @ router.T, case.k, normalise=case.normalise)
    rows: list[Tensor] = [torch.zeros_like(tokens[0])] * len(tokens)
    for choice in range(case.k):
        for token in range(len(tokens)):
            expert = int(indices[token, choice])
            gate, up = (gate_up[expert] @ tokens[token]).chunk(2)
            rows[token] = rows[token] + weights[token, choice] * (down[expert] @ (F.silu(gate) * up))
    outputs = torch.stack(rows)
    (outputs * upstream).sum().backward()
    gradients = [leaf.grad for leaf in leaves]
    names = ("tokens", "router", "gate_up", "down")
    return {"outputs": outputs.detach()} | {
        name: grad for name, grad in zip(names, gradients, strict=True) if grad is not None
    }


# ---- several -----------------------------------------------------------------------------------------------------------


def cut_over_members(world: World, case: Mixture) -> dict[str, Tensor]:
    """What this member finds: outputs and token gradients of its own tokens, its part of the router's gradient, its experts'."""
    with joined(world, case.hosts) as group:
        tokens, router, gate_up, down, upstream = case.values()
        first, stop = group.bounds(case.tokens)
        held = slice(*group.bounds(case.experts))
        tokens, router, gate_up, down = (
            t.requires_grad_() for t in (tokens[first:stop].clone(), router, gate_up[held].clone(), down[held].clone())
        )
        indices, weights = gated(tokens @ router.T, case.k, normalise=case.normalise)
        run = functools.partial(swiglu_experts, gate_up=gate_up, down=down)
        outputs = functions.experts_between(group, tokens, indices, weights, sizes=case.experts, run=run)
        (outputs * upstream[first:stop]).sum().backward()
        return _found(outputs, tokens, router, gate_up, down)


def whole_on_members(world: World, case: Mixture) -> dict[str, Tensor]:
    """Each has all tokens: outputs and the gradients of tokens and router are parts that add up."""
    with joined(world) as group:
        tokens, router, gate_up, down, upstream = case.values()
        held = slice(*group.bounds(case.experts))
        tokens, router, gate_up, down = (
            t.requires_grad_() for t in (tokens, router, gate_up[held].clone(), down[held].clone())
        )
        indices, weights = gated(tokens @ router.T, case.k, normalise=case.normalise)
        run = functools.partial(swiglu_experts, gate_up=gate_up, down=down)
        outputs = functions.experts_here(group, tokens, indices, weights, sizes=case.experts, run=run)
        (outputs * upstream).sum().backward()
        return _found(outputs, tokens, router, gate_up, down)


def _found(outputs: Tensor, tokens: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    leaves = {"tokens": tokens, "router": router, "gate_up": gate_up, "down": down}
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"outputs": outputs.detach()} | gradients


@contextmanager
def joined(world: World, hosts: tuple[int, ...] = ()) -> Iterator[Group]:
    """The group of all ranks, which are on these hosts."""
    device, home = torch.device("cpu"), hosts[world.rank] if hosts else neighbourhood()
    with (
        mock.patch.object(communicators, "neighbourhood", return_value=home),
        Communicator(rank=world.rank, world_size=world.world_size, device=device, timeout_s=20.0) as communicator,
    ):
        group = _group(tuple(range(world.world_size)), Channels(communicator), hosts)
        assert group is not None
        yield group
        communicator.barrier()  # not all of these jobs send something, and who leaves early may cut off who still connects


def assembled(results: Sequence[dict[str, Tensor]], *, cut: bool) -> dict[str, Tensor]:
    """What the members found, as one device has it."""
    side_by_side = {"gate_up", "down"} | ({"outputs", "tokens"} if cut else set())
    whole = {}
    for name in ("outputs", "tokens", "router", "gate_up", "down"):
        # No member that holds no experts has a gradient for them, and one that holds some always has.
        parts = [result[name] for result in results if name in result]
        whole[name] = torch.cat(parts) if name in side_by_side else torch.stack(parts).sum(0)
    return whole


def largest_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-3))
        for name in expected
    )


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    members = draw(st.integers(2, 4))
    experts = draw(st.lists(st.integers(0, 3), min_size=members, max_size=members).filter(any))
    tokens = draw(st.lists(st.integers(0, 9), min_size=members, max_size=members).filter(any))
    k = draw(st.integers(1, min(3, sum(experts))))
    return Mixture(
        experts=tuple(experts),
        tokens=tuple(tokens),
        k=k,
        normalise=k > 1
        and draw(st.booleans()),  # the weight of an only choice is 1, and what the router's gradient is then is noise
        seed=draw(st.integers(0, 2**16)),
        hosts=draw(st.sampled_from([hosts for hosts in HOSTS if len(hosts) in (0, members)])),
    )


@pytest.mark.parametrize("job", [cut_over_members, whole_on_members])
@quick
@given(case=mixtures())
def test_outputs_and_gradients_are_those_of_one_device(
    pool: Pool, job: Callable[[World, Mixture], dict[str, Tensor]], case: Mixture
) -> None:
    results = pool.run(len(case.experts), job, case)
    assert largest_error(assembled(results, cut=job is cut_over_members), on_one_device(case)) <= 1e-12


@pytest.mark.parametrize("job", [cut_over_members, whole_on_members])
def test_in_single_precision(pool: Pool, job: Callable[[World, Mixture], dict[str, Tensor]]) -> None:
    case = Mixture(experts=(5, 0, 1, 2), tokens=(40, 3, 0, 21), dtype=torch.float32)
    results = pool.run(4, job, case)
    assert largest_error(assembled(results, cut=job is cut_over_members), on_one_device(case)) <= 1e-5


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    ("hosts", "experts", "tokens"),
    [
        ((0, 0, 1), (2, 1, 3), (17, 0, 30)),
        ((0, 1, 1, 1), (3, 0, 4, 1), (9, 21, 5, 0)),
        ((0, 1, 0), (0, 4, 0), (3, 0, 8)),
    ],
)
def test_tokens_go_once_to_each_host(
    pool: Pool, hosts: tuple[int, ...], experts: tuple[int, ...], tokens: tuple[int, ...], k: int
) -> None:
    case = Mixture(experts=experts, tokens=tokens, k=k, normalise=k > 1, dtype=torch.float32, hosts=hosts)
    found = assembled(pool.run(len(hosts), cut_over_members, case), cut=True)
    assert largest_error(found, on_one_device(case)) <= 1e-5


def rows_to_other_hosts(world: World, case: Mixture) -> list[int]:
    """Rows of an all-to-all of as many columns as tokens and weights have, and of one of as many as results have: those that leave."""
    found: dict[int, int] = {}
    send = Group.begin_all_to_all

    def counted(self: Group, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Callable[[], list[Tensor]]:
        if self.hosts is not None and parts[0].is_floating_point():
            away = [part for part, host in zip(parts, case.hosts, strict=True) if host != case.hosts[world.rank]]
            found[parts[0].shape[1]] = sum(map(len, away))
        return send(self, parts, shapes)

    with mock.patch.object(Group, "begin_all_to_all", counted):
        cut_over_members(world, case)
    return [found[WIDTH + case.k], found[WIDTH]]


def test_a_row_leaves_for_each_token_and_host_and_one_comes_back(pool: Pool) -> None:
    case = Mixture(experts=(2, 1, 3), tokens=(17, 4, 30), k=3, hosts=(0, 0, 1))
    rows = [sum(of) for of in zip(*pool.run(3, rows_to_other_hosts, case), strict=True)]
    tokens, router, *_ = case.values()
    indices, _ = gated(tokens @ router.T, case.k, normalise=True)
    there = torch.cat([(indices[:21] >= 3).any(1), (indices[21:] < 3).any(1)])
    assert rows == [int(there.sum())] * 2
    assert rows[0] < int((indices[:21] >= 3).sum() + (indices[21:] < 3).sum())


def seen_tokens(world: World, case: Mixture) -> list[list[float]]:
    """For each expert of this member the tokens that come to it, by number."""
    seen: list[list[float]] = []

    def run(rows: Tensor, counts: Sequence[int]) -> Tensor:
        seen.extend(part[:, 0].tolist() for part in rows.detach().split(list(counts)))
        return rows

    with joined(world, case.hosts) as group:
        first, stop = group.bounds(case.tokens)
        indices = _choices(case)[first:stop]
        numbers = torch.arange(first, stop).double().unsqueeze(1)
        weights = torch.ones_like(indices, dtype=torch.float64)
        functions.experts_between(group, numbers, indices, weights, sizes=case.experts, run=run)
    return seen


def _choices(case: Mixture) -> Tensor:
    generator = torch.Generator().manual_seed(case.seed)
    return torch.rand(sum(case.tokens), sum(case.experts), generator=generator).topk(case.k).indices


@pytest.mark.parametrize("hosts", [(), (0, 0, 1, 1), (1, 0, 0, 0), (0, 1, 0, 1)])
def test_an_expert_sees_its_tokens_in_the_order_of_one_device(pool: Pool, hosts: tuple[int, ...]) -> None:
    case = Mixture(experts=(0, 3, 2, 1), tokens=(4, 11, 5, 7), hosts=hosts)
    found = [tokens for of_member in pool.run(4, seen_tokens, case) for tokens in of_member]
    chosen = _choices(case)
    assert found == [(chosen == expert).any(1).nonzero()[:, 0].tolist() for expert in range(6)]


def trained_in_part(world: World, case: Mixture) -> list[bool]:
    """Tokens and router are frozen, the experts learn, and what the experts return does not depend on rows that are not there."""
    with joined(world, case.hosts) as group:
        tokens, router, gate_up, _, _ = case.values()
        first, stop = group.bounds(case.tokens)
        weight = gate_up[slice(*group.bounds(case.experts))].clone().requires_grad_()
        indices, weights = gated(tokens[first:stop] @ router.T, case.k, normalise=True)

        def run(rows: Tensor, counts: Sequence[int]) -> Tensor:
            parts = [r @ w[:WIDTH].T for r, w in zip(rows.split(list(counts)), weight, strict=True)]
            return torch.cat(parts) if parts else torch.zeros(0, WIDTH, dtype=rows.dtype)

        outputs = functions.experts_between(group, tokens[first:stop], indices, weights, sizes=case.experts, run=run)
        outputs.sum().backward()
        return [weight.grad is not None]


@pytest.mark.parametrize("hosts", [(), (0, 1, 1)])
def test_a_member_without_experts_takes_part_in_backward_though_nothing_of_it_learns(
    pool: Pool, hosts: tuple[int, ...]
) -> None:
    results = pool.run(3, trained_in_part, Mixture(experts=(2, 0, 3), tokens=(3, 4, 2), hosts=hosts))
    assert results == [[True], [False], [True]]


def under_autocast(world: World, case: Mixture) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        return cut_over_members(world, case)


@pytest.mark.parametrize("hosts", [(), (0, 1)])
def test_under_autocast_a_member_without_experts_returns_what_the_others_return(
    pool: Pool, hosts: tuple[int, ...]
) -> None:
    case = Mixture(experts=(3, 0), tokens=(6, 5), dtype=torch.float32, hosts=hosts)
    found = assembled(pool.run(2, under_autocast, case), cut=True)
    assert found["outputs"].dtype == torch.float32
    assert largest_error(found, on_one_device(case)) <= 0.05


# ---- one process -------------------------------------------------------------------------------------------------------

ALONE = Group(None, 0, 1)


def test_experts_that_nobody_chose_have_a_gradient_of_zero() -> None:
    gate_up = torch.randn(3, 2 * INNER, WIDTH, requires_grad=True)
    down = torch.randn(3, WIDTH, INNER, requires_grad=True)
    tokens = torch.randn(0, WIDTH, requires_grad=True)
    rows = swiglu_experts(tokens, (0, 0, 0), gate_up, down)
    rows.sum().backward()
    assert rows.shape == (0, WIDTH)
    assert gate_up.grad is not None
    assert not gate_up.grad.any()
    assert down.grad is not None
    assert not down.grad.any()


def test_indexed_experts_say_the_same() -> None:
    torch.manual_seed(4)
    layer = moe_model.IndexedExperts(width=8, inner=12, experts=4, k=2)
    hidden = torch.randn(3, 10, 8)
    expected, _ = layer(hidden)
    indices, weights = gated(layer.router(hidden.flatten(0, 1)), 2, normalise=True)
    run = functools.partial(swiglu_experts, gate_up=layer.gate_up, down=layer.down)
    found = functions.experts_here(ALONE, hidden.flatten(0, 1), indices, weights, sizes=(4,), run=run)
    torch.testing.assert_close(found.view_as(expected), expected)


def test_the_experts_of_transformers_say_the_same() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    torch.manual_seed(5)
    config = MixtralConfig(hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(3, 10, 8)
    flat = hidden.flatten(0, 1)
    indices, weights = gated(F.linear(flat, block.gate.weight), 2, normalise=True)
    run = functools.partial(swiglu_experts, gate_up=block.experts.gate_up_proj, down=block.experts.down_proj)
    found = functions.experts_here(ALONE, flat, indices, weights, sizes=(4,), run=run)
    torch.testing.assert_close(found.view_as(hidden), block(hidden))


# ---- the plain model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["einsum", "indexed"])
def test_the_plain_model_is_captured_and_its_parts_add_up(form: str) -> None:
    torch.manual_seed(0)
    model = moe_model.build(form)  # type: ignore[arg-type]  # one of the two
    ids = torch.randint(0, 23, (5, 8), generator=torch.Generator().manual_seed(2))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    captured = trace(model.train(), batch)
    assert captured.graph.loss.count == "samples"
    model(**batch).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert expected.keys() == {name for name, _ in model.named_parameters()}
    model.zero_grad()
    for part in (slice(0, 1), slice(1, 5)):
        piece = {name: value[part] for name, value in batch.items()}
        (
            model(**piece) * captured.loss_count.weight(*map(captured.loss_count.statistics_of, (piece, batch)))
        ).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)
