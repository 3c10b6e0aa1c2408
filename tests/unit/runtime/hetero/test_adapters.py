"""Adapters of known hosts: their batches as items, and samples whose tokens and inputs disagree."""

import types

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.errors import ConfigError  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.adapters import mindspeed_mm  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.adapters.llava import LlavaAdapter  # noqa: E402
from mindspeed_autoparallel.runtime.hetero.adapters.mindspeed_mm import AudioAdapter, ImageAdapter  # noqa: E402

pytestmark = pytest.mark.torch
IMAGE, PATCH = 9, 3 * 2 * 14 * 14


def arguments(**vision):
    blocks = types.SimpleNamespace(
        img_context_token_id=IMAGE,
        image_encoder=types.SimpleNamespace(
            vision_encoder=types.SimpleNamespace(hidden_size=8, spatial_merge_size=2, **vision)
        ),
        audio_encoder=types.SimpleNamespace(audio_encoder=types.SimpleNamespace(num_mel_bins=4)),
        text_decoder=types.SimpleNamespace(hidden_size=16),
    )
    return types.SimpleNamespace(mm=types.SimpleNamespace(model=blocks), params_dtype=torch.float32)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)


def image_adapter(**vision):
    patches = torch.nn.Conv3d(3, 8, (2, 14, 14), stride=(2, 14, 14))
    return ImageAdapter(torch.nn.Sequential(patches), arguments(**vision))


def test_mindspeed_mm_images_are_items_with_their_grid():
    ids = torch.tensor([[1, IMAGE, 2, IMAGE, IMAGE], [3, 3, 3, 3, 3]])
    batch = {
        "input_ids": ids,
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4]]),
        "pixel_values": torch.zeros(12, PATCH),
    }
    adapter = image_adapter()
    items = adapter.items(batch)
    assert [(item.sample, item.input_rows, item.output_rows, item.meta) for item in items] == [
        (0, 4, 1, (1, 2, 2)),
        (0, 8, 2, (1, 2, 4)),
    ]
    assert adapter.rows(batch).shape == (12, PATCH)
    assert adapter.input_shape == (PATCH,)


def test_mindspeed_mm_videos_come_before_images_and_texts_have_no_items():
    adapter = image_adapter()
    video = {
        "input_ids": torch.tensor([[IMAGE] * 4]),
        "video_grid_thw": torch.tensor([[2, 2, 4]]),
        "pixel_values_videos": torch.zeros(16, PATCH),
    }
    assert [item.output_rows for item in adapter.items(video)] == [4]
    assert adapter.rows(video).shape[0] == 16
    assert adapter.items({"input_ids": torch.tensor([[1, 2]])}) == []


def test_rows_of_deeper_layers_travel_beside_the_last():
    adapter = image_adapter(deepstack_visual_indexes=[3, 5])
    assert adapter.output_shape == (48,)
    outputs = [torch.full((2, 16), float(n)) for n in range(3)]
    rows = adapter.encode(lambda rows, grids: (outputs[0], outputs[1:]), torch.zeros(8, PATCH), [adapter.dummy()[1][0]])
    last, deeper = adapter.embeddings(rows)
    assert torch.equal(last, outputs[0])
    assert all(torch.equal(found, made) for found, made in zip(deeper, outputs[1:], strict=True))


def test_mindspeed_mm_clips_lose_their_padding_and_get_it_back():
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0], [1] * 8])
    features = torch.randn(2, 4, 8) * mask[:, None]
    ids = torch.full((2, 5), 1)
    ids[0, :1], ids[1, :2] = mindspeed_mm.AUDIO_TOKEN, mindspeed_mm.AUDIO_TOKEN
    adapter = AudioAdapter(arguments())
    batch = {"input_ids": ids, "input_features": features, "feature_attention_mask": mask}
    items = adapter.items(batch)
    assert [(item.sample, item.input_rows, item.output_rows) for item in items] == [(0, 6, 1), (1, 8, 2)]
    seen = []
    adapter.encode(lambda *inputs: seen.extend(inputs) or torch.zeros(3, 16), adapter.rows(batch), items)
    assert torch.equal(seen[0], features)
    assert torch.equal(seen[1], mask.to(torch.int32))


def test_a_sample_whose_tokens_and_images_disagree_is_named():
    batch = {
        "input_ids": torch.tensor([[IMAGE, 1, 1], [IMAGE, IMAGE, 1]]),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * 2),
    }
    with pytest.raises(ConfigError, match="sample 1 of the microbatch has 2 image tokens, but its image inputs make 1"):
        image_adapter().items(batch)
    vision = types.SimpleNamespace(img_h=8, img_w=8, seq_length=5, visual_hidden_size=32)
    tokens = torch.tensor([[-200, 1, 1], [1, 1, 1]])
    with pytest.raises(ConfigError, match="sample 1 of the microbatch has 0 image tokens"):
        LlavaAdapter(vision, torch.float32, -200).items({"tokens": tokens})
