"""The profile of a command: from a file, or computed from shapes and the device catalogue."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_autoparallel.cli import _unused_flags
from mindspeed_autoparallel.cost.analytic.request_keys import KNOWN
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.profiles import MeasuredAt, Profile
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.units import GIB
from mindspeed_autoparallel.whole_numbers import COUNT, LARGE_COUNT, POSITIVE, Positive

if TYPE_CHECKING:
    from mindspeed_autoparallel.predict.hugging_face_modules import SampleMedia

_FLAGS_OF_THEIR_OWN = {
    "gbs": "the batch is --global-batch-size",
    "overlap_grad_reduce": "the flag is --overlap-grad-reduce",
    "moe_a2a_overlap": "the flag is --overlap-moe-expert-parallel-comm",
    **dict.fromkeys(
        (
            *("mbs", "recompute", "recompute_method", "recompute_num_layers", "recompute_modules"),
            *("recompute_per_pp_rank", "recompute_extra"),
        ),
        "the search chooses it; predict prices one choice",
    ),
}
_MOST_PIXELS = 2**16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--profile`` and its alternatives."""
    add = parser.add_argument
    add("--profile", type=Path, help="our profile or MindSpeed's model_profile.json")
    add(
        "--profile-source",
        choices=("file", "analytic"),
        help="analytic: computed for --model on --device, without measurements (default: analytic if "
        "--model is given, else file)",
    )
    add("--model", type=Path, metavar="FILE", help="with analytic: model sizes as JSON, or a Hugging Face config.json")
    add(
        "--train",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with analytic: a training switch from docs/predict.md, such as precision=fp8 "
        "(repeatable); --script and the printed flags include it",
    )
    add(
        "--seq-length",
        type=LARGE_COUNT,
        help="with analytic: tokens per sample in the decoder, if --model does not state them",
    )
    _add_media_flags(parser)
    add("--device", metavar="NAME", help="with analytic: device from the catalogue, such as H100 or 910B")
    add(
        "--device-file",
        type=Path,
        action="append",
        default=[],
        help="with analytic: file that describes a device (repeatable)",
    )
    add(
        "--network-gbit-per-s",
        type=POSITIVE,
        metavar="RATE",
        help="with analytic: network bandwidth of one node, summed over its devices (default: the catalogue's)",
    )
    add("--profile-tensor-size", type=COUNT, default=1, help="TP at which MindSpeed's file was measured")
    add_stages_link(parser)


def add_stages_link(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--p2p-gbit-per-s",
        type=float,
        default=25 * GIB * 8 / 1e9,
        metavar="RATE",
        help="bandwidth between stages, for MindSpeed's file (default: 214.7, which is 25 GiB/s)",
    )


def read_profile_of(arguments: argparse.Namespace) -> Profile:
    """Return the profile that the flags describe; ``ConfigError`` names a missing or useless flag."""
    if _is_analytic(arguments):
        _check_analytic(arguments)
        profile = _computed(arguments)
        print(f"analytic: nothing was measured; costs are computed for {profile.provenance.device}", file=sys.stderr)
        path = arguments.model.absolute()
        return named(profile, path.parent.name if path.stem in ("config", "model") else path.stem)
    _unused_flags.refuse(
        arguments,
        _unused_flags.COMPUTED,
        "requires --profile-source analytic; a profile file already has its model and device.",
    )
    if arguments.profile is None:
        raise ConfigError("--profile is missing. Without measurements: --model FILE --device NAME.")
    from mindspeed_autoparallel.profiles import read_profile

    profile = read_profile(
        arguments.profile, tensor_size=arguments.profile_tensor_size, p2p_gbps=arguments.p2p_gbit_per_s * 1e9 / 8 / GIB
    )
    if profile.memory_semantics != "mindspeed":
        _unused_flags.refuse(arguments, _unused_flags.MINDSPEED_FILE, f"{arguments.profile} has this itself.")
    return profile


def model_shape(arguments: argparse.Namespace) -> Mapping[str, object] | None:
    """Return the request keys for a one-module ``--model``; ``None`` for other models."""
    if not _is_analytic(arguments):
        return None
    from mindspeed_autoparallel.predict.model_file import read_model_file

    sections = read_model_file(arguments.model, arguments.seq_length, _media_of_sample(arguments))
    return sections[0].shape if len(sections) == 1 else None


def _is_analytic(arguments: argparse.Namespace) -> bool:
    source = arguments.profile_source or ("analytic" if arguments.model and not arguments.profile else "file")
    return bool(source == "analytic")


def _train(words: Sequence[str]) -> dict[str, object]:
    """Parse ``KEY=VALUE`` words into the section ``train`` of a request."""
    found: dict[str, object] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not text:
            raise ConfigError(f"--train must be KEY=VALUE such as precision=fp8, got {shown(repr(word))}.")
        if key in _FLAGS_OF_THEIR_OWN:
            raise ConfigError(f"--train {key}: {_FLAGS_OF_THEIR_OWN[key]}.")
        if key not in KNOWN["train"]:
            near = difflib.get_close_matches(key, KNOWN["train"] - _FLAGS_OF_THEIR_OWN.keys(), 1)
            hint = f"did you mean {near[0]}?" if near else "docs/predict.md lists the keys of train."
            raise ConfigError(f"--train {shown(repr(key))} is not a training switch; {hint}")
        if key in found:
            raise ConfigError(f"--train {key} is given twice.")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found


def with_unoverlapped_step(arguments: argparse.Namespace, plan: Plan) -> Plan:
    """Add the step time without ``--tp-comm-overlap`` to a plan priced with it; return other plans unchanged."""
    layout = replace(plan.layout, overlap_tensor_parallel=False)
    if not _is_analytic(arguments) or layout == plan.layout or plan.hetero is not None or plan.data:
        return plan
    from mindspeed_autoparallel.planner.evaluate import evaluate
    from mindspeed_autoparallel.planner.placement import ModulePlacement
    from mindspeed_autoparallel.planner.rank_memory import measured_at

    profile = _computed(arguments, {"tp_comm_overlap": False}, [measured_at(layout)])
    placement = ModulePlacement.of_plan(plan)
    found = evaluate(profile, plan.cluster, layout, placement, plan.global_batch_size, with_timeline=False)
    return replace(plan, extra=replace(plan.extra, unoverlapped_us=found.step.total_us))


def _check_analytic(arguments: argparse.Namespace) -> None:
    if arguments.profile is not None:
        raise ConfigError(
            "--profile reads costs from a file, --profile-source analytic computes them; give one of them."
        )
    _unused_flags.refuse(arguments, _unused_flags.MINDSPEED_FILE, "only MindSpeed's profile file lacks this.")
    for flag in ("model", "device"):
        if getattr(arguments, flag) is None:
            raise ConfigError(f"--profile-source analytic needs --{flag}.")


def _computed(
    arguments: argparse.Namespace,
    switches: Mapping[str, object] | None = None,
    points: Iterable[MeasuredAt] | None = None,
) -> Profile:
    """Return computed costs at all sizes worth trying, or at ``points``; ``switches``: a request's ``train``."""
    from mindspeed_autoparallel.cost.catalogue import find_device, read_device
    from mindspeed_autoparallel.predict.analytic_profile import analytic_profile, stated_train
    from mindspeed_autoparallel.predict.model_file import read_model_file

    device = find_device(arguments.device, tuple(read_device(path) for path in arguments.device_file))
    sections = read_model_file(arguments.model, arguments.seq_length, _media_of_sample(arguments))
    return analytic_profile(
        sections,
        device,
        arguments.nproc_per_node,
        network_gbit_per_s=arguments.network_gbit_per_s,
        command=" ".join(["mindspeed-autoparallel", *sys.argv[1:]]),
        train=stated_train(sections, device, {**_train(arguments.train), **(switches or {})}),
        points=points,
    )


def named(profile: Profile, name: str) -> Profile:
    """Return ``profile`` with a readable name for its model."""
    return replace(profile, model=replace(profile.model, name=name)) if name else profile


def _add_media_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for a sample's images and audio, for the config.json of a vision-language or omni model."""
    add = parser.add_argument
    add(
        "--images-per-sample",
        type=Positive(most=10**6),
        metavar="N",
        help="mean images per sample, if --model has a vision encoder (default: 1)",
    )
    add("--image-size", metavar="HxW", help="pixels of an image at the encoder's input (default: 448x448)")
    add(
        "--patches-per-sample",
        type=LARGE_COUNT,
        metavar="N",
        help="mean patches per sample, instead of images and their size (default: from --data)",
    )
    add(
        "--audio-seconds",
        type=Positive(most=10**6),
        metavar="S",
        help="mean audio length of a sample, if --model has an audio encoder (default: 30)",
    )
    add("--freeze-encoders", action="store_true", help="do not train the encoders of a config.json")


def _media_of_sample(arguments: argparse.Namespace) -> SampleMedia | None:
    """Return the mean sample that the flags and ``--data`` describe; ``None`` without them."""
    from mindspeed_autoparallel.predict.hugging_face_modules import SampleMedia

    given = tuple(name for name in _unused_flags.MEDIA if getattr(arguments, name) not in (None, False))
    if arguments.data is None and not given:
        return None
    values: dict[str, float | tuple[int, int]] = {}
    patches, frames = _mean_media(arguments)
    if arguments.patches_per_sample is not None or (patches and arguments.images_per_sample is None):
        values["patches"] = arguments.patches_per_sample or patches
    if arguments.images_per_sample is not None:
        values["images"] = arguments.images_per_sample
    if arguments.image_size is not None:
        values["image_size"] = _image_size(arguments.image_size)
    if arguments.audio_seconds is not None:
        values["audio_s"] = arguments.audio_seconds
    elif frames:
        values["audio_frames"] = frames
    if not values and not given:
        return None
    return SampleMedia(**values, frozen_encoders=arguments.freeze_encoders, stated=given)  # type: ignore[arg-type]


def _mean_media(arguments: argparse.Namespace) -> tuple[int, int]:
    """Return patches and audio frames of a mean sample of ``--data``; zeros without it."""
    if arguments.data is None:
        return 0, 0
    from mindspeed_autoparallel.data.distribution import Distribution
    from mindspeed_autoparallel.data.work import COLUMNS

    data = Distribution.read(arguments.data)
    means = data.shares() @ data.sizes()
    return round(means[COLUMNS.index("patches")]), round(means[COLUMNS.index("frames")])


def _image_size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})(?:[xX](\d{1,6}))?", text)
    height, width = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not (0 < height <= _MOST_PIXELS and 0 < width <= _MOST_PIXELS):
        raise ConfigError(f"--image-size must be HEIGHTxWIDTH in pixels, up to {_MOST_PIXELS} each, got {text!r}.")
    return height, width
