"""The layout of a plan is the one its stages describe; plans that mean no checkpoint are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_plan import example_plan

from mindspeed_autoparallel.errors import ConfigError, PlanError
from mindspeed_autoparallel.spec.layout import Layout, ModuleLayout
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.weights.architecture import AUDIO, TEXT, VISION, Architecture, architecture_from_config
from mindspeed_autoparallel.weights.plan_layout import layout_from_plan


def architecture(text_layers: int = 80) -> Architecture:
    """The model of the example plan: 32 vision, 12 audio, 80 text layers."""
    config: dict[str, Any] = {
        "model_type": "qwen2_5_omni",
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": text_layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
        "vision_config": {"depth": 32, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420},
        "audio_config": {"encoder_layers": 12, "d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120},
    }
    return architecture_from_config(config, "config.json")


def written(plan: Plan, folder: Path) -> Path:
    plan.write(folder / "plan.json")
    return folder / "plan.json"


def test_every_module_gets_its_layers_per_stage_and_the_tensor_size(tmp_path: Path) -> None:
    layout = layout_from_plan(written(example_plan(), tmp_path), architecture())
    assert layout.modules[VISION].layers == ((26, 6, 0, 0, 0, 0, 0, 0),)
    assert layout.modules[AUDIO].layers == ((0, 12, 0, 0, 0, 0, 0, 0),)
    assert layout.modules[TEXT].layers == ((0, 5, 13, 13, 13, 13, 13, 10),)
    assert {module.tensor_size for module in layout.modules.values()} == {4}
    assert not any(module.replicated for module in layout.modules.values())


def test_virtual_stages_become_one_row_per_chunk(tmp_path: Path) -> None:
    plan = example_plan()
    # The same chain of eight, folded onto four ranks with two chunks each.
    stages = tuple(replace(stage, pipeline_rank=stage.stage % 4, chunk=stage.stage // 4) for stage in plan.stages)
    folded = replace(
        plan,
        stages=stages,
        memory=plan.memory[:4],
        layout=Layout(pipeline_size=4, virtual_size=2, tensor_size=4, data_size=8, schedule="interleaved"),
        num_microbatches=16,
    )
    layout = layout_from_plan(written(folded, tmp_path), architecture())
    assert (layout.pipeline_size, layout.virtual_size) == (4, 2)
    assert layout.modules[VISION].layers == ((26, 6, 0, 0), (0, 0, 0, 0))
    assert layout.modules[TEXT].layers == ((0, 5, 13, 13), (13, 13, 13, 10))


def test_an_encoder_of_its_own_is_whole_in_every_stage_and_cut_by_its_own_size(tmp_path: Path) -> None:
    plan = example_plan()
    own = {"image_encoder": ModuleLayout(tensor_size=2, data_size=64)}
    hetero = replace(plan, layout=replace(plan.layout, modules=own))
    layout = layout_from_plan(written(hetero, tmp_path), architecture())
    assert layout.modules[VISION].replicated
    assert (layout.modules[VISION].tensor_size, layout.modules[TEXT].tensor_size) == (2, 4)


def test_a_plan_for_another_model_names_the_list_and_the_difference(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sums to 80; the model has 78 .*2 too many"):
        layout_from_plan(written(example_plan(), tmp_path), architecture(text_layers=78))


def test_a_result_key_that_repeats_the_name_of_its_module_is_read(tmp_path: Path) -> None:
    plan = example_plan()
    modules = tuple(replace(module, result_key=module.name) for module in plan.model.modules)
    named = replace(plan, model=replace(plan.model, modules=modules))
    found = layout_from_plan(written(named, tmp_path), architecture())
    assert found == layout_from_plan(written(plan, tmp_path), architecture())


def test_a_module_without_a_place_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    plan = example_plan()
    modules = tuple(
        replace(module, result_key="dit") if module.name == "audio_encoder" else module for module in plan.model.modules
    )
    other = replace(plan, model=replace(plan.model, modules=modules))
    with pytest.raises(PlanError, match="audio_encoder"):
        layout_from_plan(written(other, tmp_path), architecture())
