"""Random small profiles and jobs: every feature of a profile that a plan depends on, drawn independently."""

from __future__ import annotations

import random
from dataclasses import dataclass

from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
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
    SharedBytes,
    StateBytes,
)
from mindspeed_autoparallel.profiles.blocks import mean_layer
from mindspeed_autoparallel.spec import Cluster, Model, Module
from mindspeed_autoparallel.units import MIB

NAMES = (("image_encoder", "vit"), ("audio_encoder", "audio"), ("text_decoder", "llm"), ("generator", "gen"))


@dataclass(frozen=True)
class RandomJob:
    """A profile and what to plan it for."""

    profile: Profile
    cluster: Cluster
    global_batch_size: int
    space: SpaceOptions


def random_job(seed: int) -> RandomJob:
    """Return a job of at most 8 devices and 4 modules of at most 6 layers each."""
    drawn = random.Random(seed)
    modules = _modules(drawn)
    costs = {module.name: _module_cost(drawn, module) for module in modules}
    link = LinkTier(default=Collective(latency_us=drawn.choice([0.0, 5.0]), bytes_per_s=drawn.choice([1e9, 1e11])))
    profile = Profile(
        model=Model(
            name="random", modules=modules, sequence_length=128, vocab_size=64, tied_embeddings=drawn.random() < 0.2
        ),
        device=DeviceCost(
            memory_capacity_bytes=int(drawn.choice([60, 150, 400, 1500]) * drawn.uniform(0.7, 1.3) * MIB),
            runtime_overhead_bytes=drawn.choice([0, MIB]),
            intra=link,
            inter=link,
            optimizer_step_us_per_byte=drawn.choice([0.0, 1e-6]),
            operation_overhead_us=drawn.choice([0.0, 3.0, 3.7]),
        ),
        measurements=tuple(
            Measurement(
                at=MeasuredAt(tensor_size=tensor),
                modules={name: cost.with_layers(_shrunk(tensor)) for name, cost in costs.items()},
            )
            for tensor in ((1, 2) if drawn.random() < 0.3 else (1,))
        ),
        provenance=Provenance(source="analytic", device="imagined", created_utc=""),
        interleaved_sends=drawn.choice(["freed", "overlapped", "flushed", "eager"]),
    )
    space = SpaceOptions(
        virtual_sizes=drawn.choice([None, (1,), (1, 2), (1, 2, 3)]),
        schedules=drawn.choice([("1f1b",), ("1f1b", "gpipe")]),
        standalone_ends=drawn.random() < 0.5,
        overlap_gradient_reduce=drawn.random() < 0.3,
        distributed_optimizer=drawn.random() < 0.7,
    )
    cluster = Cluster(num_nodes=drawn.choice([1, 1, 2]), devices_per_node=drawn.choice([1, 2, 3, 4]))
    return RandomJob(profile, cluster, drawn.choice([1, 2, 4, 6, 8, 12]), space)


def _modules(drawn: random.Random) -> tuple[Module, ...]:
    found: list[Module] = []
    for name, key in NAMES[: drawn.randint(1, 4)]:
        if not found:
            before: tuple[str, ...] = ()
        elif drawn.random() < 0.6:
            before = (found[-1].name,)
        else:
            before = tuple(item.name for item in found if drawn.random() < 0.5)
        frozen = drawn.random() < 0.25
        layers = drawn.randint(1, 6)
        found.append(Module(name=name, result_key=key, num_layers=layers, frozen=frozen, predecessors=before))
    return tuple(found)


def _module_cost(drawn: random.Random, module: Module) -> ModuleCost:
    def maybe(share: float) -> BlockCost | None:
        return _block(drawn, module, recomputable=False) if drawn.random() < share else None

    if drawn.random() < 0.25:
        kinds = tuple(_block(drawn, module, recomputable=True) for _ in range(2))
        if set(kinds[0].recompute) != set(kinds[1].recompute):
            kinds = (kinds[0], kinds[0])
        pattern = tuple(sorted(drawn.randrange(2) for _ in range(module.num_layers)))
        layer = mean_layer(kinds, pattern)
    else:
        kinds, pattern, layer = (), (), _block(drawn, module, recomputable=True)
    return ModuleCost(
        layer=layer,
        pre=maybe(0.5),
        post=maybe(0.5),
        side=SharedBytes(total_bytes=drawn.choice([0, MIB]), kept_bytes=0),
        kinds=kinds,
        pattern=pattern,
    )


def _block(drawn: random.Random, module: Module, *, recomputable: bool) -> BlockCost:
    forward = 10 ** drawn.uniform(0, 4)
    saved = 0 if module.frozen else int(10 ** drawn.uniform(4, 7.5))
    peak = drawn.choice([0, 2 * MIB])
    recompute = {"none": RecomputeCost(saved_bytes=saved, backward_peak_bytes=peak)}
    if recomputable and not module.frozen:
        for name, kept in (("selective", 0.6), ("full", 0.1)):
            if drawn.random() < 0.5:
                extra = forward * (1 - kept)
                recompute[name] = RecomputeCost(
                    saved_bytes=int(kept * saved), extra_backward_us=extra, backward_peak_bytes=peak + saved
                )
    number = int(10 ** drawn.uniform(2, 6.5))
    state = (
        StateBytes(num_parameters=number, parameter_bytes=2 * number)
        if module.frozen
        else StateBytes(
            num_parameters=number, parameter_bytes=2 * number, gradient_bytes=4 * number, optimizer_bytes=12 * number
        )
    )
    backward = 0.0 if module.frozen else drawn.choice([1.0, 2.0]) * forward
    return BlockCost(
        forward_us=forward, backward_us=backward, recompute=recompute, output_bytes=drawn.choice([0, MIB]), dense=state
    )


def _shrunk(tensor: int):  # type: ignore[no-untyped-def]  # of tests
    from dataclasses import replace

    def change(_: str, block: BlockCost) -> BlockCost:
        return replace(block, forward_us=block.forward_us / tensor, backward_us=block.backward_us / tensor)

    return change
