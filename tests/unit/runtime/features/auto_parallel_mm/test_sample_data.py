"""``--auto-parallel-data``: read and checked before anything is measured, and searched by."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.data.distribution import DataSource, make_distribution
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import SearchRequest, read_request
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.search import search
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.write import write
from mindspeed_autoparallel.runtime.features.auto_tuning.argv import with_configuration
from mindspeed_autoparallel.runtime.features.sample_data import read_sample_data
from mindspeed_autoparallel.spec import Plan

COMMON = {
    "num_layers": 4,
    "num_attention_heads": 4,
    "nnodes": 1,
    "nproc_per_node": 2,
    "node_rank": 0,
    "master_addr": "localhost",
    "master_port": 6000,
    "simulated_nnodes": 1,
    "simulated_nproc_per_node": 2,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
    "use_distributed_optimizer": True,
    "pipeline_model_parallel_layout": None,
}


def write_distribution(folder: Path, lengths: list[int], kind: str = "lengths") -> Path:
    source = DataSource(
        kind=kind, files=("x",), sha256="abc", tokens_by="given", num_records=len(lengths), num_read=len(lengths)
    )
    make_distribution(source, [SampleSize(tokens=length) for length in lengths]).write(folder / "data.json")
    return folder / "data.json"


def request_of(folder: Path, **flags: Any) -> SearchRequest:
    values = {**COMMON, "auto_parallel_work_dir": str(folder / "work"), "auto_parallel_output_dir": str(folder)}
    return read_request(argparse.Namespace(**{**values, **flags}))


def test_missing_settings_follow_from_the_script(tmp_path: Path) -> None:
    file = str(write_distribution(tmp_path, [10, 100]))
    assert request_of(tmp_path).sample_data is None
    plain = request_of(tmp_path, auto_parallel_data=file).sample_data
    assert plain is not None
    assert (plain.options.padding, plain.options.oom_steps, plain.options.is_balanced) == ("sequence", 10_000, False)
    other = {"variable_seq_lengths": True, "train_iters": 77, "data_balance": True}
    found = request_of(tmp_path, auto_parallel_data=file, **other).sample_data
    assert found is not None
    assert (found.options.padding, found.options.oom_steps, found.options.is_balanced) == ("longest", 77, True)
    packed = request_of(tmp_path, auto_parallel_data=file, pack_length=150, **other).sample_data
    assert packed is not None
    assert (packed.options.padding, packed.options.pack_length) == ("none", 150)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"auto_parallel_data": "missing.json"}, "missing.json"),
        ({"auto_parallel_data_padding": "none"}, "--auto-parallel-data-padding needs --auto-parallel-data"),
        (
            {"auto_parallel_data": "DATA", "auto_parallel_data_max_oom_probability": 0.0},
            "must be above 0 and at most 1",
        ),
        ({"auto_parallel_data": "DATA", "mm_data": "SET"}, "has other records"),
    ],
)
def test_bad_input_is_named_before_anything_is_measured(tmp_path: Path, flags: dict[str, Any], words: str) -> None:
    (tmp_path / "records.json").write_text('[{"messages": []}]')
    parameters = {"basic_parameters": {"dataset": str(tmp_path / "records.json")}}
    (tmp_path / "set.json").write_text(json.dumps({"dataset_param": parameters}))
    names = {"DATA": str(write_distribution(tmp_path, [10], "records")), "SET": str(tmp_path / "set.json")}
    given = {name: names.get(value, value) for name, value in flags.items()}
    with pytest.raises(ConfigError, match=words):
        read_sample_data(argparse.Namespace(**given))


def test_the_plan_is_the_one_for_the_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_distribution(tmp_path, [16] * 30 + [128])
    request = request_of(tmp_path, auto_parallel_data=str(file), auto_parallel_data_padding="longest")
    write(request, search(request, small_profile(), argparse.Namespace()), small_profile())
    plan = Plan.read(tmp_path / "plan.json")
    assert plan.data is not None and plan.data.sha256 == "abc" and plan.data.p95_us > plan.data.by_means_us
    printed = capsys.readouterr().out
    assert "the spread costs" in printed and "chance to run out of memory" in printed
    assert "The spread costs" in (tmp_path / "auto_parallel_report.html").read_text()


def test_the_recommended_command_trains_without_the_flags_of_the_search() -> None:
    words = ["x.py", "--auto-parallel-data", "d.json", "--auto-parallel-data-oom-steps", "5", "--lr", "1"]
    assert with_configuration(words, []) == ["x.py", "--lr", "1"]
