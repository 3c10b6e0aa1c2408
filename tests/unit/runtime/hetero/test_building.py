"""An encoder's place on the host's model, and who builds it: what cannot be is refused with a way out."""

import sys
import types

import pytest

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.runtime.hetero import building
from mindspeed_autoparallel.runtime.hetero.job import HeteroJob
from mindspeed_autoparallel.runtime.hetero.layouts import HeteroLayout, ModuleLayout


def chunk():
    inner = types.SimpleNamespace(vision=None)
    return types.SimpleNamespace(model=inner, named_children=lambda: [("model", inner), ("head", None)])


def module(attribute="image_encoder", adapter=None):
    return ModuleLayout("image_encoder", attribute, 1, 1, 1, adapter=adapter)


def test_an_encoder_is_attached_at_its_attribute_path():
    host = chunk()
    building._attach(host, module("model.vision"), "built")
    assert host.model.vision == "built"


@pytest.mark.parametrize("path", ["image_encoder", "model.image", "nothing.image"])
def test_an_unknown_attribute_path_names_what_there_is(path):
    with pytest.raises(ConfigError, match=rf"has no attribute '{path}' \(it has model, head\).*\"attr\""):
        building._attach(chunk(), module(path), "built")


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (None, r"no host module builds image_encoder .* \(offered: audio_encoder\)"),
        ("no_such_package:Host", "adapter 'no_such_package:Host' cannot be loaded: No module named"),
        ("collections:Host", "adapter 'collections:Host' cannot be loaded"),
        ("collections", "adapter 'collections' cannot be loaded"),
        ("json:__name__", "adapter 'json:__name__' is a str: name a class"),
    ],
)
def test_an_encoder_without_a_builder_is_refused(monkeypatch, adapter, message):
    job = HeteroJob()
    job.layout = HeteroLayout(ModuleLayout("text_decoder", "text_decoder", 1, 1, 1), (module(adapter=adapter),))
    monkeypatch.setattr(building, "current_job", lambda: job)
    job.offer({"audio_encoder": object()})
    with pytest.raises(ConfigError, match=message):
        building._host(module(adapter=adapter))


def test_an_adapter_named_in_the_file_comes_before_the_hosts_own(monkeypatch):
    job = HeteroJob()
    monkeypatch.setattr(building, "current_job", lambda: job)
    job.offer({"image_encoder": object()})
    assert building._host(module(adapter="collections:OrderedDict")) == {}


def test_mindspeed_mm_needs_no_word_of_ours_in_its_model_file(monkeypatch):
    """Without an adapter in model.json MindSpeed-MM's own one is used."""
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "mindspeed_mm", types.ModuleType("mindspeed_mm"))
    monkeypatch.setattr(building, "current_job", HeteroJob)
    assert type(building._host(module())).__name__ == "ImageEncoder"


def test_a_host_whose_parts_hold_records_of_its_own_gives_the_first_with_megatrons_fields():
    """MindSpeed-MM: a block of model.json on the encoder, its own reader with every field in the layers."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_config import TransformerConfig

    whole = types.SimpleNamespace(**vars(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)))
    parts = [types.SimpleNamespace(config=types.SimpleNamespace(tp=1)), object(), types.SimpleNamespace(config=whole)]
    assert building._megatron_config(types.SimpleNamespace(modules=lambda: parts)) is whole
    assert building._megatron_config(types.SimpleNamespace(modules=lambda: parts[:2])) is None
