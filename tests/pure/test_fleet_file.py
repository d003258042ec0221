"""The fleet file: what it means, what it refuses and on which line, and that it agrees with the cluster file."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cluster import Cluster, fleet_file
from heterodyne.cluster.file import load_cluster
from heterodyne.cluster.fleet import Fleet, Pool, Wire
from heterodyne.cluster.fleet_cluster import cluster_of, fleet_of
from heterodyne.cluster.fleet_file import load_fleet
from heterodyne.errors import ClusterError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.yaml"))
SIX_KINDS = Path(__file__).parents[2] / "examples" / "fleets" / "six_kinds.yaml"

SITES = """\
name: sites
kinds:
  NPU-X: {backend: npu, peak_tflops: {bf16: 320}, memory: 64 GB, memory_bandwidth: 1.6 TB/s, link_bandwidth: 200 GB/s}
prices: {H100-SXM-80GB: 3, NPU-X: 1.5}
links:
  - {between: nodes, bandwidth: 400 Gb/s, latency: 5 us}
  - {between: pods, bandwidth: 200 Gb/s, latency: 10 us}
  - {between: zones, bandwidth: 100 Gb/s, latency: 1 ms, usd_per_gb: 0.01}
  - {between: regions, bandwidth: 10 Gb/s, latency: 60 ms, usd_per_gb: 0.02}
regions:
  - name: east
    zones:
      - name: a
        pods:
          - name: h100
            count: 2
            nodes: [{kind: H100-SXM-80GB, count: 16, devices_per_node: 8}]
          - name: mixed
            link: {bandwidth: 100 Gb/s, latency: 20 us}
            nodes:
              - {kind: H100-SXM-80GB, count: 4, devices_per_node: 8, usd_per_hour: 2}
              - {kind: A100-SXM-80GB, count: 2, devices_per_node: 4, spot: true}
      - name: b
        prices: {NPU-X: 1}
        nodes: [{kind: NPU-X, count: 8, devices_per_node: 16}]
  - name: west
    nodes: [{kind: NPU-X, count: 3, devices_per_node: 2, watts: 400}]
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "fleet.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def gbit(wire: Wire | None) -> float | None:
    return None if wire is None else wire.bandwidth_bytes_per_s * 8 / 1e9


def test_pools_of_a_file_with_every_level(write: Write) -> None:
    fleet = load_fleet(write(SITES))
    assert {pool.name: (pool.kind, pool.devices) for pool in fleet.pools} == {
        "east/a/h100-0": ("H100-SXM-80GB", 128),
        "east/a/h100-1": ("H100-SXM-80GB", 128),
        "east/a/mixed/H100-SXM-80GB": ("H100-SXM-80GB", 32),
        "east/a/mixed/A100-SXM-80GB": ("A100-SXM-80GB", 8),
        "east/b": ("NPU-X", 128),
        "west": ("NPU-X", 6),
    }
    assert fleet.pool("east/a/h100-1").place == ("east", "a", "h100-1")
    assert fleet.devices == 430


def test_the_narrowest_link_counts(write: Write) -> None:
    fleet = load_fleet(write(SITES))
    h100, sibling, mixed, a100, npu, west = fleet.pools
    assert [gbit(pool.between) for pool in fleet.pools] == [400, 400, 100, 100, 400, 400]
    assert gbit(fleet.wire(mixed, a100)) == 100
    assert gbit(fleet.wire(h100, sibling)) == gbit(fleet.wire(sibling, mixed)) == 200
    assert gbit(fleet.wire(h100, npu)) == 100
    assert gbit(fleet.wire(west, h100)) == gbit(fleet.wire(h100, west)) == 10


def test_traffic_is_paid_only_where_the_link_has_a_price(write: Write) -> None:
    fleet = load_fleet(write(SITES))
    h100, sibling, _, _, npu, west = fleet.pools
    assert fleet.traffic_usd_per_byte(h100, h100) == fleet.traffic_usd_per_byte(h100, sibling) == 0
    assert fleet.traffic_usd_per_byte(npu, npu) == 0
    assert fleet.traffic_usd_per_byte(h100, npu) == pytest.approx(0.01e-9)
    assert fleet.traffic_usd_per_byte(west, npu) == pytest.approx(0.02e-9)


def test_traffic_of_all_is_paid_between_any_two_nodes(write: Write) -> None:
    text = SITES.replace("between: regions, ", "between: all, ").replace(", usd_per_gb: 0.01", "")
    fleet = load_fleet(write(text))
    h100, npu = fleet.pool("east/a/h100-0"), fleet.pool("east/b")
    assert fleet.traffic_usd_per_byte(h100, h100) == fleet.traffic_usd_per_byte(h100, npu) == pytest.approx(0.02e-9)


def test_the_innermost_price_counts(write: Write) -> None:
    fleet = load_fleet(write(SITES))
    assert [pool.usd_per_device_hour for pool in fleet.pools] == [3, 3, 2, None, 1, 1.5]
    assert [pool.spot for pool in fleet.pools] == [False, False, False, True, False, False]


def test_watts_are_those_of_the_catalog_unless_stated(write: Write) -> None:
    fleet = load_fleet(write(SITES))
    assert [pool.watts_per_device for pool in fleet.pools] == [700, 700, 700, 400, None, 400]


def test_a_kind_of_the_file_is_an_accelerator(write: Write) -> None:
    fleet = load_fleet(write(SITES))
    npu = fleet.accelerator("NPU-X")
    assert (npu.peak_flops["bf16"], npu.memory_bytes, npu.memory_bandwidth_bytes_per_s) == (320e12, 64 * 10**9, 1.6e12)
    assert fleet.pool("west").backend == "npu"
    assert gbit(fleet.pool("west").inside) == 1600
    assert fleet.accelerator("H100-SXM-80GB").peak_flops["bf16"] == 989e12


def test_a_file_can_say_what_the_catalog_does_not(write: Write) -> None:
    text = """
kinds: {H100-NVL-94GB: {peak_tflops: {bf16: 800}, memory: 94 GB, memory_bandwidth: 3.9 TB/s}}
pods: [{name: p, nodes: [{kind: H100-NVL-94GB, devices_per_node: 2, link: {bandwidth: 300 GB/s, latency: 5 us}}]}]
"""
    fleet = load_fleet(write(text))
    assert fleet.accelerator("H100-NVL-94GB").tdp_w == 400  # the catalog's, as the file says nothing of it
    assert fleet.pools[0].memory_bytes == 94 * 10**9


def test_prices_that_are_not_there_are_listed(write: Write) -> None:
    fleet = load_fleet(write(SITES))
    with pytest.raises(ClusterError, match=r"mixed/A100-SXM-80GB.*seen at 2\.79 to 3\.43.*prices: \{A100-SXM-80GB"):
        fleet.require_prices()
    load_fleet(write(SITES.replace("{H100-SXM-80GB: 3,", "{H100-SXM-80GB: 3, A100-SXM-80GB: 2,"))).require_prices()


def test_twenty_five_thousand_devices_of_six_kinds_are_a_screenful() -> None:
    fleet = load_fleet(SIX_KINDS)
    assert fleet.devices == 25_000
    assert len(fleet.kinds) == 6
    assert len(SIX_KINDS.read_text().splitlines()) <= 40
    fleet.require_prices()
    assert all(fleet.wire(a, b) is not None for a in fleet.pools for b in fleet.pools)


def test_the_example_of_the_page_is_a_fleet(write: Write) -> None:
    page = (Path(__file__).parents[2] / "docs" / "fleet.md").read_text(encoding="utf-8")
    text = page.split("## The file\n")[1].split("**Places.**")[0]
    assert load_fleet(write(textwrap.dedent(text))).kinds == ("H100-SXM-80GB", "NPU-X")
    assert load_fleet(write(textwrap.dedent((fleet_file.__doc__ or "").split("\n\n")[1]))).devices == 3072


@pytest.mark.parametrize(
    ("old", "new", "line", "told"),
    [
        ("kind: H100-SXM-80GB, count: 16", "kind: H100-XXL, count: 16", 17, "no accelerator 'H100-XXL'.*peak_tflops.*memory_bandwidth"),
        ("kind: H100-SXM-80GB, count: 16", "kind: Ascend-910B, count: 16", 17, "peak_tflops, memory, memory_bandwidth of Ascend-910B"),
        ("kind: H100-SXM-80GB, count: 16", "kind: T4, count: 16", 17, "link between the T4.*link: null"),
        ("kind: H100-SXM-80GB, count: 16", "count: 16", 17, "has no devices; give 'kind'"),
        (", link_bandwidth: 200 GB/s", "", 3, "needs link_bandwidth too"),
        ("bf16: 320", "bf17: 320", 3, "fp32"),
        ("bf16: 320", "bf16: -320", 3, "greater than 0"),
        ("memory: 64 GB", "memory: 64", 3, "is the unit right"),
        ("NPU-X: 1.5", "NPU-Y: 1.5", 4, "prices 'NPU-Y', of which there are no devices"),
        ("NPU-X: 1.5", "NPU-X: -1.5", 4, "greater than or equal to 0"),
        ("bandwidth: 400 Gb/s", "bandwidth: -400 Gb/s", 6, "not a bandwidth"),
        ("bandwidth: 400 Gb/s", "bandwidth: 400 Eb/s", 6, "no unit that a bandwidth"),
        ("bandwidth: 400 Gb/s, latency: 5 us", "bandwidth: 400 Gb/s", 6, "go together"),
        ("bandwidth: 400 Gb/s, latency: 5 us", "", 6, "says nothing"),
        ("between: pods", "between: nodes", 7, "'between: nodes' is given twice .first on line 6"),
        ("between: pods", "between: all", 9, "'between: regions' is given twice .first on line 7"),
        ("between: pods", "between: racks", 7, "neither two places"),
        ("between: pods", "between: [east/a, east/a]", 8, None),
        ("between: pods", "between: [east/a, east/c]", 7, "no node or place 'east/c'; there are .*east/b"),
        ("between: pods", "between: [east/a, east]", 7, "one of them stands inside the other"),
        ("between: pods", "between: [east/a/mixed, east/a/mixed]", 7, "inside east/a/mixed is given twice .first on line 19"),
        ("usd_per_gb: 0.02", "usd_per_gb: -1", 9, "greater than or equal to 0"),
        ("name: west", "name: east", 26, "'east' is there already .line 11"),
        ("- name: b\n", "- name: a\n", 23, "'east/a' is there already .line 13"),
        ("name: mixed", "name: h100-1", 18, "'east/a/h100-1' is there already .line 15"),
        ("count: 16", "count: 0", 17, "greater than or equal to 1"),
        ("count: 16", "count: 1000000000", 17, "less than or equal to 100000"),
        ("devices_per_node: 16", "devices_per_node: 1000000000", 25, "less than or equal to 1024"),
        ("count: 2\n", "count: 90000\n", 15, "more than 4096 pools"),
        ("count: 16", "count: 100000", 17, "more than 1,000,000 devices"),
        ("count: 8, ", "counts: 8, ", 25, "no such key; did you mean 'count'"),
        ("    nodes: [{kind: NPU-X, count: 3", "    zones: []\n    nodes: [{kind: NPU-Z, count: 3", 28, "NPU-Z"),
        ("    zones:\n", "    nodes: [{kind: T4}]\n    zones:\n", 11, "has zones and nodes; give one of them"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(write: Write, old: str, new: str, line: int, told: str | None) -> None:
    assert old in SITES
    path = write(SITES.replace(old, new, 1))
    if told is None:
        load_fleet(path)
        return
    with pytest.raises(ClusterError, match=f"(?s){told}") as caught:
        load_fleet(path)
    assert caught.value.line == line


def test_a_level_that_is_not_there(write: Write) -> None:
    text = "pods: [{name: p, nodes: [{kind: A100-SXM-80GB}]}]\nlinks: [{between: zones, bandwidth: 1 Gb/s, latency: 0}]"
    with pytest.raises(
        ClusterError, match="there are no zones in this file; between can be all, pods, nodes"
    ) as caught:
        load_fleet(write(text))
    assert caught.value.line == 2


def test_links_of_which_neither_is_the_more_special_one(write: Write) -> None:
    cross = """\
  - {between: [east/a, west], bandwidth: 1 Gb/s, latency: 1 ms}
  - {between: [east, west/x], bandwidth: 2 Gb/s, latency: 1 ms}
"""
    text = SITES.replace("regions:\n", cross + "regions:\n", 1).replace(
        "    nodes: [{kind: NPU-X, count: 3, ", "    zones: [{name: x, nodes: [{kind: NPU-X, count: 3}]}, {name: y, nodes: [{kind: NPU-X, "
    ).replace("devices_per_node: 2, watts: 400}]", "devices_per_node: 2, watts: 400}]}]")  # fmt: skip
    with pytest.raises(ClusterError, match="neither is the more special one") as caught:
        load_fleet(write(text))
    assert caught.value.line == 11
    both = "  - {between: [east/a, west/x], bandwidth: 3 Gb/s, latency: 1 ms}\n"
    fleet = load_fleet(write(text.replace(cross, cross + both)))
    assert gbit(fleet.wire(fleet.pool("east/a/h100-0"), fleet.pool("west/x"))) == 3
    assert gbit(fleet.wire(fleet.pool("west/y"), fleet.pool("east/a/h100-0"))) == 1
    assert gbit(fleet.wire(fleet.pool("west/x"), fleet.pool("east/b"))) == 2


def test_paths_that_make_the_same_names_of_nodes(write: Write) -> None:
    text = """
regions:
  - {name: a.b, nodes: [{kind: A100-SXM-80GB}]}
  - {name: a, zones: [{name: b, nodes: [{kind: A100-SXM-80GB}]}]}
"""
    with pytest.raises(ClusterError, match=r"a\.b and a/b have the same names"):
        load_fleet(write(text))


def test_a_link_of_counted_pods_is_between_each_two_of_them(write: Write) -> None:
    link = "  - {between: [east/a/h100, east/a/h100], bandwidth: 333 Gb/s, latency: 1 us}\nregions:\n"
    fleet = load_fleet(write(SITES.replace("regions:\n", link, 1)))
    assert gbit(fleet.wire(fleet.pool("east/a/h100-0"), fleet.pool("east/a/h100-1"))) == 333
    assert gbit(fleet.pool("east/a/h100-0").between) == 400


def agree(one: Cluster, other: Cluster) -> bool:
    def links(cluster: Cluster) -> dict[frozenset[str], tuple[float, float]]:
        return {frozenset(k.between): (k.bandwidth_bytes_per_s, k.latency_s) for k in cluster.links}

    return one.name == other.name and one.devices == other.devices and links(one) == links(other)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_a_cluster_file_is_a_fleet_file(path: Path) -> None:
    cluster = load_cluster(path)
    assert agree(cluster_of(fleet_of(cluster)), cluster)


ENTRIES = st.sampled_from(
    ["{kind: A100-SXM4-80GB, count: 2}", "{kind: T4}", "{kind: cpu, memory: 2 GiB, count: 2}", "{kind: cpu, memory: 1 GiB}"]
)  # fmt: skip
SPEED = st.integers(1, 9).map(lambda n: f"bandwidth: {n} GB/s, latency: {n} us")


@st.composite
def cluster_files(draw: st.DrawFn) -> str:
    lines, ends = ["name: drawn", "nodes:"], []
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)):
        count = draw(st.none() | st.integers(1, 4))
        devices = ", ".join(draw(st.lists(ENTRIES, min_size=1, max_size=3)))
        link = draw(st.sampled_from(["", ", link: null"]) | SPEED.map(lambda speed: f", link: {{{speed}}}"))
        lines.append(f"  - {{name: {name}, {f'count: {count}, ' if count else ''}devices: [{devices}]{link}}}")
        ends += [name, *(f"{name}-{i}" for i in range(count or 0))]
    pairs = draw(st.lists(st.tuples(st.sampled_from(ends), st.sampled_from(ends)), max_size=4))
    lines.append("links:" if pairs else "")
    lines += [f"  - {{between: [{a}, {b}], {draw(SPEED)}}}" for a, b in pairs]
    if pairs and draw(st.booleans()):
        lines.append(f"  - {{between: all, {draw(SPEED)}}}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("links", "line", "told"),
    [
        ("[new, old]", 6, None),
        ("[new, young]", 6, "no node or place 'young'; there are .*old"),
        ("[old, old]", 6, "joins a node with itself"),
        ("[new-0, new-0]", 6, "joins a node with itself"),
        ("[new, new-0]", 6, "one of them stands inside the other"),
        ("[new, old]; [old, new-1]", 7, "given twice .first on line 6"),
        ("[old, new-1]; [new, old]", 7, "given twice .first on line 6"),
        ("[new, old]; [old, new]", 7, "given twice .first on line 6"),
        ("all; all", 7, "'between: all' is given twice .first on line 6"),
    ],
)  # fmt: skip
def test_links_of_a_file_of_nodes(write: Write, links: str, line: int, told: str | None) -> None:
    text = """\
name: lab
nodes:
  - {name: new, count: 2, devices: [{kind: A100-SXM-80GB}]}
  - {name: old, devices: [{kind: T4}, {kind: cpu, memory: 1 GiB}]}
links:
"""
    path = write(
        text + "".join(f"  - {{between: {ends}, bandwidth: 1 GB/s, latency: 0}}\n" for ends in links.split("; "))
    )
    if told is None:
        load_fleet(path)
        return
    with pytest.raises(ClusterError, match=f"(?s){told}") as caught:
        load_fleet(path)
    assert caught.value.line == line


@settings(deadline=None, max_examples=300)
@given(text=cluster_files())
def test_pools_found_in_any_cluster_are_the_same_machines(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.yaml"
    path.write_text(text)
    try:
        cluster = load_cluster(path)
    except ClusterError:
        return  # two links of one pair
    assert agree(cluster_of(fleet_of(cluster)), cluster)


def test_alike_nodes_are_one_pool(write: Write) -> None:
    text = "nodes: [{name: a, count: 500, devices: [{kind: A100-SXM-80GB, count: 8}]}]"
    fleet = load_fleet(write(text))
    assert len(fleet.pools) == 1
    assert [pool.nodes for pool in fleet_of(cluster_of(fleet)).pools] == [500]


def test_a_fleet_file_is_a_cluster_file_while_it_is_small(write: Write) -> None:
    path = write(SITES)
    assert load_cluster(path) == cluster_of(load_fleet(path))
    flat = "nodes: [{name: a, count: 2, kind: A100-SXM-80GB, devices_per_node: 2, usd_per_hour: 1.5}]"
    assert [device.id for device in load_cluster(write(flat)).devices][-1] == "a-1/A100-SXM-80GB:1"
    with pytest.raises(ClusterError, match=r"six_kinds.yaml: fleet .* at most 4,096"):
        load_cluster(SIX_KINDS)


def test_too_many_devices_to_list() -> None:
    pool = Pool(name="a", kind="A100-SXM-80GB", nodes=513, devices_per_node=8, memory_bytes=80 * 10**9)
    with pytest.raises(ClusterError, match="4,104 devices in 513 nodes; device by device at most 4,096"):
        cluster_of(Fleet(name="big", pools=(pool,)))


def test_numbers_that_no_pool_can_have() -> None:
    with pytest.raises(ClusterError, match="at least one node"):
        Pool(name="a", kind="T4", nodes=0, devices_per_node=8, memory_bytes=1)
    with pytest.raises(ClusterError, match="below 0"):
        Pool(name="a", kind="T4", nodes=1, devices_per_node=8, memory_bytes=1, usd_per_device_hour=-1.0)
    with pytest.raises(ClusterError, match="bandwidth above 0"):
        Wire(bandwidth_bytes_per_s=0.0, latency_s=0.0)
