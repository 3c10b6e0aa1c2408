"""Finding layers, marking their boundaries, and turning marks into costs, on a small torch model."""

import pytest

torch = pytest.importorskip("torch")

from mindspeed_autoparallel.errors import ProfileError  # noqa: E402
from mindspeed_autoparallel.runtime.devices.cpu.storages import TrackedStorages  # noqa: E402
from mindspeed_autoparallel.runtime.profiling.measure.costs import Run, batch_bytes, block_costs  # noqa: E402
from mindspeed_autoparallel.runtime.profiling.measure.recorder import Recorder  # noqa: E402
from mindspeed_autoparallel.runtime.profiling.measure.state import execution_order, parameters_by_block  # noqa: E402
from mindspeed_autoparallel.runtime.profiling.measure.structure import find_stacks, ties_embeddings, unwrap  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
HIDDEN, ROWS = 32, 64


class Clock:
    """A layer says what it takes; looking at the clock takes a microsecond."""

    now = 0.0

    def __call__(self):
        self.now += 1e-6
        return self.now


CLOCK = Clock()


class Layer(torch.nn.Module):
    def __init__(self, seconds=0.0):
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.seconds = seconds

    def forward(self, hidden_states):
        CLOCK.now += self.seconds
        return torch.nn.functional.gelu(self.linear(hidden_states))


class Encoder(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.patch = torch.nn.Linear(HIDDEN, HIDDEN)
        self.blocks = torch.nn.ModuleList([Layer(seconds), Layer(seconds)])
        self.merger = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return self.merger(x)


class Host(torch.nn.Module):
    def __init__(self, encoder_seconds=0.0, decoder_seconds=0.0):
        super().__init__()
        self.image_encoder = Encoder(encoder_seconds)
        self.text_decoder = Encoder(decoder_seconds)

    def forward(self, x):
        return self.text_decoder(self.image_encoder(x))


def measure(model, memory=None):
    stacks = find_stacks(model)
    recorder = Recorder(stacks, CLOCK, memory, model)

    def host_step(x):
        return model(x), lambda output: output.sum()

    with recorder.attached():
        output, loss = recorder.forward_step(host_step)(torch.randn(ROWS, HIDDEN))
        loss(output).backward()
        recorder.mark("backward end")
    side = {name: inputs.total_and_kept_bytes() for name, inputs in recorder.side.items()}
    return Run(recorder.marks, stacks, side)


def test_stacks_are_named_by_the_models_own_children():
    assert [stack.name for stack in find_stacks(Host())] == ["image_encoder", "text_decoder"]


def test_a_bare_language_model_is_the_text_decoder():
    model = torch.nn.Module()
    model.decoder = torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList([Layer(), Layer()])
    (stack,) = find_stacks(model)
    assert (stack.name, stack.result_key, stack.path) == ("text_decoder", "llm", "decoder.layers")


def test_layers_of_multi_token_prediction_are_no_stack_of_their_own():
    model = torch.nn.Module()
    model.decoder, model.mtp = torch.nn.Module(), torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList([Layer(), Layer()])
    model.mtp.layers = torch.nn.ModuleList([Layer(), Layer()])
    (stack,) = find_stacks(model)
    assert (stack.name, stack.path) == ("text_decoder", "decoder.layers")


def test_lists_inside_a_layer_are_no_stacks():
    model = Host()
    for layer in model.text_decoder.blocks:
        layer.experts = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    assert len(find_stacks(model)) == 2


def test_a_model_without_repeated_layers_is_refused_in_words():
    with pytest.raises(ProfileError, match="no repeated layers"):
        find_stacks(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_wrappers_and_the_list_of_chunks_are_taken_off():
    class Float16Module(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = Host()
    assert unwrap([Float16Module(model)]) is model


def test_time_goes_to_the_block_that_spends_it():
    run = measure(Host(encoder_seconds=0.03, decoder_seconds=0.01))
    costs = block_costs([run], run, lambda start, end: end - start)
    encoder, decoder = costs["image_encoder"]["layer"], costs["text_decoder"]["layer"]
    assert encoder["forward_us"] == pytest.approx(30_000, abs=5)
    assert decoder["forward_us"] == pytest.approx(10_000, abs=5)
    assert costs["image_encoder"]["pre"]["forward_us"] < 5


class Wide(Layer):
    """Another kind of layer: it holds more."""

    def __init__(self, seconds):
        super().__init__(seconds)
        self.gate = torch.nn.Linear(HIDDEN, HIDDEN)


def test_layers_of_two_kinds_are_two_blocks_each_with_its_own_time_and_parameters():
    model = Host()
    model.text_decoder.blocks = torch.nn.ModuleList([Layer(0.01), Wide(0.03), Wide(0.05)])
    run = measure(model)
    costs = block_costs([run], run, lambda start, end: end - start)["text_decoder"]
    assert list(costs) == ["pre", "layer", "layer:1", "post"]
    assert costs["layer"]["forward_us"] == pytest.approx(10_000, abs=5)
    assert costs["layer:1"]["forward_us"] == pytest.approx(40_000, abs=5)
    stacks = find_stacks(model)
    parameters = parameters_by_block(model, stacks, [])["text_decoder"]
    assert [len(parameters[block]) for block in ("layer", "layer:1")] == [2, 2 * 4]


def test_saved_bytes_of_a_layer_are_what_autograd_keeps():
    with TrackedStorages() as memory:
        run = measure(Host(), memory)
    layer = block_costs([run], run, lambda start, end: end - start)["text_decoder"]["layer"]
    # The linear's output (gelu needs it) and the layer's output (the next one's input).
    assert layer["saved_bytes"] == 2 * ROWS * HIDDEN * 4
    assert layer["output_bytes"] == ROWS * HIDDEN * 4
    assert layer["backward_peak_bytes"] >= 2 * ROWS * HIDDEN * 4


class LayerWithTable(torch.nn.Module):
    def __init__(self, saves_table):
        super().__init__()
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)
        self.saves_table = saves_table

    def forward(self, hidden_states, table):
        hidden_states = self.linear(hidden_states)
        # A product saves both factors, a sum neither.
        return hidden_states * table if self.saves_table else hidden_states + table


class HostWithTable(torch.nn.Module):
    def __init__(self, saves_table):
        super().__init__()
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([LayerWithTable(saves_table), LayerWithTable(saves_table)])

    def forward(self, x, unused):
        table = torch.ones(ROWS, HIDDEN)
        x = x * 1.0
        for layer in self.decoder.layers:
            x = layer(x, table=table)
        return x * 1.0


@pytest.mark.parametrize("saves_table", [False, True])
def test_the_batch_and_what_layers_are_given_beside_the_stream_belong_to_no_block(saves_table):
    model = HostWithTable(saves_table)
    stacks = find_stacks(model)
    size = ROWS * HIDDEN * 4
    with TrackedStorages() as memory:
        recorder = Recorder(stacks, CLOCK, memory, model)

        def host_step():
            x, unused = torch.randn(ROWS, HIDDEN), torch.randn(3 * ROWS, HIDDEN)
            return model(x, unused), lambda output: output.sum()

        with recorder.attached():
            output, loss = recorder.forward_step(host_step)()
            loss(output).backward()
            recorder.mark("backward end")
        side = {name: inputs.total_and_kept_bytes() for name, inputs in recorder.side.items()}
        run = Run(recorder.marks, stacks, side)
    costs = block_costs([run], run, lambda start, end: end - start)["text_decoder"]
    assert batch_bytes(run) == (4 * size, 0)
    assert side["text_decoder"] == (size, size if saves_table else 0)
    assert recorder.input_bytes == {"text_decoder": 4 * size}
    assert costs["pre"]["saved_bytes"] == size
    total = sum(costs[block]["saved_bytes"] * count for block, count in (("pre", 1), ("layer", 2), ("post", 1)))
    # Each layer's input, a product's factors, and the output that the caller holds; the last value is in no graph.
    kept = run.marks["forward end"].live_bytes - run.marks["forward begin"].live_bytes
    assert total + side["text_decoder"][1] == kept


def test_a_frozen_encoder_has_no_backward():
    model = Host(encoder_seconds=0.01)
    model.image_encoder.requires_grad_(False)
    run = measure(model)
    costs = block_costs([run], run, lambda start, end: end - start)
    assert [costs["image_encoder"][block]["backward_us"] for block in ("pre", "layer", "post")] == [0.0, 0.0, 0.0]
    assert find_stacks(model)[0].frozen
    assert costs["text_decoder"]["layer"]["backward_us"] > 0


def test_every_parameter_belongs_to_exactly_one_block():
    model = Host()
    stacks = find_stacks(model)
    order, handles = execution_order(model, stacks)
    model(torch.randn(ROWS, HIDDEN))
    for handle in handles:
        handle.remove()
    blocks = parameters_by_block(model, stacks, order)
    counted = [
        parameter for blocks_of in blocks.values() for parameters in blocks_of.values() for parameter in parameters
    ]
    assert len(counted) == len(list(model.parameters()))
    for name in ("image_encoder", "text_decoder"):
        top = getattr(model, name)
        assert {id(p) for p in blocks[name]["pre"]} == {id(p) for p in top.patch.parameters()}
        assert {id(p) for p in blocks[name]["post"]} == {id(p) for p in top.merger.parameters()}


def test_hooks_are_gone_after_a_failure():
    model = Host()
    recorder = Recorder(find_stacks(model), CLOCK, None)
    with pytest.raises(RuntimeError), recorder.attached():
        raise RuntimeError
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("said", "flag", "tied"), [(True, True, True), (False, False, False), (None, True, False)])
def test_the_built_model_determines_whether_its_embeddings_are_tied(said, flag, tied):
    """MindSpeed-MM's model.json decides, not the flags: a plan must not have an all-reduce that training lacks."""
    import types

    model = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    if said is not None:
        model[0].share_embeddings_and_output_weights = said
    assert ties_embeddings(model, types.SimpleNamespace(untie_embeddings_and_output_weights=flag)) is tied
