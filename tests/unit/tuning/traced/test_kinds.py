"""Layers of several kinds become the mean layer of the whole model."""

from mindspeed_autoparallel.tuning.traced.kinds import merged


def _block(time_us, saved, peak, number):
    count = {"num_parameters": number, "parameter_bytes": 2 * number, "num_trained": number}
    return {
        "forward_us": time_us, "backward_us": 2 * time_us, "saved_bytes": saved, "output_bytes": 8,
        "forward_peak_bytes": peak, "backward_peak_bytes": peak, "parameters": {"dense": count},
    }  # fmt: skip


def _result(**shares):
    blocks = {"pre": _block(1, 1, 1, 1), "layer": _block(100, 40, 7, 10), "layer:1": _block(200, 80, 5, 30)}
    return {"modules": [{"name": "text_decoder", "layers": {"layer": 1, "layer:1": 1}, "blocks": blocks, **shares}]}


def test_kinds_count_by_their_share_of_the_whole_model_and_transients_as_the_worst():
    (module,) = merged(_result(layer_shares={"layer": 0.25, "layer:1": 0.75}))["modules"]
    assert set(module["blocks"]) == {"pre", "layer"}
    layer = module["blocks"]["layer"]
    assert (layer["forward_us"], layer["backward_us"], layer["saved_bytes"]) == (175, 350, 70)
    assert (layer["forward_peak_bytes"], layer["backward_peak_bytes"]) == (7, 7)
    assert layer["parameters"]["dense"] == {"num_parameters": 25, "parameter_bytes": 50, "num_trained": 25}


def test_without_a_whole_model_they_count_as_they_were_measured():
    (module,) = merged(_result())["modules"]
    assert module["blocks"]["layer"]["forward_us"] == 150


def test_one_kind_stays_as_it_is():
    result = {"modules": [{"layers": {"layer": 2}, "blocks": {"layer": _block(1, 2, 3, 4)}}]}
    assert merged(result) == result
