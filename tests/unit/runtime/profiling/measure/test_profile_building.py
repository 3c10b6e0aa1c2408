"""Raw measurements become a profile the planner reads."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.profiles import Collective, LinkTier, MeasuredAt, Profile, read_profile
from mindspeed_autoparallel.profiles.profile import utc_now
from mindspeed_autoparallel.profiles.records import PointResult, record_of
from mindspeed_autoparallel.runtime.megatron.description import DescribedModule, Description
from mindspeed_autoparallel.runtime.profiling.sources.building import build_profile, provenance_of
from mindspeed_autoparallel.runtime.profiling.sources.device_cost import device_cost, links_of, played_links

POINT = MeasuredAt(tensor_size=2)


def block(**changes):
    values = {
        "forward_us": 100.0,
        "backward_us": 200.0,
        "saved_bytes": 5000.0,
        "forward_peak_bytes": 300.0,
        "backward_peak_bytes": 900.0,
        "output_bytes": 1000.0,
        "parameters": {
            "dense": {"num_parameters": 10, "parameter_bytes": 20, "num_trained": 10},
            "expert": {"num_parameters": 0, "parameter_bytes": 0, "num_trained": 0},
        },
    }
    return {**values, **changes}


def module(name, key, frozen=False):
    blocks = {"pre": block(), "layer": block(), "post": block()}
    return {
        "name": name,
        "result_key": key,
        "frozen": frozen,
        "hidden_size": 8,
        "tokens_per_sample": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "num_experts": 0,
        "kinds": [0, 0],
        "blocks": blocks,
    }


def result(*modules):
    values = {
        "modules": list(modules),
        "bytes_per_trained_parameter": {"gradient": 4.0, "optimizer": 12.0},
        "optimizer": {"step_us": 50.0, "parameter_bytes": 100},
        "tied_embeddings": False,
        "memory_capacity_bytes": 10**9,
        "host_bytes": 1000,
        "links": {"intra": {"p2p": {"latency_us": 5.0, "bytes_per_s": 1e9}}},
    }
    return record_of(values, "result", PointResult)


def description(*modules):
    return Description(tuple(DescribedModule(name, layers, (name,)) for name, layers in modules), None, {}, "hash")


def build(results, described):
    cost, _ = device_cost(results)
    arguments = argparse.Namespace(seq_length=16, vocab_size=32, overlap_p2p_comm=False)
    return build_profile(
        described, results, cost, arguments, provenance_of(described, "measured", "cpu", {"torch": "x"})
    )


def test_the_full_layer_counts_come_from_the_description(tmp_path):
    results = {POINT: result(module("image_encoder", "vit"), module("text_decoder", "llm"))}
    profile = build(results, description(("image_encoder", 32), ("text_decoder", 80)))
    assert [item.num_layers for item in profile.model.modules] == [32, 80]
    assert profile.model.num_parameters == (32 + 2) * 10 + (80 + 2) * 10
    assert profile.model.module("text_decoder").predecessors == ("image_encoder",)
    profile.write(tmp_path / "profile.json")
    assert isinstance(read_profile(tmp_path / "profile.json"), Profile)


def test_a_script_that_states_its_sizes_gives_the_operations_of_a_sample_and_a_known_device_its_peak():
    results = {POINT: result(module("text_decoder", "llm"))}
    described = description(("text_decoder", 2))
    cost, _ = device_cost(results)
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 32, "kv_channels": 4}
    arguments = argparse.Namespace(seq_length=16, vocab_size=32, overlap_p2p_comm=False, **sizes)
    source = provenance_of(described, "measured", "NVIDIA H100 80GB HBM3", {"torch": "x"})
    profile = build_profile(described, results, cost, arguments, source)
    # Forward and backward, two operations a weight and token: attention 4 h^2, MLP 8 h^2 a layer, biases 9 h, norms 4 h, and
    # the head; scores and values of a causal attention are half of 4 s h a token.
    weights = 2 * (4 * 8 * 8 + 2 * 8 * 32 + 13 * 8) + 8 * 32
    assert profile.model.operations_per_sample == 3 * 16 * (2 * weights + 2 * 2 * 16 * 8)
    assert profile.device.peak_flops_per_s == pytest.approx(989e12, rel=0.01)
    assert build(results, described).model.operations_per_sample == 0, "its sizes are not stated"


@pytest.mark.parametrize("num_tokens", [16, 48])
def test_the_operations_of_an_encoder_are_those_of_its_measured_tokens(num_tokens, caplog):
    """They were those of --seq-length tokens, with advice to measure in a search that measures."""
    keys = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 32}
    content = {"image_encoder": keys, "text_decoder": {**keys, "vocab_size": 32}}
    modules = tuple(DescribedModule(name, 2, (name,)) for name in content)
    described = Description(modules, Path("model.json"), content, "hash")

    def operations(tokens):
        image = {**module("image_encoder", "vit"), "tokens_per_sample": tokens}
        return build({POINT: result(image, module("text_decoder", "llm"))}, described).model.operations_per_sample

    with caplog.at_level("INFO"):
        assert operations(num_tokens) > 0
        assert (operations(num_tokens) > operations(16)) == (num_tokens > 16)
    assert not caplog.records


def test_full_recompute_keeps_the_input_and_pays_the_forward_again():
    results = {POINT: result(module("text_decoder", "llm"))}
    layer = build(results, description(("text_decoder", 4))).at(POINT).modules["text_decoder"].layer
    assert layer.recompute["full"].saved_bytes == 1000
    assert layer.recompute["full"].extra_backward_us == 100.0
    assert layer.recompute["full"].backward_peak_bytes == 4000 + 900
    assert layer.dense.gradient_bytes == 40
    assert layer.dense.optimizer_bytes == 120


def test_modules_that_do_not_match_the_description_are_named():
    results = {POINT: result(module("vision_tower", "vit"))}
    with pytest.raises(ProfileError, match=r"image_encoder.*vision_tower"):
        build(results, description(("image_encoder", 4)))


@pytest.mark.parametrize(
    ("name", "source"),
    [("NVIDIA H100 80GB HBM3", "of H100, from the device catalogue"), ("Abacus", "assumed at 10 us and 10 GB/s")],
)
def test_links_of_a_device_that_measured_alone_say_where_they_are_from(name, source):
    tiers, said = played_links(name, None, 8)
    assert said.startswith(source)
    links = {tier: {"all_reduce": link.default} for tier, link in tiers.items()}
    results = {POINT: replace(result(module("text_decoder", "llm")), links=links, links_from=said)}
    cost, notes = device_cost(results)
    assert (cost.intra.default, cost.inter.default) == (tiers["intra"].default, tiers["inter"].default)
    assert links_of(results) == said and [note for note in notes if said in note]


def test_links_that_nodes_have_measured_stand_beside_the_catalogue_s():
    measured = LinkTier(default=Collective(latency_us=7.0, bytes_per_s=3e9))
    tiers, said = played_links("H100", None, 8, measured)
    assert tiers == {"intra": played_links("H100", None, 8)[0]["intra"], "inter": measured}
    assert said == "between nodes measured, one rank of each; inside a node of H100, from the device catalogue"


def test_assumed_links_are_noted():
    alone = replace(result(module("text_decoder", "llm")), links={})
    _, notes = device_cost({POINT: alone})
    assert any("assumed" in note for note in notes)


@pytest.mark.parametrize("created", ["2026-05-04T10:11:12+00:00", "2026-05-04T10:11:12Z"])
def test_profiles_are_dated_in_one_format_and_read_in_both(created, tmp_path):
    assert utc_now().endswith("+00:00") and len(utc_now()) == len("2026-05-04T10:11:12+00:00")
    described = description(("text_decoder", 4))
    profile = build({POINT: result(module("text_decoder", "llm"))}, described)
    dated = replace(profile, provenance=replace(profile.provenance, created_utc=created))
    dated.write(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json").provenance.created_utc == created
