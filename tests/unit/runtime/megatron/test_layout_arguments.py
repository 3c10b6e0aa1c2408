"""A plan as Megatron's own flags and keys of model.json."""

import argparse
import sys
import types
from types import SimpleNamespace

import pytest
from made_plans import make_plan

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.runtime.megatron.layout_arguments import (
    kind_everywhere,
    model_keys,
    native_flags,
    pipeline_layout,
    stage_arguments,
)


def test_a_plan_for_mindspeeds_late_layout_strings_has_its_list_instead(monkeypatch):
    """MindSpeed installs layout strings on import, by the command line: one that a plan set was not read."""
    late = types.SimpleNamespace(PipelineModelParallelLayoutFeature=object)
    arguments = argparse.Namespace(pipeline_model_parallel_layout=None, num_layer_list=None, noop_layers=None)
    plan = make_plan({"text_decoder": [1, 2]})
    assert "pipeline_model_parallel_layout" in stage_arguments(plan, arguments)
    monkeypatch.setitem(sys.modules, "mindspeed.features_manager", late)
    assert stage_arguments(plan, arguments) == {"num_layer_list": "1,2"}


def test_a_language_model_gets_megatrons_own_layout_string():
    plan = make_plan({"text_decoder": [5, 11, 9]})
    assert pipeline_layout(plan) == "Et*5|t*11|t*9L"
    arguments = SimpleNamespace(pipeline_model_parallel_layout=None)
    words = native_flags(plan, stage_arguments(plan, arguments))
    assert words[words.index("--pipeline-model-parallel-layout") + 1] == "Et*5|t*11|t*9L"
    assert words[words.index("--pipeline-model-parallel-size") + 1] == "3"


def test_layers_of_multi_token_prediction_stand_before_the_loss():
    plan = make_plan({"text_decoder": [5, 11, 9]})
    arguments = SimpleNamespace(pipeline_model_parallel_layout=None, mtp_num_layers=2)
    assert stage_arguments(plan, arguments)["pipeline_model_parallel_layout"] == "Et*5|t*11|t*9mmL"


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([4, 4, 4], {}),
        ([5, 4, 2], {"decoder_first_pipeline_num_layers": 5, "decoder_last_pipeline_num_layers": 2}),
        ([3, 2], {"decoder_first_pipeline_num_layers": 3}),
    ],
)
def test_a_release_without_layout_strings_gets_first_and_last_stage(layers, said):
    plan = make_plan({"text_decoder": layers})
    assert stage_arguments(plan, SimpleNamespace()) == said
    words = native_flags(plan, said)
    assert ("--decoder-first-pipeline-num-layers" in words) is bool(said)


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([2, 2, 2, 2], {"num_layers_per_virtual_pipeline_stage": 2}),
        ([1, 2, 2, 2], {"num_layers_per_virtual_pipeline_stage": 2, "account_for_embedding_in_pipeline_split": True}),
        ([2, 2, 2, 1], {"num_layers_per_virtual_pipeline_stage": 2, "account_for_loss_in_pipeline_split": True}),
        ([3, 1, 3, 1], {"num_virtual_stages_per_pipeline_rank": 2, "decoder_first_pipeline_num_layers": 6}),
    ],
)
def test_a_release_without_layout_strings_gets_chunks(layers, said):
    plan = make_plan({"text_decoder": layers}, virtual_size=2, schedule="interleaved")
    assert stage_arguments(plan, SimpleNamespace()) == said
    for other in ([2, 1, 2, 2], [1, 3, 3, 3]):
        with pytest.raises(PlanError, match="no --pipeline-model-parallel-layout"):
            stage_arguments(
                make_plan({"text_decoder": other}, virtual_size=2, schedule="interleaved"), SimpleNamespace()
            )


@pytest.mark.parametrize("layers", [[3, 1], [1, 3], [2, 1, 3], [1, 2, 2, 3], [2, 2]])
def test_a_release_without_layout_strings_reads_the_split_back(layers):
    """0.12 divided by its zero stages between two that were both given."""
    said = stage_arguments(make_plan({"text_decoder": layers}), SimpleNamespace())
    first, last = said.get("decoder_first_pipeline_num_layers"), said.get("decoder_last_pipeline_num_layers")
    # Megatron 0.12's TransformerConfig: what is not given is shared out evenly, and there must be a stage to get it.
    given = [count for count in (first, last) if count is not None]
    between = len(layers) - len(given)
    share, rest = divmod(sum(layers) - sum(given), between)
    assert rest == 0
    read = [share] * between
    assert [first, *read][first is None :] + [last][last is None :] == layers


def test_mindspeed_llm_gets_a_list_of_any_split():
    host = SimpleNamespace(num_layer_list=None, noop_layers=None)
    plan = make_plan({"text_decoder": [4, 3, 5, 2]})
    words = native_flags(plan, stage_arguments(plan, host))
    assert words[words.index("--num-layer-list") + 1] == "4,3,5,2"


def test_a_release_without_layout_strings_refuses_other_splits():
    with pytest.raises(PlanError, match=r"\[4, 3, 5, 2\] layers on its stages, .* those between may not"):
        stage_arguments(make_plan({"text_decoder": [4, 3, 5, 2]}), SimpleNamespace())


def test_two_models_of_a_script_run_one_split_alone():
    runs = make_plan({"vision_model": [4, 0], "language_model": [3, 3]})
    assert stage_arguments(runs, SimpleNamespace(pipeline_model_parallel_layout=None)) == {}
    for layers in (
        {"vision_model": [2, 2], "language_model": [3, 3]},
        {"vision_model": [4, 0], "language_model": [2, 4]},
    ):
        with pytest.raises(
            PlanError, match="vision_model on the first stage and equally many layers of language_model"
        ):
            stage_arguments(make_plan(layers), SimpleNamespace())


def test_megatron_reads_the_layout_string_back():
    layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    text = pipeline_layout(make_plan({"text_decoder": [5, 11, 9, 7]}, virtual_size=2))
    parsed = layout.PipelineParallelLayerLayout.from_str(text, 2)
    kinds = [[[layer.name for layer in chunk] for chunk in rank] for rank in parsed.layout]
    assert [[chunk.count("decoder") for chunk in rank] for rank in kinds] == [[5, 9], [11, 7]]
    assert kinds[0][0][0] == "embedding"
    assert kinds[1][1][-1] == "loss"


@pytest.mark.parametrize("host", [{}, {"num_layer_list": None, "noop_layers": None}])
def test_a_host_without_layout_strings_refuses_ends_that_are_alone(host):
    plan = make_plan({"text_decoder": [0, 4, 4, 0]})
    with pytest.raises(PlanError, match="--no-standalone-ends"):
        stage_arguments(plan, SimpleNamespace(**host))


def test_megatron_accepts_ends_that_are_alone():
    """The validator of 0.13 and newer, with MTP beside the loss."""
    layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    plan = make_plan({"text_decoder": [0, 4, 4, 0]}, virtual_size=2, schedule="interleaved")
    for mtp, text in ((0, "E|t*4|t*4|L"), (1, "E|t*4|t*4|mL")):
        assert pipeline_layout(plan, mtp) == text
        layout.PipelineParallelLayerLayout(text, 2).validate_layer_layout(8, mtp or None)


def test_virtual_stages_are_a_list_per_chunk():
    plan = make_plan({"text_decoder": [1, 2, 3, 4]}, virtual_size=2, schedule="interleaved")
    assert model_keys(plan, "text_decoder")["pipeline_num_layers"] == [[1, 2], [3, 4]]


def test_recompute_without_a_flag_of_the_host_is_refused():
    some = make_plan({"text_decoder": [2, 2]}, {"text_decoder": [2, 1]}, kind="selective:mlp")
    with pytest.raises(PlanError, match=r"selective \(mlp\) in some layers only"):
        kind_everywhere(some)
    with pytest.raises(PlanError, match=r"selective \(mlp\) in text_decoder"):
        model_keys(some, "text_decoder")
