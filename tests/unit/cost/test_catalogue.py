"""The device catalogue."""

import json
from pathlib import Path

import pytest

from mindspeed_autoparallel.cost import catalogue
from mindspeed_autoparallel.cost.catalogue import find_device, known_devices, read_device
from mindspeed_autoparallel.errors import ConfigError

_H100 = Path(catalogue.__file__).parent / "catalogue_data" / "h100.json"


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("A100", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("A100-SXM4-40GB", "A100-40GB"),
        ("a100-80gb", "A100-80GB"),
        ("H100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H200", "H200"),
        ("B200-SXM", "B200"),
        ("Ascend 910B", "Ascend-910B"),
        ("910C", "Ascend-910C"),
        ("Ascend-A3-die", "Ascend-910C-die"),
        ("cpu", "CPU"),
    ],
)
def test_usual_names_find_their_device(asked: str, found: str) -> None:
    assert find_device(asked).name == found


def test_two_dies_make_a_chip() -> None:
    die, chip = find_device("Ascend-910C-die"), find_device("Ascend-910C")
    for name in ("peak_tflops", "memory_gib", "memory_bandwidth_gb_per_s", "num_cores", "link_gb_per_s"):
        assert 2 * getattr(die, name) == getattr(chip, name)
    assert die.network_gbit_per_s == chip.network_gbit_per_s  # of a node


@pytest.mark.parametrize("name", ["TPU-v5", "H1000", "RTX A1000", "H20"])
def test_an_unknown_device_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown device '{name}'.*H100.*--device-file"):
        find_device(name)


def test_every_device_gives_the_source_of_its_figures() -> None:
    for device in known_devices():
        assert len(device.source) > 20
        assert all(efficiency.provenance for efficiency in device.efficiencies.values())


def test_a_file_of_ones_own_comes_first(tmp_path: Path) -> None:
    data = json.loads(_H100.read_text())
    data["name"] = "Mine"
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert find_device("mine", (read_device(path),)).name == "Mine"


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("schema_version", 99, "schema_version 1"),
        ("memory_gib", -1, "memory_gib is -1"),
        ("memory_gib", 0, "must be above 0"),
        ("workspace_mib", "much", "workspace_mib: expected float, got 'much'"),
        ("workspace_mib", 1e308, "workspace_mib is 1e.308"),
        ("peak_tflops", "fast", "peak_tflops: expected float, got 'fast'"),
        ("peak_tflops", float("nan"), "not a JSON number"),
        ("name", "", "name is ''"),
        ("aliases", "H100", "aliases: expected a list"),
        ("colour", "green", "unknown key 'colour'"),
        ("efficiencies", {}, "is empty"),
    ],
)
def test_a_broken_file_is_named_with_its_key(tmp_path: Path, key: str, value: object, word: str) -> None:
    data = json.loads(_H100.read_text())
    data[key] = value
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=word):
        read_device(path)


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("gemm_fraction", 1.2, "gemm_fraction is 1.2, must be above 0 and at most 1"),
        ("gemm_fraction", 0, "must be above 0"),
        ("expert_fraction", 1.5, "expert_fraction is 1.5, must be above 0 and at most 1"),
        ("tensor_exposed", -1, "tensor_exposed is -1"),
        ("launch_us", -5, "launch_us is -5"),
        ("launch_us", "short", "launch_us: expected float, got 'short'"),
        ("provenance", "", "must name the source"),
        ("overlap_norm", 0.5, "overlap_norm"),
        ("corrections", [[1, 2]], "rows of 5 numbers"),
        ("intervals", [0.1], "intervals: expected an object"),
        ("intervals", {"seen": "narrow"}, "intervals.seen: expected float, got 'narrow'"),
        ("measured_recompute", "full", "measured_recompute: expected a list"),
        ("colour", 1, "unknown key 'colour'"),
    ],
)
def test_a_broken_efficiency_is_named_with_its_stack_and_key(
    tmp_path: Path, key: str, value: object, word: str
) -> None:
    data = json.loads(_H100.read_text())
    data["efficiencies"]["megatron-core"][key] = value
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=rf"mine.json.efficiencies.megatron-core.*{word}"):
        read_device(path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    data = json.loads(_H100.read_text())
    del data["num_cores"], data["efficiencies"]["megatron-core"]["launch_us"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="key 'num_cores' is missing"):
        read_device(path)
    path.write_text(json.dumps({**data, "num_cores": 132}))
    with pytest.raises(ConfigError, match=r"megatron-core: key 'launch_us' is missing"):
        read_device(path)


def test_missing_keys_of_an_earlier_file_have_defaults(tmp_path: Path) -> None:
    data = json.loads(_H100.read_text())
    del data["workspace_mib"]
    for efficiency in data["efficiencies"].values():
        del efficiency["tensor_exposed"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    device = read_device(path)
    assert device.workspace_bytes == 0
    assert device.efficiency("megatron-core").tensor_exposed == 1.0
    assert 0 < device.efficiency("megatron-core").expert_fraction < 1


def test_every_device_is_found_by_its_name_and_no_two_have_a_name_in_common() -> None:
    names = [(name, device.name) for device in known_devices() for name in (device.name, *device.aliases)]
    assert [name for name, owner in names if find_device(name).name != owner] == []
    assert find_device("NVIDIA GB200").name == "GB200"
