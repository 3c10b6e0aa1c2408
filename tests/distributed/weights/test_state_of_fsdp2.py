"""Optimizer state of FSDP2 between shard sizes, by torch's own distributed checkpoints: training goes on alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from ranks import run_ranks  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.torch]
SAVED, STEPS = 3, 3


def go_on(folder: str, pairs: list[list[list[int]]]) -> list[dict[str, Any]]:
    """Train under the first mesh (replicas, shards) of every pair, save, and go on under both."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")

    def built(mesh: list[int], seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        layers = [torch.nn.Linear(17, 33), torch.nn.Tanh(), torch.nn.Linear(33, 31), torch.nn.Tanh()]
        model = torch.nn.Sequential(*layers, torch.nn.Linear(31, 5))
        devices = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=("replicas", "shards"))
        for layer in model:
            fully_shard(layer, mesh=devices)
        fully_shard(model, mesh=devices)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            batch, wanted = torch.randn(8, 17, generator=generator), torch.randn(8, 5, generator=generator)
            mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
            loss = (model(batch[mine]) - wanted[mine]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            whole = loss.detach().clone()
            dist.all_reduce(whole)
            losses.append(float(whole) / dist.get_world_size())
        return losses

    def state(model: Any, optimizer: Any) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    found = []
    for number, (before, after) in enumerate(pairs):
        model, optimizer = built(before, seed=1)
        train(model, optimizer, 0, SAVED)
        dcp.save(state(model, optimizer), checkpoint_id=f"{folder}/{number}")
        losses = {"uninterrupted": train(model, optimizer, SAVED, SAVED + STEPS)}
        # Once is enough to show that moments make a difference.
        for name, forgets in (("resumed", False), ("without moments", True))[: 1 if number else 2]:
            model, optimizer = built(after, seed=2)
            loaded = state(model, optimizer)
            dcp.load(loaded, checkpoint_id=f"{folder}/{number}")
            set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            if forgets:
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses[name] = train(model, optimizer, SAVED, SAVED + STEPS)
        found.append(losses)
    dist.destroy_process_group()
    return found


def test_state_moves_between_shard_sizes_and_training_goes_on(tmp_path: Path) -> None:
    meshes = [[1, 4], [2, 2], [4, 1]]
    pairs = [[before, after] for before in meshes for after in meshes if before != after]
    found = run_ranks(4, go_on, str(tmp_path), pairs)[0].result
    for pair, losses in zip(pairs, found, strict=True):
        assert losses["resumed"] == pytest.approx(losses["uninterrupted"], rel=1e-6), pair
    assert found[0]["without moments"] != pytest.approx(found[0]["uninterrupted"], rel=1e-3), pairs[0]
