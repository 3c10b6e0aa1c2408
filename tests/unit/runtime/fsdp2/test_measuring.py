"""What hooks see of a small model: times of each module alone, bytes that it keeps, its place and kind."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import pytest
from native_files import TEXT

from mindspeed_autoparallel.hosts.mindspeed_mm import read_native

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def tiny(works: Callable[[], None] = lambda: None):  # type: ignore[no-untyped-def]
    """Return a model of an embedding, three layers with a part below each, and a head."""

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Linear(8, 8)

        def forward(self, x):  # type: ignore[no-untyped-def]
            works()
            return self.weight(x).relu()

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp, self.out = torch.nn.LayerNorm(8), Part(), torch.nn.Linear(8, 8)

        def forward(self, x):  # type: ignore[no-untyped-def]
            return x + self.out(self.mlp(self.norm(x)))

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Module()
            self.model.embed_tokens = torch.nn.Embedding(16, 8)
            self.model.layers = torch.nn.ModuleList(Layer() for _ in range(3))
            self.lm_head = torch.nn.Linear(8, 16)

        def forward(self, tokens):  # type: ignore[no-untyped-def]
            x = self.model.embed_tokens(tokens)
            for layer in self.model.layers:
                x = layer(x)
            return self.lm_head(x).logsumexp(-1).mean()

    return Whole()


def test_modules_are_those_of_the_files_patterns_with_kinds_and_parents(tmp_path: Path) -> None:
    from mindspeed_autoparallel.runtime.fsdp2.modules import find_modules

    (tmp_path / "c.yaml").write_text(TEXT.replace("mlp.experts", "mlp"))
    model = tiny()
    found = find_modules(model, read_native(tmp_path / "c.yaml"))
    names = {module.name: module for module in found.modules}
    assert next(iter(names)) == "" and names["model.layers.1.mlp"].parent == "model.layers.1"
    assert names["model.layers.1"].is_layer and names["model.layers.1"].pattern == "model.layers.{*}"
    assert names["model.layers.1.mlp"].holds_experts and names["lm_head"].is_head
    assert names["model.layers.0"].kind == names["model.layers.2"].kind
    elements = sum(sum(found.kinds[module.kind].parameters) for module in found.modules)
    assert elements == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("takes", [False, True])
def test_a_stack_that_the_trainer_cannot_recompute_is_planned_without(tmp_path: Path, takes: bool) -> None:
    from mindspeed_autoparallel.runtime.fsdp2.modules import find_modules

    text = TEXT.replace("mlp.experts", "mlp").replace("    - model.layers.{*}\n", "")
    (tmp_path / "c.yaml").write_text(text.replace('["model.layers.{*}"]', "[]"))
    model = tiny()
    if takes:  # what the trainer hands each module that it recomputes
        type(model.model.layers[0]).forward = lambda self, x, past_key_values=None: x
    found = {module.name: module for module in find_modules(model, read_native(tmp_path / "c.yaml")).modules}
    assert found["model.layers.1"].is_layer == takes


def test_each_segment_of_a_step_belongs_to_the_innermost_module(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_autoparallel.runtime.fsdp2 import timeline as module
    from mindspeed_autoparallel.runtime.fsdp2.saved import saved_bytes
    from mindspeed_autoparallel.runtime.fsdp2.timeline import Timeline

    passed_s = [0.0]
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: passed_s[0]))

    def works() -> None:
        passed_s[0] += 0.02

    model = tiny(works)
    names = ["", "model.embed_tokens", *(f"model.layers.{index}" for index in range(3))]
    names += [*(f"model.layers.{index}.mlp" for index in range(3)), "lm_head"]
    timeline = Timeline(lambda: None)
    handles = timeline.attach(model, names)
    tokens = torch.arange(6).view(1, 6)
    for _ in range(2):
        timeline.start()
        with saved_bytes(timeline, {name for name in names if name.count(".") == 2}) as saved:
            model(tokens).backward()
    assert timeline.order[:3] == ["", "model.embed_tokens", "model.layers.0"]
    for index in range(3):
        inside, around = timeline.forward[f"model.layers.{index}.mlp"], timeline.forward[f"model.layers.{index}"]
        assert inside.head_us == pytest.approx(20_000) and around.head_us + around.tail_us == 0
        assert around.num_segments == 2 and inside.num_segments == 1
    assert set(timeline.backward) == set(names)
    assert timeline.inputs["model.layers.1"] == (6 * 8 * 4, True) and not timeline.inputs[""][1]
    # Of a layer: the norm's input is its own; the linear behind the part below keeps that part's output.
    assert saved.inputs["model.layers.1"] == 6 * 8 * 4
    head, tail = saved.split("model.layers.1", 2)
    assert head == 2 * 6 * 4 and tail == 0
    # The linear saves what the part below keeps already; nothing in that part runs after a module of its own.
    assert saved.tail_saves("model.layers.1", 2) and not saved.tail_saves("model.layers.1.mlp", 1)
    assert saved.split("model.layers.1.mlp", 1)[0] + saved.inputs["model.layers.1.mlp"] == 2 * 6 * 8 * 4
    for handle in handles:
        handle.remove()
    timeline.start()
    model(tokens).backward()
    assert not timeline.forward and not timeline.backward


def test_finished_gradients_are_recorded_at_the_peak_of_a_backward() -> None:
    """A linear behind a wide product: its weight's gradient is there when the product's operands get theirs."""
    from mindspeed_autoparallel.runtime.devices.cpu.storages import TrackedStorages
    from mindspeed_autoparallel.runtime.fsdp2.timeline import Timeline

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Linear(*sizes, bias=False) for sizes in ((8, 64), (64, 8)))

        def forward(self, x):  # type: ignore[no-untyped-def]
            inner = self.first(x)
            return self.second(inner * inner.sigmoid())

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Wide(), torch.nn.Linear(8, 8))
    timeline = Timeline(lambda: None)
    handles = timeline.attach(model, ["", "1"])
    with TrackedStorages(let_go_s=0.0) as timeline.probe:
        timeline.start()
        model(torch.ones(16, 8)).sum().backward()
    passed = timeline.backward["1"]
    assert passed.head_made_bytes == 4 * 64 * 8  # of the second linear
    assert passed.head_bytes - passed.head_made_bytes >= 4 * 16 * 64
    for handle in handles:
        handle.remove()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_forward_that_saves_nothing_holds_what_others_save() -> None:
    from mindspeed_autoparallel.runtime.devices.cpu.storages import TrackedStorages
    from mindspeed_autoparallel.runtime.fsdp2.saved import nothing_saved
    from mindspeed_autoparallel.runtime.fsdp2.timeline import Timeline

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.second = (torch.nn.Linear(*sizes) for sizes in ((8, 64), (64, 64), (64, 8)))

        def forward(self, x):  # type: ignore[no-untyped-def]
            gate = self.first(x).exp()
            inner = self.inner(gate.sigmoid())
            return self.second(inner * gate)

    size = 4 * 16 * 64
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Wide(), torch.nn.Linear(8, 8))
    timeline = Timeline(lambda: None)
    timeline.attach(model, ["", "1", "1.inner"])
    timeline.saves_nothing = True
    optimizer, before = torch.optim.AdamW(model.parameters()), [value.clone() for value in model.parameters()]
    with TrackedStorages(let_go_s=0.0) as timeline.probe, nothing_saved(optimizer):
        timeline.start()
        model(torch.ones(16, 8)).sum().backward()
        optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))  # no gradient is a real one
    optimizer.step()
    assert not torch.equal(before[0], next(iter(model.parameters())))
    wide, inner = timeline.forward["1"], timeline.forward["1.inner"]
    assert (wide.head_bytes, inner.around_bytes) == (2 * size, 2 * size)  # the gate and its sigmoid
    assert (inner.head_bytes, wide.tail_bytes) == (size, 3 * size + 4 * 16 * 8)  # the inner module's output, too


def test_what_a_module_holds_in_variables_is_measured_for_each_module_inside() -> None:
    from mindspeed_autoparallel.runtime.devices.cpu.storages import TrackedStorages
    from mindspeed_autoparallel.runtime.fsdp2.saved import saved_bytes
    from mindspeed_autoparallel.runtime.fsdp2.timeline import Timeline

    class Holding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.first, self.second = (torch.nn.Linear(8, 8) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x):  # type: ignore[no-untyped-def]
            added = self.frozen(x)
            return self.second(self.first(x).sigmoid() + added) + added

    model, names = Holding(), ["", "frozen", "first", "second"]
    timeline = Timeline(lambda: None)
    timeline.attach(model, names)

    def step() -> dict[str, int]:
        timeline.start()
        model(torch.ones(16, 8)).sum().backward()
        return {name: passed.around_bytes for name, passed in timeline.forward.items()}

    step()
    with saved_bytes(timeline, ()):
        saved = step()
    with TrackedStorages(let_go_s=0.0) as timeline.probe:
        held = step()
    size = 4 * 16 * 8  # of the frozen output, of the saved sigmoid, and of their sum, the second linear's input
    assert saved == {"": 0, "frozen": 0, "first": 0, "second": -size}
    assert held == {"": 0, "frozen": 0, "first": size, "second": 3 * size}
    assert [timeline.forward[name].is_input_new for name in names] == [False, False, False, True]


def test_gradients_of_whole_parameters_stay_whole_at_ulysses_sizes() -> None:
    from mindspeed_autoparallel.profiles.sharded import CostPoint, ModuleCosts
    from mindspeed_autoparallel.runtime.fsdp2.profile import _divided

    costs = ModuleCosts(
        at=CostPoint(), forward_us=8.0, backward_us=16.0, backward_transient_bytes=1000, made_gradient_bytes=600
    )
    halves = _divided(costs, 2, CostPoint(ulysses_size=2))
    assert (halves.forward_us, halves.made_gradient_bytes, halves.backward_transient_bytes) == (4.0, 600, 800)


@pytest.mark.parametrize("interval", [1, 4, 10])
def test_the_comparison_is_printed_once_whatever_steps_the_host_logs(
    monkeypatch: pytest.MonkeyPatch, interval: int
) -> None:
    from mindspeed_autoparallel.runtime.fsdp2.apply import _Comparison

    engine = type(
        "TrainEngine", (), {"train_step": lambda self: None, "training_log": lambda self, step, elapsed: None}
    )
    compared: list[int] = []
    comparison = _Comparison(None, 5)  # type: ignore[arg-type]  # the plan is only printed
    monkeypatch.setattr(comparison, "_compare", lambda device: compared.append(comparison._step))
    comparison.attach(types.SimpleNamespace(module=types.SimpleNamespace(TrainEngine=engine)))  # type: ignore[arg-type]
    running = engine()
    for step in range(1, 31):
        running.train_step()
        if step % interval == 0:
            running.training_log(step, 0.1)
    assert compared == [max(5, -(-5 // interval) * interval)]
    assert comparison._times_ms
