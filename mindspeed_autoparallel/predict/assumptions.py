"""Switches that a request leaves open and that a run may have needed to fit: what published recipes turn on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.fields import section_of
from mindspeed_autoparallel.cost.analytic.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A leaner reading of a request."""

    request: Mapping[str, object]
    words: str
    """What is assumed, for people."""


_TWO_BYTES = {"grad_reduce_in_bf16": True}
_MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


def leaner_readings(request: Mapping[str, object], work: Workload) -> Iterator[Assumption]:
    """Yield ``request`` with ever more switches that save memory, none of which it states itself; the cheapest first.

    Gradients in bf16 (every performance recipe of Megatron-Bridge), moments in bf16 (its DeepSeek-V3 recipes), on one
    stage parameters sharded over all replicas and activations offloaded (its Llama 3 70B and 405B recipes). Nothing is
    assumed of recompute, for it changes what is computed, and nothing on Ascend, whose software lacks these switches.
    """
    if work.on_ascend or work.stack != "megatron-core":
        return
    train, parallel = dict(section_of(request, "train")), dict(section_of(request, "parallel"))
    words: list[str] = []
    for added, said in ((_TWO_BYTES, "gradients reduced and kept in bf16"), (_MOMENTS, "Adam's moments in bf16")):
        if not set(added) & set(train) and not (added is _TWO_BYTES and work.reduced_in_two_bytes):
            train.update(added)
            words.append(said)
            yield Assumption(request={**request, "train": dict(train)}, words=", ".join(words))
    ranks = work.data_size * work.context_size
    if work.pipeline_size > 1 or work.adapters or ranks == 1:
        return
    # Megatron's FSDP goes with the distributed optimizer.
    if "fsdp" not in parallel and parallel.get("dist_opt") is not False:
        parallel["fsdp"] = ranks
        words.append(f"parameters sharded over {ranks} ranks (Megatron FSDP)")
        yield Assumption(request={**request, "train": train, "parallel": parallel}, words=", ".join(words))
    if "cpu_offloading_num_layers" not in train and "offload" not in train and work.recompute == "none":
        quarters = sorted({work.model.num_layers * part // 4 for part in (1, 2, 3, 4)} - {0})
        for layers in quarters:
            offloading = {**train, "cpu_offloading_num_layers": layers}
            listed = [*words, f"activations of {layers} layers offloaded to the host"]
            yield Assumption(request={**request, "train": offloading, "parallel": parallel}, words=", ".join(listed))
