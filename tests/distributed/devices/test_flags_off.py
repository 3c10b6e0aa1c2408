"""With every flag off, a training with the import is the training without it, bit for bit."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
from ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.torch, pytest.mark.megatron]

WORKER = Path(__file__).with_name("gpt_layouts.py")
LAYOUTS = ["tp2-pp2", "tp2-sp-dp2", "dp4-distributed-optimizer", "pp2-vpp2-dp2", "tp2-pp2-full-recompute"]


def test_losses_and_gradient_norms_are_bit_identical_with_and_without_the_import():
    without = run_ranks(4, WORKER, *LAYOUTS, environment={"WITHOUT_PLUGIN": "1"}, timeout_s=400)
    imported = run_ranks(4, WORKER, *LAYOUTS, timeout_s=400)
    for bare, patched in zip(without, imported, strict=True):
        # JSON keeps every digit of a float.
        assert patched.result["cases"] == bare.result["cases"]
    assert all(rank.result["cases"][layout]["norms"][0] > 0 for rank in without for layout in LAYOUTS)
