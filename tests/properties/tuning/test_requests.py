"""Whatever a request holds, it is answered: with figures, or with a reason."""

import copy
import math
from typing import Any

import pytest
from how_many import how_many
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_autoparallel.cost.analytic.request_keys import KNOWN
from mindspeed_autoparallel.predict.predict import predict

_BASE: dict[str, Any] = {
    "id": "x",
    "model": {
        "type": "moe",
        "num_layers": 8,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 4,
        "ffn": 4096,
        "seq": 2048,
        "vocab": 32000,
        "swiglu": True,
        "num_experts": 8,
        "topk": 2,
        "moe_ffn": 2048,
        "shared_expert_ffn": 1024,
    },
    "hw": {"gpu": "H100", "num_gpus": 16, "gpus_per_node": 8, "inter_node_gbps": 400},
    "parallel": {"tp": 2, "pp": 2, "dp": 4, "cp": 1, "ep": 2, "vpp": 1, "sp": True, "dist_opt": True},
    "train": {"gbs": 32, "mbs": 1, "recompute": "none", "precision": "bf16"},
}
_KEYS = [(section, key) for section in ("model", "hw", "parallel", "train") for key in _BASE[section]]
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.just([]),
    st.just({}),
    st.sampled_from(["8", "8.0", "1e3", "moe", "gpt", "full", "fp8", "A100", "nan", "inf", 10**30]),
)


@settings(max_examples=how_many(150, 400), deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(_KEYS), _ODD), max_size=4), left_out=st.sets(st.sampled_from(_KEYS)))
def test_every_request_is_answered_with_finite_figures_or_a_reason(
    changes: list[tuple[tuple[str, str], Any]], left_out: set[tuple[str, str]]
) -> None:
    request = copy.deepcopy(_BASE)
    for (section, key), value in changes:
        request[section][key] = value
    for section, key in left_out if len(changes) % 2 else ():
        request[section].pop(key, None)
    answer, sound = predict({"requests": [request, _BASE]})["predictions"]
    assert sound["status"] == "ok"
    assert answer["id"] == "x"
    if answer["status"] == "error":
        assert answer["reason"]
        return
    assert answer["status"] in ("ok", "out_of_memory")
    for figure in ("step_time_ms", "peak_memory_gib", "tokens_per_s_per_device"):
        assert math.isfinite(answer[figure])
        assert answer[figure] > 0


@pytest.mark.parametrize("value", [["x"], {"x": 1}, "x", -1])
def test_a_value_of_any_kind_is_answered_under_every_key(value: object) -> None:
    for section, keys in KNOWN.items():
        if not isinstance(_BASE.get(section), dict):
            continue
        requests = [{**_BASE, section: {**_BASE[section], key: value}} for key in sorted(keys)]
        for answer in predict({"requests": requests})["predictions"]:
            assert answer["status"] in ("ok", "out_of_memory") or answer["reason"]
