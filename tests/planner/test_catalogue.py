import re

import pytest
import yaml

from lightning_3d.errors import PlannerError
from lightning_3d.module.amounts import parse_count, parse_duration, show_bytes, show_count, show_dollars, show_seconds
from lightning_3d.tools.planner.catalogue import Catalogue, apply_overrides
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.plain_yaml import conf_folder


@pytest.fixture(autouse=True)
def no_user_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def test_every_entry_says_where_and_when_its_own_numbers_were_published():
    entries = {}
    for path in (conf_folder() / "hardware").glob("*.yaml"):
        entries |= yaml.safe_load(path.read_text())
    dated = {name for name, entry in entries.items() if re.search(r", (read )?20\d\d", entry.get("source", ""))}
    assert dated == entries.keys()


NAMED = (
    "gb200 gb300 b300 h20 h800 h100-pcie mi325x mi355x tpu-v7 trainium1 trainium2 trainium3 a100-40g a100-40g-p4d a100-80g"
    " a100-80g-p4de a10 a10g l40 l40s"
)
"""Accelerators of late 2026, and those that are easily taken for each other."""


def test_accelerators_that_are_easily_confused_differ():
    catalogue = Catalogue.load()
    assert set(NAMED.split()) <= set(catalogue.names)
    for one, other in (("a10", "a10g"), ("l40", "l40s"), ("h100", "h100-pcie"), ("h100", "h20")):
        assert catalogue.find(one).peak("bf16-mixed") != catalogue.find(other).peak("bf16-mixed")
    assert catalogue.find("a100-40g").cluster_link_gb_per_s == 4 * catalogue.find("a100-40g-p4d").cluster_link_gb_per_s
    assert {catalogue.find(name).link_domain for name in ("tpu-v4", "tpu-v5p", "tpu-v7")} == {4096, 8960, 9216}


def test_every_entry_is_complete_and_prices_say_when_and_where():
    catalogue = Catalogue.load()
    wanted = {"v100-16g", "v100-32g", "p100", "k80", "a100-40g", "a100-80g", "h100", "h200", "b200", "rtx-4090", "cpu"}
    assert wanted | {"tpu-v2", "tpu-v3", "tpu-v4"} <= set(catalogue.names)
    for name in catalogue.names:
        device = catalogue.find(name)
        assert device.memory_gb > 0
        assert device.peak("bf16-mixed") > 0
        assert device.peak("32") > 0
        assert device.title
        if device.price is not None:
            assert "list price" in device.price.source
            assert len(device.price.date) == 7
        assert device.runs_here == (not name.startswith(("tpu", "trainium")))


def test_a_later_file_extends_and_replaces(tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("lab:\n  like: a100-40g\n  memory_gb: 41\nh100:\n  like: a100-80g\n")
    catalogue = Catalogue.load(own)
    assert catalogue.find("lab").memory_gb == 41
    assert catalogue.find("lab").memory_gb_per_s == catalogue.find("a100-40g").memory_gb_per_s
    assert catalogue.find("h100").memory_gb_per_s == 2039


def test_the_users_folder_is_read(tmp_path):
    folder = tmp_path / "config" / "lightning-3d" / "hardware"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("mine: {like: cpu, memory_gb: 7}\n")
    assert Catalogue.load().find("mine").memory_gb == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x: {memory_gb: 1}", "lacks cluster_link_gb_per_s"),
        ("x: {like: h100, memroy_gb: 1}", "did you mean memory_gb"),
        ("x: {like: y}", "does not exist"),
        ("x: {like: y}\ny: {like: x}", "is like it in turn"),
        ("- 1", "must map"),
        ("x: [", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(PlannerError, match=message):
        Catalogue.load(path).find("x")


def test_clusters():
    catalogue = Catalogue.load()
    shapes = {
        "128x8xh100": (128, 8),
        "8xa100-80g": (1, 8),
        "h100": (1, 1),
        "1024xh100": (128, 8),
        "12xa100": (2, 6),
        "7xh100": (1, 7),
        "9xh100": (9, 1),
        "4x2x3090": (4, 2),
        "8xtpu-v4": (2, 4),
    }
    for text, (nodes, devices) in shapes.items():
        cluster = catalogue.cluster(text)
        assert (cluster.nodes, cluster.devices_per_node) == (nodes, devices), text
    assert Cluster.of(catalogue.find("h100"), 10000).devices == 10000


@pytest.mark.parametrize("text", ["0x8xh100", "8x0xh100", "0xh100", "8x", "x8xh100", "-1xh100", ""])
def test_a_cluster_that_is_none_is_refused(text):
    with pytest.raises(PlannerError):
        Catalogue.load().cluster(text)


def test_every_number_can_be_overridden():
    device = Catalogue.load().find("h100")
    changed = apply_overrides(device, ["memory_gb=96", "peak_tflops.bf16=800", "price=2.5", "devices_per_node=4"])
    assert (changed.memory_gb, changed.peak("bf16-mixed"), changed.devices_per_node) == (96, 800e12, 4)
    assert changed.price is not None
    assert changed.price.dollars_per_hour == 2.5
    for wrong in ("memory_gb=-1", "memory_gb=x", "memory=1", "memory_gb", "title=2", "runs_here=0"):
        with pytest.raises(PlannerError):
            apply_overrides(device, [wrong])


def test_amounts_are_read_and_written():
    assert [parse_count(text, "x") for text in ("300B", "1.4t", "2e9", "20,000", "5k")] == [3e11, 1.4e12, 2e9, 2e4, 5e3]
    assert [parse_duration(text) for text in ("30 days", "12h", "2 weeks", "90 s")] == [2592000, 43200, 1209600, 90]
    for wrong in ("", "-3", "0", "x", "3Q", "nan", "1e999"):
        with pytest.raises(PlannerError):
            parse_count(wrong, "tokens")
    for wrong in ("30", "-3 days", "0h", "days"):
        with pytest.raises(PlannerError):
            parse_duration(wrong)
    assert [show_bytes(amount) for amount in (0, 999, 12.34e9, 2.8e12)] == ["0 B", "999 B", "12.3 GB", "2.8 TB"]
    assert [show_seconds(amount) for amount in (0.0123, 3.7, 34 * 86400, 288 * 365.25 * 86400)] == [
        "12.3 ms",
        "3.70 s",
        "34.0 days",
        "288 years",
    ]
    assert (show_count(1.65e9), show_dollars(2400), show_dollars(1.5)) == ("1.65B", "$2,400", "$1.50")


def test_the_conf_folder_is_found():
    assert (conf_folder() / "hardware").is_dir()
