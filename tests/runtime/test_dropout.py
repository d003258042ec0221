"""Masks that belong to the samples: the same under any cut, independent of each other, right on average."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from heterodyne.errors import CaptureError, HeterodyneError
from heterodyne.frontend import capture
from heterodyne.runtime.exact.dropout import SampleDropout, splitmix64

CPU = torch.device("cpu")


def masks(
    samples: list[int], width: int = 500, *, p: float = 0.3, seed: int = 1, step: int = 2, call: int = 0
) -> Tensor:
    """The mask that call number ``call`` draws for these samples: 1 kept, 0 dropped.  # [samples, width]"""
    mode = SampleDropout(seed=seed, device=CPU)
    with mode.forward(mode.draws(step, samples)):
        for _ in range(call):
            F.dropout(torch.ones(len(samples), 1), p)
        return (F.dropout(torch.ones(len(samples), width), p) != 0).float()


@pytest.mark.tour("runtime/exact/")
def test_a_sample_has_the_same_mask_in_any_micro_batch() -> None:
    whole = masks(list(range(8)))
    parts = torch.cat([masks([0, 1, 2]), masks([3]), masks([4, 5, 6, 7])])
    assert torch.equal(whole, parts)
    assert torch.equal(whole[[5, 0]], masks([5, 0]))


def test_several_rows_a_sample_stay_with_their_sample() -> None:
    def drop(samples: list[int]) -> Tensor:
        mode = SampleDropout(seed=0, device=CPU)
        with mode.forward(mode.draws(0, samples)):
            return F.dropout(torch.ones(3 * len(samples), 7))

    assert torch.equal(drop([0, 1, 2, 3])[6:], drop([2, 3]))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_elements_stay_with_the_right_probability(p: float) -> None:
    kept = masks(list(range(40)), 5000, p=p)
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(kept.mean().item() - (1 - p)) < 5 * deviation
    # In each row and in each column too: no part of the hash's input is lost.
    assert (kept.mean(1) - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) / kept.shape[1])
    assert (kept.mean(0) - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) / kept.shape[0])


def test_masks_of_other_seeds_steps_calls_samples_and_elements_are_independent() -> None:
    base = masks([7], 20000, p=0.5)
    others = {
        "seed": masks([7], 20000, p=0.5, seed=2),
        "step": masks([7], 20000, p=0.5, step=3),
        "call": masks([7], 20000, p=0.5, call=1),
        "sample": masks([8], 20000, p=0.5),
        "element": base.roll(1, 1),
    }
    for what, other in others.items():
        agreement = (base == other).float().mean().item()
        assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(20000), what


def test_expectation_is_kept_and_gradients_meet_the_same_mask() -> None:
    mode = SampleDropout(seed=0, device=CPU)
    values = torch.ones(4, 10000, requires_grad=True)
    with mode.forward(mode.draws(0, range(4))):
        output = F.dropout(values, 0.25)
    output.sum().backward()
    assert output.mean().item() == pytest.approx(1.0, abs=0.02)
    assert torch.equal(values.grad, output.detach())


def test_edges_are_those_of_torch() -> None:
    mode = SampleDropout(seed=0, device=CPU)
    values = torch.randn(2, 3)
    with mode.forward(mode.draws(0, [0, 1])):
        assert torch.equal(F.dropout(values, 0.0), values)
        assert torch.equal(F.dropout(values, 0.5, training=False), values)
        assert torch.equal(F.dropout(values, 1.0), torch.zeros(2, 3))
        changed = values.clone()
        assert F.dropout(changed, 0.5, inplace=True) is changed
        channels = F.dropout2d(torch.ones(2, 50, 4, 4), 0.5)
    assert ((channels == 0) | (channels == 2)).all()
    assert (channels == channels[..., :1, :1]).all()  # whole channels


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    mode = SampleDropout(seed=0, device=CPU)
    torch.manual_seed(0)
    values = torch.randn(4, 50000)
    with mode.forward(mode.draws(0, range(4))):
        output = F.alpha_dropout(values, 0.2, training=True)
    assert output.mean().item() == pytest.approx(0.0, abs=0.02)
    assert output.var().item() == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_is_that_of_torch_but_for_the_mask(mask: str, grouped: bool) -> None:
    """With the weights of attention known (values are the identity), dropping and scaling can be undone."""
    torch.manual_seed(0)
    length = 6
    query = torch.randn(2, 4, length, 5)
    key = torch.randn(2, 2 if grouped else 4, length, 5)
    value = torch.eye(length).expand(2, 2 if grouped else 4, length, length)
    allowed = torch.rand(2, 1, length, length) < 0.7
    allowed[0, 0, 0] = False  # a row in which nothing is allowed
    more = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": allowed},
        "float": {"attn_mask": torch.randn(2, 1, length, length)},
    }[mask]
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, scale=0.3, **more)
    mode = SampleDropout(seed=0, device=CPU)
    with mode.forward(mode.draws(0, [0, 1])):
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=0.25, enable_gqa=grouped, scale=0.3, **more)
        same = F.scaled_dot_product_attention(query, key, value, enable_gqa=grouped, scale=0.3, **more)
    kept = found != 0
    torch.testing.assert_close(found[kept], expected[kept] / 0.75)
    assert torch.equal(same, expected)
    assert not torch.isnan(found).any()
    assert (expected[~kept] != 0).any()


def test_multi_head_attention_is_reached_inside() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    values = torch.randn(4, 5, 8)

    def run(samples: list[int]) -> Tensor:
        mode = SampleDropout(seed=0, device=CPU)
        with mode.forward(mode.draws(0, samples)):
            own = values[samples]
            return attention(own, own, own, need_weights=False)[0]

    whole = run([0, 1, 2, 3])
    torch.testing.assert_close(whole[2:], run([2, 3]))
    attention.eval()
    assert not torch.allclose(whole, run([0, 1, 2, 3]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_meets_the_masks_of_the_forward(reentrant: bool) -> None:
    def part(values: Tensor) -> Tensor:
        return F.dropout(values.sin(), 0.5).cos()

    gradients = []
    for recompute in (False, True):
        mode = SampleDropout(seed=0, device=CPU)
        values = torch.linspace(0, 3, 400).view(4, 100).requires_grad_()
        draws = mode.draws(0, range(4))
        with mode.forward(draws):
            hidden = F.dropout(values, 0.5)
            for _ in range(2):
                hidden = checkpoint(part, hidden, use_reentrant=reentrant) if recompute else part(hidden)
        with mode.backward(draws):
            torch.autograd.backward(hidden.sum())
        gradients.append(values.grad)
    assert torch.equal(*gradients)


def test_the_random_state_of_the_caller_is_left_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    masks([0, 1])
    assert torch.equal(torch.rand(2), expected)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape[0], 5),
    "rand of a size": lambda x: torch.rand((x.shape[0], 5), dtype=torch.float64),
    "randn": lambda x: torch.randn(x.shape),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "bernoulli": lambda x: torch.bernoulli(x.abs()),
    "bernoulli_": lambda x: x.new_empty(x.shape[0], 1).bernoulli_(0.4),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 3),
    "normal_": lambda x: torch.empty_like(x).normal_(2.0, 3.0),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "randint": lambda x: torch.randint(1000, (x.shape[0], 5)).float(),
    "randint between": lambda x: torch.randint(low=-7, high=2**40, size=(x.shape[0], 5)).float(),
    "randint_like": lambda x: torch.randint_like(x, -3, 9),
    "random_": lambda x: torch.empty_like(x).random_(100),
    "normal": lambda x: torch.normal(x, x.abs()),
    "normal of one mean": lambda x: torch.normal(0.5, x.abs()),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "a distribution": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
    "dropout of torch": lambda x: torch.dropout(x, 0.5, True),
    "alpha dropout of torch": lambda x: torch.alpha_dropout(x, 0.5, True),
    "feature dropout of torch": lambda x: torch.feature_dropout(x, 0.5, True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_noise_belongs_to_the_samples_too(name: str) -> None:
    values = torch.linspace(-1, 1, 8 * 400).view(8, 400)

    def noise(samples: list[int], step: int = 0) -> Tensor:
        mode = SampleDropout(seed=0, device=CPU)
        with mode.forward(mode.draws(step, samples)):
            return DRAWS[name](values[samples])

    whole = noise(list(range(8)))
    assert torch.equal(whole, torch.cat([noise([0, 1, 2]), noise([3, 4, 5, 6, 7])]))
    assert not torch.equal(whole, noise(list(range(8)), step=1))


@pytest.mark.parametrize(
    ("draw", "mean", "deviation", "low", "high"),
    [
        (torch.rand_like, 0.5, 12**-0.5, 0.0, 1.0),
        (torch.randn_like, 0.0, 1.0, -6.0, 6.0),
        (lambda x: x.clone().uniform_(-1, 3), 1.0, 4 * 12**-0.5, -1.0, 3.0),
        (lambda x: x.clone().normal_(2.0, 3.0), 2.0, 3.0, -16.0, 20.0),
        (lambda x: x.clone().exponential_(2.0), 0.5, 0.5, 0.0, 10.0),
        (lambda x: x.clone().bernoulli_(0.3), 0.3, 0.21**0.5, 0.0, 1.0),
        (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), 0.3, 0.21**0.5, 0.0, 1.0),
        (lambda x: torch.normal(x + 2, 3.0), 2.0, 3.0, -16.0, 20.0),
        (lambda x: torch.randint_like(x, -3, 9), 2.5, (143 / 12) ** 0.5, -3.0, 8.0),
        (lambda x: torch.randint(0, 2**40, x.shape).div(2**40).to(x), 0.5, 12**-0.5, 0.0, 1.0),
        (lambda x: x.clone().random_(0, 2), 0.5, 0.5, 0.0, 1.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_has_its_distribution(
    draw: Callable[[Tensor], Tensor], mean: float, deviation: float, low: float, high: float, dtype: torch.dtype
) -> None:
    mode = SampleDropout(seed=0, device=CPU)
    with mode.forward(mode.draws(0, range(10))):
        drawn = draw(torch.zeros(10, 20000, dtype=dtype))
    assert drawn.dtype == dtype
    wide = drawn.double()
    assert wide.mean().item() == pytest.approx(mean, abs=5 * deviation / math.sqrt(wide.numel()) + 0.004)
    assert wide.std().item() == pytest.approx(deviation, rel=0.02)
    assert low <= wide.min().item()
    assert wide.max().item() <= high


def test_random_numbers_below_one_stay_below_it_in_few_digits() -> None:
    mode = SampleDropout(seed=0, device=CPU)
    with mode.forward(mode.draws(0, range(4))):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert torch.rand(4, 200000, dtype=dtype).max().item() < 1


class Draws(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.draw(x)).mean()


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_covered_is_known_from_the_graph(name: str) -> None:
    assert capture(Draws(lambda x: DRAWS[name](x).mean(1, keepdim=True)), {"x": torch.zeros(3, 4)}).random


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (nn.RReLU(), r"aten\.rrelu\S* draws random numbers that cannot be made"),
        (lambda x: x[torch.randperm(x.shape[0])], r"aten\.randperm\S* shuffles the samples of a batch"),
        (lambda x: nn.functional.dropout(torch.ones(4)), "that all samples share"),
        (
            lambda x: torch.randn(1, 4),
            r"test_dropout.py:\d+: aten\.randn\S* draws random numbers that all samples share",
        ),
        (lambda x: nn.functional.dropout(x.T).T, "whose first dim is not the samples"),
        (
            lambda x: nn.functional.dropout(torch.cat([x, x], 0))[: len(x)],
            "not known to be in the order of the samples",
        ),
    ],
)
def test_other_random_ops_are_refused(draw: Callable[[Tensor], Tensor], said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(Draws(draw), {"x": torch.zeros(3, 4)})


def test_a_tensor_that_does_not_begin_with_the_samples_is_refused() -> None:
    mode = SampleDropout(seed=0, device=CPU)
    with (
        mode.forward(mode.draws(0, [0, 1, 2])),
        pytest.raises(HeterodyneError, match="its first dim must be the samples"),
    ):
        F.dropout(torch.ones(4, 3))


def test_the_hash_of_numbers_is_that_of_the_paper() -> None:
    # The first output of SplitMix64 with seed 0, as published with the reference implementation.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
