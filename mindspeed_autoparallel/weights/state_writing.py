"""The state of Adam for the rank folders of another layout, written without Megatron."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from mindspeed_autoparallel.weights.architecture import TEXT
from mindspeed_autoparallel.weights.flat_state_writing import write_distributed
from mindspeed_autoparallel.weights.layouts import CheckpointLayout
from mindspeed_autoparallel.weights.parameter_groups import groups_of_rank, inner
from mindspeed_autoparallel.weights.pickles import load_tensors_only
from mindspeed_autoparallel.weights.placement import Entry
from mindspeed_autoparallel.weights.plain_state_writing import storable, write_plain
from mindspeed_autoparallel.weights.rank_files import chunk_keys
from mindspeed_autoparallel.weights.rank_folders import RankFolderSource
from mindspeed_autoparallel.weights.spelling import EACH, GROUPED, Spelling, forms_of
from mindspeed_autoparallel.weights.state_order import OrderedState, Place, RankFile

_OF_TORCH_DIST = ("args", "optimizer", "content_metadata")
"""What stands elsewhere in a rank's file, or in none."""


def why_state_stays(weights: RankFolderSource, layout: CheckpointLayout, spelling: Spelling) -> str | None:
    """Return why the optimizer's state of ``weights`` cannot follow into rank folders of ``layout``; None if it can."""
    architecture = weights.architecture
    shape = architecture.modules[TEXT]
    if not architecture.is_text_only:
        return "encoders have parameters in an order of their own"
    if shape.num_multi_token:
        return "layers for multi-token prediction hold a second embedding"
    file = weights.any_file()
    content = load_tensors_only(file)
    forms = forms_of(name for key in chunk_keys(content, file) for name in content[key])
    if spelling.implementation not in forms:
        return f"its layers list parameters in another order than those of --transformer-impl {spelling.implementation}"
    if not shape.num_experts:
        return None
    if spelling.experts != EACH or GROUPED in forms:
        return "all experts of a rank lie in one tensor"
    if (layout.expert_size > 1) != (weights.expert_size > 1):
        return "experts have an optimizer of their own under expert parallelism alone"
    return None


class StateOfRanks(OrderedState):
    """The optimizer's state, written beside the weights."""

    def write_stage(self, stage: int, files: Mapping[Place, RankFile]) -> dict[Place, dict[str, object]]:
        """Write the state of one pipeline stage; return what the file of each rank holds of it beside the weights."""
        chunks = [self.parameters(virtual, stage) for virtual in range(self.layout.virtual_size)]
        if self.state.buffer_key is None:
            optimizers = write_plain(self, chunks, files)
        else:
            write_distributed(self, chunks, files)
            optimizers = {
                place: [self._settings(number, file, chunks) for number in range(len(self.state.parts))]
                for place, file in files.items()
            }
        common = {name: value for name, value in self.state.common.items() if name not in _OF_TORCH_DIST}
        found: dict[Place, dict[str, object]] = {}
        for place, file in files.items():
            parts = optimizers[place]
            found[place] = {
                **storable(common, file.file),
                "args": self._arguments(),
                "optimizer": parts if len(parts) > 1 else parts[0],
            }
        return found

    def _settings(self, number: int, file: RankFile, chunks: list[list[Entry]]) -> dict[str, object]:
        """Return what a rank's file of weights holds of the distributed optimizer ``number``."""
        part = self.state.parts[number]
        groups = groups_of_rank(part, self.held_by(file, number, chunks))
        held = {**inner(part), "param_groups": [dict(group) for group in groups]}
        written: dict[str, object] = storable(held if inner(part) is part else {**part, "optimizer": held}, file.file)
        return written

    def _arguments(self) -> Namespace:
        """Return the arguments that the training compares its own with, and its position in the data."""
        given = vars(self.state.common["args"])
        return Namespace(
            **{
                **given,
                "ckpt_format": "torch",
                "tensor_model_parallel_size": self.layout.tensor_size,
                "pipeline_model_parallel_size": self.layout.pipeline_size,
                "expert_model_parallel_size": self.layout.expert_size,
            }
        )
