"""The profile file: round trip, refusals, noted interpolation, MindSpeed's file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.profiles import (
    BlockCost,
    Collective,
    DeviceCost,
    LinkTier,
    MeasuredAt,
    Measurement,
    ModuleCost,
    Profile,
    Provenance,
    RecomputeCost,
    StateBytes,
    read_profile,
)
from mindspeed_autoparallel.spec import Model, Module, to_json


def make_profile(points: tuple[MeasuredAt, ...] = (MeasuredAt(),)) -> Profile:
    def measure(at: MeasuredAt) -> Measurement:
        layer = BlockCost(
            forward_us=10.0 + 100.0 * at.micro_batch_size / at.tensor_size,
            backward_us=200.0,
            recompute={"none": RecomputeCost(saved_bytes=1000 * at.micro_batch_size)},
            dense=StateBytes(num_parameters=5, parameter_bytes=10, gradient_bytes=20, optimizer_bytes=60),
        )
        return Measurement(at=at, modules={"text_decoder": ModuleCost(layer=layer)})

    link = LinkTier(default=Collective(latency_us=1.0, bytes_per_s=1e9))
    module = Module(name="text_decoder", result_key="llm", num_layers=4)
    return Profile(
        model=Model(name="tiny", modules=(module,), sequence_length=8),
        device=DeviceCost(memory_capacity_bytes=10**9, intra=link, inter=link),
        measurements=tuple(map(measure, points)),
        provenance=Provenance(source="analytic", device="none", created_utc="2026-01-01T00:00:00Z"),
    )


def test_a_written_profile_reads_back_equal(tmp_path: Path) -> None:
    profile = make_profile()
    profile.write(tmp_path / "p.json")
    again = read_profile(tmp_path / "p.json")
    assert again == profile
    assert again.sha256() == profile.sha256()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("forward_us", -1, "negative"),
        ("forward_us", float("nan"), "finite"),
        ("forward_us", 1e308, "at most"),
        ("surprise", 1, "unknown key"),
        ("recompute", {}, "none"),
    ],
)
def test_a_wrong_block_is_named_by_its_path(key: str, value: object, message: str) -> None:
    raw = to_json(make_profile())
    raw["measurements"][0]["modules"]["text_decoder"]["layer"][key] = value
    with pytest.raises(ProfileError, match=r"text_decoder\.layer.*" + message):
        Profile.parse(raw)


def test_another_schema_version_is_refused() -> None:
    with pytest.raises(ProfileError, match="schema_version 99"):
        Profile.parse({**to_json(make_profile()), "schema_version": 99})


def test_an_unmeasured_micro_batch_is_interpolated_and_noted() -> None:
    profile = make_profile((MeasuredAt(micro_batch_size=1), MeasuredAt(micro_batch_size=4)))
    found = profile.at(MeasuredAt(micro_batch_size=2))
    assert found is not None
    assert found.modules["text_decoder"].layer.forward_us == pytest.approx(210.0)
    assert found.modules["text_decoder"].layer.dense.parameter_bytes == 10
    assert len(found.interpolated_from) == 2
    measured = profile.at(MeasuredAt(micro_batch_size=4))
    assert measured is not None
    assert not measured.interpolated_from


def test_a_tied_copy_of_the_embedding_does_not_grow_with_the_micro_batch() -> None:
    profile = make_profile()
    copy = StateBytes(num_parameters=3, parameter_bytes=6)
    modules = {
        name: replace(cost, post=cost.layer, tied_copy=copy) for name, cost in profile.measurements[0].modules.items()
    }
    tied = replace(profile, measurements=(replace(profile.measurements[0], modules=modules),))
    found = tied.at(MeasuredAt(micro_batch_size=4))
    assert found is not None and found.modules["text_decoder"].tied_copy == copy


def test_tensor_size_is_interpolated_inside_and_never_outside_what_was_measured() -> None:
    profile = make_profile((MeasuredAt(tensor_size=1), MeasuredAt(tensor_size=4)))
    found = profile.at(MeasuredAt(tensor_size=2))
    assert found is not None
    assert found.modules["text_decoder"].layer.forward_us == pytest.approx(60.0)
    assert profile.at(MeasuredAt(tensor_size=8)) is None
    assert profile.at(replace(MeasuredAt(), expert_size=2)) is None


def mindspeed_file() -> dict[str, object]:
    block = {"fwd_time": 2, "bwd_time": 4, "act_mem": 100, "module_param": [10, 60, 20]}
    names = ("vit_pre", "vit", "vit_post", "llm_pre", "llm", "llm_post")
    return {
        **{name: dict(block) for name in names},
        "image_encoder.vision_encoder.num_layers": 32,
        "text_decoder": {"num_layers": 80, "seq_length": 1024, "hidden_size": 8192},
        "micro_batch_size": 1,
        "grad_acc_step": 8,
    }


@pytest.mark.parametrize("change", [{"act_mem": 1e308}, {"act_mem": 10**14}, {"module_param": [1, 1e308, 1]}])
def test_mindspeed_sizes_beyond_every_memory_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    value = mindspeed_file()
    value["llm"] = {**value["llm"], **change}  # type: ignore[dict-item]
    (tmp_path / "model_profile.json").write_text(json.dumps(value))
    with pytest.raises(ProfileError, match=rf"llm.{next(iter(change))}"):
        read_profile(tmp_path / "model_profile.json")


def test_mindspeed_file_keeps_its_meaning(tmp_path: Path) -> None:
    (tmp_path / "model_profile.json").write_text(json.dumps(mindspeed_file()))
    profile = read_profile(tmp_path / "model_profile.json", tensor_size=4)
    assert [module.num_layers for module in profile.model.modules] == [32, 80]
    found = profile.at(MeasuredAt(tensor_size=4))
    assert found is not None
    layer = found.modules["text_decoder"].layer
    assert (layer.forward_us, layer.recompute["full"].extra_backward_us) == (2000.0, 2000.0)
    assert layer.output_bytes == 1024 * 8192 * 2
    assert profile.at(MeasuredAt(tensor_size=2)) is None


@pytest.mark.parametrize("change", [{"llm": None}, {"micro_batch_size": 0}, {"vit": {"fwd_time": 1}}])
def test_broken_mindspeed_file_is_a_clear_error(tmp_path: Path, change: dict[str, object]) -> None:
    (tmp_path / "p.json").write_text(json.dumps({**mindspeed_file(), **change}))
    with pytest.raises(ProfileError, match=next(iter(change))):
        read_profile(tmp_path / "p.json")
