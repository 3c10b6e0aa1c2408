"""Models that no search describes are refused by their flags, before Megatron is imported where these tell it."""

import argparse
import sys

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.features.operator_search.request import read_shape
from mindspeed_autoparallel.runtime.megatron.unsearched import (
    refuse_hybrid,
    refuse_hybrid_command,
    refuse_sharded_parameters,
)

GPT = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
SHARDED = ["use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp"]
PATTERNS = ["hybrid_layer_pattern", "hybrid_override_pattern"]


@pytest.mark.parametrize("flag", ["--auto-parallel-mm", "--auto-tuning"])
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_parameters_are_refused_and_not_priced_as_data_parallelism(name, flag):
    with pytest.raises(ConfigError, match=rf"{flag} .* shards its parameters by --{name.replace('_', '-')}"):
        refuse_sharded_parameters(argparse.Namespace(**GPT, **{name: True}), flag)
    refuse_sharded_parameters(argparse.Namespace(**GPT, **{name: False}), flag)


def test_the_second_version_of_megatron_fsdp_is_named():
    arguments = argparse.Namespace(**GPT, use_megatron_fsdp=True, megatron_fsdp_version=2)
    with pytest.raises(ConfigError, match=r"--use-megatron-fsdp \(version 2\).*no search describes"):
        refuse_sharded_parameters(arguments, "--auto-parallel-mm")


def test_hybrid_models_without_a_pattern_of_stages_are_refused_with_the_kinds_of_their_layers():
    said = r"--auto-tuning .* Megatron has from 0.17 on; .* 2 Mamba, 1 attention, 1 MLP \(pattern M\*M-\)"
    with pytest.raises(ConfigError, match=said):
        refuse_hybrid(argparse.Namespace(**GPT, hybrid_override_pattern="M*M-"), "--auto-tuning")
    with pytest.raises(ConfigError, match=r"4 Mamba"):
        refuse_hybrid(argparse.Namespace(**GPT, is_hybrid_model=True, hybrid_layer_pattern=None), "--auto-tuning")
    refuse_hybrid(argparse.Namespace(**GPT, hybrid_override_pattern=None), "--auto-tuning")


@pytest.mark.parametrize("flag", ["--auto-parallel-mm", "--auto-tuning"])
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_that_say_stages_are_searched(name, flag):
    refuse_hybrid(argparse.Namespace(**GPT, **{"hybrid_layer_pattern": None, name: "M*M-"}), flag)


@pytest.mark.parametrize(
    "words",
    [
        ["--hybrid-layer-pattern", "M*-M*-"],
        ["--hybrid-override-pattern=M*-M*-", "--num-layers", "6"],
        ["--hybrid_layer_pattern", "M*-M*-"],
        ["--num-layers", "2", "--is-hybrid-model", "--hybrid-attention-ratio", "0.1"],
    ],
)
def test_the_command_line_is_enough_to_refuse_a_hybrid_model(words, capsys):
    argv = ["--hidden-size", "64", *words, "--operator-search"]
    with pytest.raises(SystemExit) as ended:
        refuse_hybrid_command({"--operator-search"}, argv)
    said = capsys.readouterr().err
    assert ended.value.code == ConfigError.exit_code
    assert said.startswith("ConfigError: --operator-search takes layers that are alike")
    assert " 2 Mamba" in said
    assert len(said.splitlines()) == 1


def test_other_commands_go_on_to_the_hosts_own_parser(capsys):
    refuse_hybrid_command({"--auto-tuning"}, ["--num-layers", "4", "--auto-tuning"])
    refuse_hybrid_command({"--auto-parallel-plan"}, ["--hybrid-layer-pattern", "M*-M*-"])
    refuse_hybrid_command({"--auto-tuning"}, ["--auto-tuning", "--hybrid-layer-pattern"])
    assert capsys.readouterr() == ("", "")


def test_a_hybrid_script_ends_before_megatron_is_imported(tmp_path, monkeypatch, capsys):
    from mindspeed_autoparallel import patches

    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--operator-search", "--hybrid-layer-pattern", "M*"])
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(SystemExit):
        patches._before_megatron()
    assert "1 Mamba, 1 attention" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"freeze_ViT": False, "freeze_LM": False}, "this script trains a vision model with the language model"),
        ({"mm_model": "model.json"}, "--mm-model describes a multimodal model"),
        ({"hybrid_layer_pattern": "M*-"}, "this hybrid model has 1 Mamba, 1 attention, 1 MLP"),
        ({"multi_latent_attention": True}, r"latent attention \(--multi-latent-attention\)"),
        ({"mtp_num_layers": 1}, "layers that predict further tokens"),
        ({"num_experts": 4, "moe_layer_freq": [0, 1, 1, 1]}, "layers with and without experts"),
    ],
)
def test_the_operator_search_takes_one_language_model(more, said):
    with pytest.raises(ConfigError, match=said) as refused:
        read_shape(argparse.Namespace(**GPT, **more))
    assert "--operator-search takes" in str(refused.value)
    alike = {"num_experts": 4, "moe_layer_freq": [1, 1, 1, 1], "mtp_num_layers": None}
    assert read_shape(argparse.Namespace(**GPT)).num_layers == 4
    assert read_shape(argparse.Namespace(**GPT, **alike)).num_experts == 4
