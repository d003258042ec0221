"""The cluster file: what it means, what it refuses and on which line, and that writing it down loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterodyne.cluster import Cluster, Device, Link
from heterodyne.cluster.file import load_cluster
from heterodyne.cluster.file_values import CATALOG_LINK_LATENCY_S
from heterodyne.cluster.fleet_file import load_fleet
from heterodyne.cluster.written import cluster_from_json, cluster_to_json, cluster_to_yaml
from heterodyne.errors import ClusterError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "clusters").glob("*.yaml"))

LAB = """\
name: lab
nodes:
  - name: new
    count: 2
    devices:
      - {kind: A100-SXM4-80GB, count: 2}
  - name: old
    devices:
      - {kind: V100-SXM2-16GB, count: 2, memory: 12 GB}
      - {kind: cpu, count: 1, memory: 64 GiB}
    link: {bandwidth: 130 GB/s, latency: 5 us}
links:
  - {between: [new, old], bandwidth: 50 Gb/s, latency: 30 us}
  - {between: all, bandwidth: 25 GB/s, latency: 10 us}
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "cluster.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_devices_in_the_order_of_the_file(write: Write) -> None:
    cluster = load_cluster(write(LAB))
    assert cluster.name == "lab"
    assert [d.id for d in cluster.devices] == [
        "new-0/A100-SXM-80GB:0", "new-0/A100-SXM-80GB:1", "new-1/A100-SXM-80GB:0", "new-1/A100-SXM-80GB:1",
        "old/V100-SXM2-16GB:0", "old/V100-SXM2-16GB:1", "old/cpu:0",
    ]  # fmt: skip
    assert [d.memory_bytes for d in cluster.devices] == [80 * 10**9] * 4 + [12 * 10**9] * 2 + [64 * 2**30]
    assert [d.backend for d in cluster.devices] == ["cuda"] * 6 + ["cpu"]


def test_memory_of_hosts_is_that_of_the_nodes_that_tell_it(write: Write) -> None:
    cluster = load_cluster(write(LAB.replace("    link: {band", "    host_memory: 256 GiB\n    link: {band")))
    assert cluster.hosts == {"old": 256 * 2**30}
    assert cluster.fingerprint == load_cluster(write(LAB)).fingerprint
    assert cluster.only(["new-0/A100-SXM-80GB:0"]).hosts == {}


@pytest.mark.tour("cluster/")
def test_links_inside_nodes_between_them_and_for_the_rest(write: Write) -> None:
    cluster = load_cluster(write(LAB))
    a100, sibling, twin, _, v100, _, cpu = (d.id for d in cluster.devices)

    def values(a: str, b: str) -> tuple[float, float]:
        link = cluster.link(a, b)
        assert link is not None
        return link.bandwidth_bytes_per_s, link.latency_s

    assert values(a100, sibling) == (300e9, CATALOG_LINK_LATENCY_S)
    assert values(v100, cpu) == (130e9, pytest.approx(5e-6))
    assert values(a100, v100) == values(cpu, twin) == (50e9 / 8, pytest.approx(30e-6))
    assert values(a100, twin) == (25e9, pytest.approx(10e-6))


def test_nothing_is_made_up_where_the_catalog_states_no_link(write: Write) -> None:
    cluster = load_cluster(write("nodes: [{name: a, devices: [{kind: MI100, count: 2}]}]"))
    assert cluster.links == ()


def test_a_link_that_is_null_is_unknown(write: Write) -> None:
    cluster = load_cluster(write("nodes: [{name: a, link: null, devices: [{kind: A100-SXM-80GB, count: 2}]}]"))
    assert cluster.links == ()


def test_an_unlike_pair_in_a_node_has_the_slower_link(write: Write) -> None:
    cluster = load_cluster(write("nodes: [{name: a, devices: [{kind: A100-SXM-80GB}, {kind: V100-SXM2-16GB}]}]"))
    assert [link.bandwidth_bytes_per_s for link in cluster.links] == [150e9]


def test_numbers_of_a_kind_go_on_where_it_is_listed_twice(write: Write) -> None:
    text = "nodes: [{name: a, devices: [{kind: cpu, memory: 1 GiB}, {kind: cpu, memory: 2 GiB}]}]"
    assert [d.id for d in load_cluster(write(text)).devices] == ["a/cpu:0", "a/cpu:1"]


@pytest.mark.parametrize(
    ("old", "new", "line", "told"),
    [
        ("memory: 12 GB", "memory: 12 GX", 9, "12 GX.*no unit"),
        ("memory: 12 GB", "memory: 12", 9, "is the unit right"),
        ("memory: 12 GB", "memory: -12 GB", 9, "not a size"),
        ("memory: 12 GB", "memory: 12 PB", 9, "is the unit right"),
        ("memory: 64 GiB", "count: 1", 10, "given twice"),
        (", memory: 64 GiB", "", 10, "a cpu needs 'memory'"),
        ("A100-SXM4-80GB", "A100-SXM4-81GB", 6, "did you mean A100-SXM-80GB.*give its 'memory'"),
        ("A100-SXM4-80GB", "Ascend-910B", 6, "knows .* not its memory"),
        ("count: 2\n", "count: 0\n", 4, "greater than or equal to 1"),
        ("count: 2}", "count: 0}", 6, "greater than or equal to 1"),
        ("count: 2}", "count: yes}", 6, "a truth value"),
        ("count: 2}", "number: 2}", 6, "no such key"),
        ("name: old", "name: new", 7, "'new' is there already .line 3"),
        ("name: old", "name: new-1", 7, "'new-1' is there already .line 3"),
        ("name: old", "name: old/er", 7, "no name of a node"),
        ("130 GB/s", "130 GB", 11, "no unit that a bandwidth"),
        ("130 GB/s", "130", 11, "has no unit"),
        ("130 GB/s", "0 GB/s", 11, "is the unit right"),
        ("latency: 5 us", "latency: 5 h", 11, "is the unit right"),
        (", latency: 5 us", "", 11, "latency: is missing"),
        ("[new, old]", "[new, young]", 13, "no node or place 'young'; there are new, old"),
        ("[new, old]", "[old, old]", 13, "joins a node with itself"),
        ("[new, old]", "[new-0, new-0]", 13, "joins a node with itself"),
        ("[new, old]", "[new]", 13, "neither two places or nodes"),
        ("[new, old]", "everything", 13, "neither two places or nodes, .* nor one of all"),
        ("[new, old]", "all", 14, "given twice .first on line 13"),
        ("between: all", "between: [old, new-1]", 14, "old and new-1 is given twice .first on line 13"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_line(write: Write, old: str, new: str, line: int, told: str) -> None:
    assert old in LAB
    with pytest.raises(ClusterError, match=f"(?s){told}") as caught:
        load_cluster(write(LAB.replace(old, new, 1)))
    assert caught.value.line == line


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("- a", "a cluster is a mapping"),
        ("nodes: []", "is empty; give .* nodes"),
        ("name: x", "is empty; give .* nodes"),
        ("nodes: [{name: a, devices: []}]", "nodes.0: has no devices"),
        ("nodes: [", "not YAML"),
    ],
)
def test_a_file_without_machines(write: Write, text: str, told: str) -> None:
    with pytest.raises(ClusterError, match=told):
        load_cluster(write(text))


def test_one_fault_is_one_message(write: Write) -> None:
    """A wrong device does not make its list look empty."""
    with pytest.raises(ClusterError) as caught:
        load_cluster(write(LAB.replace("12 GB", "12 GX")))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_examples_survive_being_written_down(path: Path, write: Write) -> None:
    cluster = load_cluster(path)
    assert load_cluster(write(cluster_to_yaml(cluster))) == cluster
    assert cluster_from_json(cluster_to_json(cluster)) == cluster


def _write(text: str, folder: Path) -> Path:
    path = folder / "written.yaml"
    path.write_text(text, encoding="utf-8")
    return path


names = st.from_regex(r"[a-z][a-z0-9.-]{0,6}", fullmatch=True)
memories = st.integers(2**20, 2**50)
speeds = st.floats(1e3, 1e15)
latencies = st.floats(0, 60)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    nodes = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    devices = tuple(
        Device(id=f"{node}/cpu:{i}", kind="cpu", node=node, memory_bytes=draw(memories))
        for node in nodes
        for i in range(draw(st.integers(1, 3)))
    )
    pairs = [(a, a) for a in nodes] + [(a, b) for i, a in enumerate(nodes) for b in nodes[i + 1 :]]
    links = tuple(
        Link(between=pair, bandwidth_bytes_per_s=draw(speeds), latency_s=draw(latencies))
        for pair in pairs
        if draw(st.booleans())
    )
    hosts = {node: draw(memories) for node in nodes if draw(st.booleans())}
    return Cluster(name=draw(names), devices=devices, links=links, hosts=hosts)


@settings(deadline=None, max_examples=50)
@given(cluster=clusters())
def test_writing_down_loses_nothing(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> None:
    path = _write(cluster_to_yaml(cluster), tmp_path_factory.getbasetemp())
    assert load_cluster(path) == cluster
    assert cluster_from_json(cluster_to_json(cluster)) == cluster


def test_json_holds_a_cluster_that_no_file_describes(tmp_path: Path) -> None:
    odd = Cluster(name="odd", devices=(Device(id="a", kind="cpu", node="n", memory_bytes=2**30),))
    path = tmp_path / "cluster.json"
    path.write_text(cluster_to_json(odd))
    assert load_cluster(path) == odd
    assert load_fleet(path).devices == 1
    with pytest.raises(ClusterError, match=r"other\.json: cannot be read"):
        load_cluster(tmp_path / "other.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 7}', '{"version": 1, "name": "x", "devices": [1], "links": []}']
)
def test_json_that_is_no_cluster(text: str) -> None:
    with pytest.raises(ClusterError, match=r"c\.json: not a cluster"):
        cluster_from_json(text, path="c.json")
