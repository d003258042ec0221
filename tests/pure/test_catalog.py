"""The catalog: every number has a source and the right order of magnitude, and names are found as drivers write them."""

from __future__ import annotations

import pytest

from heterodyne.cli.app import run
from heterodyne.cluster.catalog import Accelerator, catalog, find, lookup
from heterodyne.errors import ClusterError

ALL = list(catalog().values())


@pytest.mark.parametrize("accelerator", ALL, ids=lambda a: a.kind)
def test_every_number_has_a_source_and_is_positive(accelerator: Accelerator) -> None:
    assert accelerator.sources
    assert all(source.strip() for source in accelerator.sources)
    assert all(price.source.strip() and price.usd_per_hour > 0 for price in accelerator.prices)
    single = (
        accelerator.memory_bytes,
        accelerator.memory_bandwidth_bytes_per_s,
        accelerator.link_bandwidth_bytes_per_s,
        accelerator.tdp_w,
    )
    numbers = [*accelerator.peak_flops.values(), *accelerator.measured_flops.values(), *single]
    assert all(number > 0 for number in numbers if number is not None)


@pytest.mark.parametrize("accelerator", ALL, ids=lambda a: a.kind)
def test_units_are_base_units(accelerator: Accelerator) -> None:
    """A slip of a power of ten would leave these bounds, which hold for every accelerator that has been built."""
    if accelerator.memory_bytes is not None:
        assert 1e10 <= accelerator.memory_bytes < 1e12
    if accelerator.memory_bandwidth_bytes_per_s is not None:
        assert 1e11 < accelerator.memory_bandwidth_bytes_per_s < 1e14
    if accelerator.link_bandwidth_bytes_per_s is not None:
        assert 1e10 < accelerator.link_bandwidth_bytes_per_s < 1e13
    assert all(1e12 < peak < 1e16 for peak in accelerator.peak_flops.values())


@pytest.mark.parametrize("accelerator", ALL, ids=lambda a: a.kind)
def test_precision_never_makes_slower_and_no_product_beats_the_peak(accelerator: Accelerator) -> None:
    peak = accelerator.peak_flops
    ordered = [peak[p] for p in ("fp32", "tf32", "bf16", "fp8") if p in peak]
    assert ordered == sorted(ordered)
    assert all(measured <= peak[precision] for precision, measured in accelerator.measured_flops.items())


def test_a_known_entry() -> None:
    a100 = lookup("A100-SXM-80GB")
    assert a100.memory_bytes == 80 * 10**9
    assert a100.peak_flops["bf16"] == 312e12
    assert a100.link_bandwidth_bytes_per_s == 300e9
    assert a100.backend == "cuda"


@pytest.mark.parametrize(
    ("reported", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("Tesla P100-PCIE-16GB", "P100-PCIe-16GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("mi300x", "MI300X"),
    ],
)
def test_names_that_drivers_report(reported: str, kind: str) -> None:
    assert lookup(reported).kind == kind


def test_a_card_of_two_devices_is_divided_between_them() -> None:
    """The driver shows each die of an MI250X: 191.5 TFLOP/s and 64 GB."""
    die = lookup("MI250X")
    assert die.peak_flops["bf16"] == pytest.approx(191.5e12)
    assert die.memory_bytes == 64 * 10**9


@pytest.mark.parametrize(
    ("name", "hint"), [("A100", "A100-SXM-40GB"), ("V100-SXM2-61GB", "V100-SXM2-16GB"), ("T5", "T4")]
)
def test_an_unknown_name_is_answered_with_those_that_come_close(name: str, hint: str) -> None:
    assert find(name) is None
    with pytest.raises(ClusterError, match=f"did you mean .*{hint}"):
        lookup(name)


def test_a_name_like_no_other_has_the_list() -> None:
    with pytest.raises(ClusterError, match="heterodyne kinds lists all"):
        lookup("xyzzy")


@pytest.mark.tour("cli/")
def test_the_command_lists_kinds_by_words_of_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kinds", "h100", "PCIE"]) == 0
    assert "H100-PCIe-80GB" in (told := capsys.readouterr().out)
    assert "756" in told
    assert "V100" not in told
    assert run(["kinds", "amd"]) == 0
    assert "MI300X" in capsys.readouterr().out
    assert run(["kinds"]) == 0
    assert all(kind in told for told in [capsys.readouterr().out] for kind in catalog())
    assert run(["kinds", "abacus"]) == 2
    assert "no kind with 'abacus'" in capsys.readouterr().err
