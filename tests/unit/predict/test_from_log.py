"""Training logs calibrate a device's figures; unusable ones are reported, and nothing is stored from them."""

import dataclasses
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.cost.analytic.step_time import closed_form_us
from mindspeed_autoparallel.cost.catalogue import find_device, read_device, write_device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.fitting import with_values
from mindspeed_autoparallel.predict.megatron_arguments import request_of_arguments
from mindspeed_autoparallel.predict.observations import observation_of
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.training_log import TrainingLog, read_log

_ARGUMENTS: dict[str, Any] = {
    "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "group_query_attention": True,
    "num_query_groups": 8, "kv_channels": 128, "ffn_hidden_size": 14336, "seq_length": 4096, "swiglu": True,
    "padded_vocab_size": 128256, "untie_embeddings_and_output_weights": True, "num_experts": None, "bf16": True,
    "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "cp_comm_type": "['p2p']", "sequence_parallel": True, "use_distributed_optimizer": True, "world_size": 8,
    "global_batch_size": 64, "micro_batch_size": 1, "optimizer": "adam", "num_distributed_optimizer_instances": 1,
    "recompute_granularity": None, "fp8": None, "multi_latent_attention": False, "cuda_graph_impl": "none",
}  # fmt: skip


def _block(arguments: Mapping[str, Any]) -> str:
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(arguments.items())]
    return "\n".join(
        [
            "------------------------ arguments ------------------------",
            *lines,
            "-------------------- end of arguments ---------------------",
        ]
    )


def _step(number: int, milliseconds: float, batch: int = 64) -> str:
    return (
        f" [2025-01-01 00:00:00.1] iteration {number:8d}/     100 | consumed samples: {number * batch:12d} | elapsed "
        f"time per iteration (ms): {milliseconds:.1f} | learning rate: 1E-4 | global batch size: {batch:5d} |"
    )


def _text(milliseconds: float, number: int = 8, **changes: Any) -> str:
    steps = [_step(index, milliseconds * (5 if index == 1 else 1)) for index in range(1, number + 1)]
    return "\n".join(["chatter of a launcher", _block({**_ARGUMENTS, **changes}), *steps])


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_log_gives_the_median_step_of_the_run_that_its_arguments_describe(tmp_path: Path) -> None:
    memory = "[Rank 4] (after 1 iterations) memory (MB) | allocated: 1.00 | max allocated: 20480.00 | reserved: 2.0 |"
    log = read_log(_written(tmp_path / "a.log", _text(3500.0) + "\n" + memory))
    assert log.step_ms == 3500
    assert log.peak_gib == {4: 20.0}
    request = observation_of(log, find_device("H100"), 8, None).request
    assert request["model"]["heads"] == 32
    assert request["parallel"]["tp"] == 2
    assert request["train"]["gbs"] == 64


def test_packed_logs_of_several_ranks_with_restarts_and_a_crash_are_used_as_far_as_they_go(tmp_path: Path) -> None:
    doubled = "\n".join(line for line in _text(900.0).splitlines() for _ in range(1 + ("iteration " in line)))
    text = "\n".join([_text(4000.0, number=4), doubled, "Traceback (most recent call last):", "RuntimeError: lost"])
    path = tmp_path / "b.log.gz"
    path.write_bytes(gzip.compress(text.encode()))
    log = read_log(path)
    assert log.step_ms == 900
    assert log.num_steps == 6
    said = " ".join(log.remarks)
    assert "2 starts" in said
    assert "ended with an error" in said
    assert "several ranks" in said


def test_steps_that_ramp_up_or_stall_do_not_count(tmp_path: Path) -> None:
    steps = [
        _step(1, 900, 16),
        _step(2, 300, 16),
        _step(3, 310, 16),
        *(_step(n, 1000) for n in range(4, 12)),
        _step(12, 9e4),
    ]
    log = read_log(_written(tmp_path / "c.log", "\n".join([_block(_ARGUMENTS), *steps])))
    assert log.global_batch == 64
    assert log.step_ms == 1000
    assert any("another global batch" in remark for remark in log.remarks)
    assert any("above 2 times" in remark for remark in log.remarks)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epoch 1 loss 3.2\nepoch 2 loss 3.1", "is not a log of Megatron"),
        ("\n".join(_step(n, 5.0) for n in range(1, 9)), "has steps but no arguments"),
        (_text(10.0, number=3), "has 3 steps"),
        (_text(10.0, world_size=None), "no world_size"),
        (_text(10.0, use_megatron_fsdp=True), "fully sharded"),
        (_text(10.0, num_distributed_optimizer_instances=2), "several instances"),
        ("", "is not a log of Megatron"),
    ],
)
def test_unusable_logs_store_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    path, output = _written(tmp_path / "x.log", text), tmp_path / "device.json"
    assert main(["calibrate", "--from-log", str(path), "--device", "H100", "--output", str(output)]) != 0
    assert said in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # A node's tokens per second taken for a device's: eight times as fast as the run was.
        (_text(2400.0 / 8), "shorter than the"),
        (_text(2.4), "shorter than the"),
        (_text(240_000.0), "more than 10 times"),
        (_text(2400.0, tensor_model_parallel_size=8, pipeline_model_parallel_size=32, world_size=64), "256"),
        (
            "\n".join([_block(_ARGUMENTS), *(_step(n, 1500.0 + 900 * (n > 10)) for n in range(1, 21))]),
            "8 steps take about 1500 ms and 10 about 2400 ms: two runs",
        ),
        (
            "\n".join([_block(_ARGUMENTS), *(_step(n, time) for n in range(1, 9) for time in (1500.0, 2500.0))]),
            "6 steps were written twice with different times, as 1500 and 2500 ms",
        ),
    ],
)
def test_logs_that_contradict_themselves_or_the_device_are_named_and_not_learnt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    path, output = _written(tmp_path / "x.log", text), tmp_path / "device.json"
    assert main(["calibrate", "--from-log", str(path), "--device", "H100", "--output", str(output)]) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


def _calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str], *logs: str) -> dict[str, Any]:
    paths = [str(_written(tmp_path / f"{index}.log", text)) for index, text in enumerate(logs)]
    assert main(["calibrate", "--from-log", *paths, "--device", "H100", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_one_log_within_the_catalogues_interval_changes_nothing_and_half_is_kept_of_one_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = predict_one(observation_of(_log(tmp_path, 3500.0), find_device("H100"), 8, None).request)["step_time_ms"]
    inside = _calibrated(tmp_path, capsys, _text(1.05 * usual))
    assert inside["kept_share"] == 0
    assert inside["observations"][0]["error_after"] == inside["observations"][0]["error_before"]
    assert inside["kept"].startswith("nothing: the only log is within")
    outside = _calibrated(tmp_path, capsys, _text(3 * usual))
    assert outside["kept_share"] == 0.5
    before, after = (abs(outside["observations"][0][name]) for name in ("error_before", "error_after"))
    assert 0.1 * before < after < 0.9 * before


def _log(tmp_path: Path, milliseconds: float) -> TrainingLog:
    return read_log(_written(tmp_path / "any.log", _text(milliseconds)))


def test_logs_that_do_not_agree_teach_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = predict_one(observation_of(_log(tmp_path, 3500.0), find_device("H100"), 8, None).request)["step_time_ms"]
    found = _calibrated(tmp_path, capsys, _text(1.3 * usual), _text(usual, number=9), _text(usual / 1.3, number=10))
    assert found["kept_share"] == 0
    assert "of 3 logs are predicted worse" in found["kept"]
    assert found["figures"] == {}


@pytest.mark.parametrize(
    ("before", "changes"),
    [
        ({}, {"grad_reduce_in_bf16": True}),
        ({}, {"use_precision_aware_optimizer": True, "exp_avg_dtype": "torch.bfloat16"}),
        ({}, {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "fp8"}),
        ({}, {"use_precision_aware_optimizer": True, "main_params_dtype": "fp16"}),
        ({}, {"optimizer_cpu_offload": True}),
        ({"optimizer_cpu_offload": True}, {"optimizer_offload_fraction": 0.5}),
        ({}, {"fp8": "e4m3", "fp8_recipe": "blockwise"}),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, {"fp8_recipe": "delayed"}),
        ({"fp8": "hybrid"}, {"fp8_param_gather": True}),
        ({"fp8": "hybrid"}, {"grad_reduce_in_bf16": True}),
    ],
)
def test_switches_of_a_log_move_its_prediction(before: dict[str, Any], changes: dict[str, Any]) -> None:
    hardware = {"gpu": "H100", "num_gpus": 8}
    plain, changed = (
        predict_one(request_of_arguments({**_ARGUMENTS, **values}, hardware)) for values in (before, before | changes)
    )
    assert (plain["step_time_ms"], plain["peak_memory_gib"]) != (changed["step_time_ms"], changed["peak_memory_gib"])


def test_four_bit_recipes_of_a_log_are_read() -> None:
    request = request_of_arguments({**_ARGUMENTS, "fp4": "e2m1"}, {"gpu": "GB200", "num_gpus": 8})
    assert request["train"]["precision"] == "nvfp4"


def test_a_broken_gzip_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.gz"
    path.write_bytes(b"\x1f\x8b nothing")
    with pytest.raises(ConfigError, match="broken gzip"):
        read_log(path)


_LAYOUTS: list[dict[str, int]] = [
    {"tensor_model_parallel_size": t, "pipeline_model_parallel_size": p, "micro_batch_size": m}
    for t, p, m in ((8, 1, 1), (2, 1, 1), (2, 4, 2), (4, 2, 1), (8, 1, 4), (4, 1, 2))
]


def test_three_logs_of_a_slower_machine_predict_its_other_layouts(tmp_path: Path) -> None:
    catalogue = find_device("H100")
    stack = "megatron-core"
    other = {"gemm_fraction": 0.5, "memory_fraction": 0.4, "launch_us": 500.0, "link_fraction": 0.4}
    machine = with_values(catalogue, stack, other)
    logs, works = [], []
    for index, layout in enumerate(_LAYOUTS):
        path = tmp_path / f"{index}.log"
        path.write_text(_text(4000.0, **layout))
        work = observation_of(read_log(path), find_device("H100"), 8, None).work
        works.append(work)
        path.write_text(_text(closed_form_us(work, machine) / 1e3, **layout))
        logs.append(str(path))
    output = tmp_path / "mine.json"
    assert main(["calibrate", "--from-log", *logs[:3], "--device", "H100", "--output", str(output)]) == 0
    mine = read_device(output)

    def error(device: Any) -> float:
        pairs = [(closed_form_us(work, device) / 1e3, closed_form_us(work, machine) / 1e3) for work in works[3:]]
        return sum(abs(predicted / true - 1) for predicted, true in pairs) / len(pairs)

    assert error(catalogue) > 0.15
    assert error(mine) < 0.03
    learnt = mine.efficiency(stack)
    assert "calibrated on" in learnt.provenance
    assert "0.log (sha256" in learnt.provenance
    assert 0 < learnt.uncertainty["gemm_fraction"] < 0.2


def test_a_log_counts_once_and_later_logs_add_to_earlier_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (
        _written(tmp_path / "1.log", _text(3500.0)),
        _written(tmp_path / "2.log", _text(3400.0, micro_batch_size=2)),
    )
    output = tmp_path / "mine.json"
    for path in (first, first, second):
        command = ["calibrate", "--from-log", str(path), "--device", "H100", "--output", str(output), "--json"]
        assert main(command) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["observations"]) == 2
    assert main(["calibrate", "--from-log", str(first), "--device-file", str(output)]) == 2
    assert "was itself calibrated from logs" in capsys.readouterr().err
    assert dataclasses.asdict(read_device(output))["name"] == "H100"


def test_a_device_file_of_ones_own_or_of_another_device_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _written(tmp_path / "a.log", _text(1000.0))
    own = tmp_path / "own.json"
    write_device(own, find_device("H100"), [])
    before = own.read_bytes()
    command = ["calibrate", "--from-log", str(log), "--output", str(own)]
    assert main([*command, "--device", "H100"]) == 2
    assert "not a calibrated file" in capsys.readouterr().err
    assert main([*command, "--device", "A100-80GB"]) == 2
    assert "is for H100" in capsys.readouterr().err
    assert own.read_bytes() == before
