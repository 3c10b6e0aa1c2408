"""Flags and YAML say one configuration; what cannot be right is refused with its name."""

import argparse
import json
import os
import signal
import time

import pytest

from mindspeed_autoparallel.errors import ConfigError, PlanError
from mindspeed_autoparallel.runtime.features.operator_plan.entry import prepare
from mindspeed_autoparallel.runtime.features.operator_search.entry import search_and_exit
from mindspeed_autoparallel.runtime.features.operator_search.flags import OperatorSearchFlags
from mindspeed_autoparallel.runtime.features.operator_search.request import read_settings, read_shape, read_work
from mindspeed_autoparallel.runtime.flags.flag import read_flags
from mindspeed_autoparallel.runtime.flags.registration import add_missing_flags

MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 128,
    "global_batch_size": 16,
    "micro_batch_size": 2,
}


def parsed(*words, **model):
    parser = argparse.ArgumentParser()
    add_missing_flags(parser)
    arguments = parser.parse_args([*words])
    for name, value in {**MODEL, **model}.items():
        setattr(arguments, name, value)
    return arguments


def settings(*words):
    return read_settings(read_flags(OperatorSearchFlags, parsed(*words)))


def test_flags_come_before_the_block(tmp_path):
    file = tmp_path / "auto.yaml"
    file.write_text(
        "parallel: {search_mode: recursive_programming, auto_pipeline: true}\nparallel_config: {mem_coeff: 3}\n"
    )
    found = settings("--operator-config", str(file), "--mem-coeff", "0.5", "--parallel-mode", "0")
    assert (found.auto_pipeline, found.mem_coeff, found.parallel_mode) == (True, 0.5, 0)
    assert settings("--operator-config", str(file), "--search-mode", "exact").search_mode == "exact"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--mem-coeff", "0"), "mem_coeff is 0.0; give a positive number"),
        (("--mem-coeff", "nan"), "mem_coeff is nan"),
        (("--mem-coeff", "0.5", "--search-mode", "exact"), "--mem-coeff is for recursive_programming"),
        (("--parallel-mode", "3"), "give 0, 1 or 2"),
        (("--search-mode", "magic"), "magic"),
        (("--operator-config", "nowhere.yaml"), "cannot read configuration nowhere.yaml"),
    ],
)
def test_impossible_settings_are_refused(words, told):
    with pytest.raises(ConfigError, match=told):
        settings(*words)


def test_unknown_key_of_the_block_is_refused_with_its_section(tmp_path):
    file = tmp_path / "auto.yaml"
    file.write_text("parallel_config: {mem_coef: 3}\n")
    with pytest.raises(ConfigError, match=r"parallel_config: unknown key mem_coef; known are .*mem_coeff"):
        settings("--operator-config", str(file))


def test_shape_follows_megatrons_defaults():
    assert read_shape(parsed()).ffn == 256 and not read_shape(parsed()).gated
    gated = read_shape(parsed(swiglu=True, group_query_attention=True, num_query_groups=2, kv_channels=32))
    assert (gated.ffn, gated.gated, gated.kv_heads, gated.head_size) == (128, True, 2, 32)
    experts = read_shape(parsed(num_experts=8, moe_router_topk=1, moe_ffn_hidden_size=96))
    assert (experts.num_experts, experts.topk, experts.ffn) == (8, 1, 96)


@pytest.mark.parametrize(
    ("given", "told"), [({"num_layers": None}, "needs --num-layers"), ({"mm_model": "m"}, "--mm-")]
)
def test_model_that_flags_do_not_describe_is_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        read_shape(parsed(**given))


def test_devices_are_the_given_number_then_the_simulated_cluster_then_the_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert read_work(parsed()).devices == 2
    simulated = ("--simulated-nnodes", "2", "--simulated-nproc-per-node", "8")
    assert read_work(parsed(*simulated)).devices == 16
    work = read_work(parsed(*simulated, "--operator-devices", "4", pipeline_model_parallel_size=2))
    assert (work.devices, work.pipeline.stages, work.pipeline.micro_batch_num) == (4, 2, 4)


def searched(tmp_path, *words, **model):
    with pytest.raises(SystemExit) as ended:
        search_and_exit(parsed("--operator-output-dir", str(tmp_path), *words, **model))
    assert ended.value.code == 0
    return tmp_path / "operator_plan.json"


def test_found_configuration_keeps_the_scripts_micro_batch_size_and_is_put_into_the_arguments(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    # The folder is made.
    plan = searched(tmp_path / "new" / "folder", "--operator-devices", "4", "--mem-coeff", "1e6")
    assert json.loads(plan.read_text())["megatron"]["micro_batch_size"] == 2
    monkeypatch.setenv("WORLD_SIZE", "4")
    arguments = parsed("--operator-plan", str(plan))
    prepare(arguments)
    assert (arguments.tensor_model_parallel_size, arguments.global_batch_size) == (4, 16)
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(PlanError, match=r"is for 4 devices .* but 8 processes"):
        prepare(arguments)
    with pytest.raises(PlanError, match="hidden 64 there and 128 here"):
        prepare(parsed("--operator-plan", str(plan), hidden_size=128))


def test_pins_that_contradict_each_other_are_both_named(tmp_path):
    with pytest.raises(ConfigError, match="contradict"):
        search_and_exit(
            parsed(
                "--operator-devices",
                "4",
                "--operator-pin",
                "layers.*.q:rows=4;layers.0.*:rows=2",
                "--operator-output-dir",
                str(tmp_path),
            )
        )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_search_ends_in_a_line_and_keeps_an_earlier_plan(number, code, tmp_path, monkeypatch, caplog):
    """Ctrl-C printed a traceback."""

    def search(*_, **__):
        os.kill(os.getpid(), number)
        time.sleep(10)

    monkeypatch.setattr("mindspeed_autoparallel.operators.configured.search_configured", search)
    (tmp_path / "operator_plan.json").write_text("earlier")
    with pytest.raises(SystemExit) as ended:
        search_and_exit(parsed("--operator-search", "--operator-output-dir", str(tmp_path)))
    assert ended.value.code == code
    assert [record.getMessage() for record in caplog.records] == [f"interrupted; an earlier plan in {tmp_path} stays"]
    assert (tmp_path / "operator_plan.json").read_text() == "earlier"
