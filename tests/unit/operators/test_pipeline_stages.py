"""Stages are chosen by memory, suggested if they are not requested, and never above the microbatches."""

import dataclasses
import json
import logging

import pytest

from mindspeed_autoparallel.cli.main import main
from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.operators.config import OperatorConfig, read_config
from mindspeed_autoparallel.operators.pipeline import Pipeline, data_parallel, search_pipelined, stage_bytes
from mindspeed_autoparallel.operators.presets import preset_graph
from mindspeed_autoparallel.operators.search.pins import pinned_choices

GRAPH = preset_graph("llama2-7b", batch=64, sequence=512, num_layers=4)


@pytest.mark.parametrize(("microbatches", "servers", "stages"), [(8, 4, 4), (2, 4, 2), (1, 4, 1), (8, 1, 1), (8, 3, 2)])
def test_stages_never_exceed_microbatches_or_servers(microbatches, servers, stages):
    given = Pipeline(servers=servers, micro_batch_num=microbatches, device_memory_bytes=2**50)
    plan = search_pipelined(GRAPH, 16, auto_pipeline=True, pipeline=given)
    assert plan.stages == stages
    assert 2 ** len(plan.decisions.mesh) * stages == 16


def test_stages_never_exceed_layers():
    given = Pipeline(servers=8, micro_batch_num=8, device_memory_bytes=2**50)
    assert search_pipelined(GRAPH, 16, auto_pipeline=True, pipeline=given).stages == 4


def test_the_largest_number_of_stages_whose_plan_fits_is_kept():
    """Each number is searched; weights are cut into more parts before stages are given up."""
    needs = {}
    for stages in (1, 2, 4):
        given = Pipeline(stages, 4, 8, 2**50)
        needs[stages], _ = stage_bytes(search_pipelined(GRAPH, 16, pipeline=given).decisions, given, stages)
    for limit in (max(needs.values()), 1.001 * min(needs.values())):
        given = Pipeline(1, 4, 8, int(limit))
        plan = search_pipelined(GRAPH, 16, auto_pipeline=True, pipeline=given)
        assert stage_bytes(plan.decisions, given, plan.stages)[0] <= limit
        assert plan.stages >= max(stages for stages, needed in needs.items() if needed <= limit)


def test_no_fitting_number_of_stages_is_infeasible_with_the_nearest_one():
    with pytest.raises(InfeasiblePlan, match=r"GiB per device with \d+ pipeline stages"):
        search_pipelined(GRAPH, 16, auto_pipeline=True, pipeline=Pipeline(1, 4, 8, 10))


def test_without_the_flag_the_users_stages_hold_and_the_choice_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        plan = search_pipelined(GRAPH, 16, pipeline=Pipeline(2, 4, 8))
    assert plan.stages == 2 and "suggests 4 pipeline stages; configured: 2" in plan.notes[-1]
    assert plan.notes[-1] in caplog.messages


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (Pipeline(4, 1, 2), "at least as many"),
        (Pipeline(3, 1, 8), "do not divide"),
        (Pipeline(0), "stages=0"),
        (Pipeline(8, 1, 8), "8 stages are more than the 4 layers"),
    ],
)
def test_impossible_stages_are_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        search_pipelined(GRAPH, 16, pipeline=given)


def test_parallel_mode_zero_is_data_parallel_everywhere(tmp_path, capfd):
    file = tmp_path / "auto.yaml"
    file.write_text("parallel: {parallel_mode: 0}\n")
    assert main(["operators", "--layers", "1", "--config", str(file), "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert (plan["data_parallel"], plan["model_parallel"], plan["forward_bytes"]) == (8, 1, 0)
    assert plan["backward_bytes"] > 0
    with pytest.raises(ConfigError, match="which 128 devices do not divide"):
        data_parallel(preset_graph("llama2-7b", batch=2, sequence=32, num_layers=1), 128)


def test_parallel_mode_one_needs_a_pin_and_spreads_it(tmp_path, capfd):
    file = tmp_path / "auto.yaml"
    file.write_text("parallel: {parallel_mode: 1}\n")
    assert main(["operators", "--layers", "1", "--config", str(file)]) == 2
    assert "--pin" in capfd.readouterr().err
    command = ["operators", "--layers", "1", "--config", str(file), "--json", "--pin", "layers.0.q:columns=8"]
    assert main(command) == 0
    assert json.loads(capfd.readouterr().out)["search_mode"] == "sharding_propagation"


def test_auto_pipeline_of_the_yaml_block_acts(tmp_path, capfd):
    file = tmp_path / "auto.yaml"
    file.write_text("parallel: {auto_pipeline: true}\n")
    command = [
        "operators",
        "--layers",
        "2",
        "--config",
        str(file),
        "--json",
        "--servers",
        "2",
        "--micro-batch-num",
        "4",
    ]
    assert main(command) == 0
    assert json.loads(capfd.readouterr().out)["pipeline_stages"] == 2


def test_pins_by_cut_tuples_say_the_same_as_pins_by_axis():
    by_tuple = pinned_choices(GRAPH, {"layers.0.q": ((2, 1), (1, 4))}, (2, 2, 2))
    assert by_tuple == pinned_choices(GRAPH, {"layers.0.q": {"rows": 2, "columns": 4}}, (2, 2, 2))


@pytest.mark.parametrize(
    ("cuts", "words"), [(((1, 2), (4, 1)), "contradicts itself"), (((2,), (1, 1)), "does not fit")]
)
def test_cut_tuples_that_cannot_be_are_refused(cuts, words):
    with pytest.raises(ConfigError, match=words):
        pinned_choices(GRAPH, {"layers.0.q": cuts}, (2, 2))


def test_devices_beyond_what_dims_allow_are_named_as_idle():
    small = preset_graph("llama2-7b", batch=1, sequence=1, num_layers=1)
    plan = search_pipelined(small, 2**20, mem_coeff=0.1)
    assert any("no operator is cut there" in note for note in plan.notes)


MINDFORMERS = """
trainer: {type: CausalLanguageModelingTrainer, model_name: llama2_70b}
runner_config: {epochs: 3, batch_size: 1, sink_mode: true}
train_dataset: &train_dataset {input_columns: [input_ids], drop_remainder: true}
train_dataset_task: {type: CausalLanguageModelDataset, dataset_config: *train_dataset}
use_parallel: true
parallel:
  {parallel_mode: 2, gradients_mean: false, full_batch: true, search_mode: recursive_programming, auto_pipeline: true,
   enable_parallel_optimizer: true, strategy_ckpt_save_file: ./ckpt_strategy.ckpt}
parallel_config:
  {mem_coeff: 0.1, data_parallel: 2, model_parallel: 4, pipeline_stage: 8, micro_batch_num: 128, vocab_emb_dp: true}
micro_batch_interleave_num: 1
context: {mode: 0, device_target: Ascend, max_device_memory: 64GB}
"""


@pytest.mark.parametrize("words", [["--batch", "128", "--micro-batch-num", "128", "--auto-pipeline"], None])
def test_the_seeds_70b_on_64_devices_of_8_servers_gets_8_stages(words, tmp_path, capfd):
    """Microbatches in flight count, not the whole batch; by flags, and by the batch, stages and memory of a file."""
    file = tmp_path / "pretrain.yaml"
    file.write_text(MINDFORMERS)
    common = ["operators", "--model", "llama2-70b", "--devices", "64", "--servers", "8", "--json"]
    assert main([*common, *(words or ["--config", str(file)])]) == 0
    captured = capfd.readouterr()
    plan = json.loads(captured.out)
    assert plan["pipeline_stages"] == 8 and plan["shortages"] == {}
    if words is None:
        assert "parallel.enable_parallel_optimizer" in captured.err and "vocab_emb_dp" in captured.err


@pytest.mark.parametrize(("microbatches", "stages"), [(64, 8), (32, 4), (8, 1)])
def test_the_seeds_70b_with_fewer_microbatches_gets_the_most_stages_that_fit(microbatches, stages, capfd):
    words = ["operators", "--model", "llama2-70b", "--devices", "64", "--servers", "8", "--batch", "128", "--json"]
    main([*words, "--micro-batch-num", str(microbatches), "--auto-pipeline"])
    plan = json.loads(capfd.readouterr().out)
    assert plan["pipeline_stages"] == stages and "plan" not in plan["shortages"]


def test_the_seeds_70b_by_symbolic_costs_names_what_does_not_fit(capfd):
    words = ["operators", "--model", "llama2-70b", "--devices", "64", "--servers", "8", "--batch", "128"]
    assert main([*words, "--micro-batch-num", "64", "--auto-pipeline", "--mem-coeff", "0.1"]) == 3
    said = capfd.readouterr().err
    assert "with 8 pipeline stages (" in said and "are outputs of 8 of 64 microbatches" in said


def test_samples_of_a_file_follow_the_batch_table():
    batch = OperatorConfig(batch_size=2, micro_batch_num=4, pipeline_stage=2, full_batch=True, data_parallel=3)
    assert batch.samples(64) == 8
    assert dataclasses.replace(batch, parallel_mode=1).samples(64) == 24
    assert dataclasses.replace(batch, full_batch=False).samples(64) == 512
    assert dataclasses.replace(batch, pipeline_stage=1, gradient_accumulation_steps=5).samples(64) == 10
    assert OperatorConfig().samples(64) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("context: {max_device_memory: lots}", "give it as 58GB"),
        ("trainer: {}\nparallel_config: {micro_batch_num: 0}", "micro_batch_num is 0; give 1 or more"),
        ("trainer: {}\nparallel: {full_batch: 3}", "full_batch is 3; give a bool"),
        ("parallel_config: {vocab_emb_dp: true}", "unknown key vocab_emb_dp"),
    ],
)
def test_a_wrong_value_of_a_file_is_refused_in_a_line(text, words, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_config(tmp_path / "a.yaml")
