"""The stock schedule inside an encoder's or generator's own pipeline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from mindspeed_autoparallel.runtime.hetero.pipeline import run_backward, run_forward  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.megatron]


@pytest.mark.parametrize("run", [run_forward, run_backward])
def test_a_pipeline_inside_the_backbones_schedule_sets_no_scale_of_its_losses(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.pipeline_parallel import schedules

    seen: list[Any] = []

    def schedule(*, model: Any, **_: Any) -> None:
        seen.append(model.config)

    monkeypatch.setattr(schedules, "forward_backward_pipelining_without_interleaving", schedule)
    config = SimpleNamespace(
        pipeline_dtype=None,
        params_dtype=torch.float32,
        num_moe_experts=8,
        mtp_num_layers=1,
        experimental_attention_variant="dsa",
    )
    run(config, [SimpleNamespace(arriving_shape=(1, 1, 1))])
    # For each of these Megatron's forward_step sets a scale that the whole process has once.
    assert (seen[0].num_moe_experts, seen[0].mtp_num_layers, seen[0].experimental_attention_variant) == (None,) * 3
    assert config.num_moe_experts == 8
