"""Position encoding: no checkpoint contains it, so the host needs flags."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.weights.families.sizes import short

_PLAIN = ("default", "mrope", "axial", "")


FLAGS = {
    "llama3": "Megatron has --use-rope-scaling and --rope-scaling-factor",
    "linear": "Megatron has --rotary-seq-len-interpolation-factor",
    "yarn": "Megatron has --position-embedding-type yarn, with latent attention --rope-type yarn and "
    "--rotary-scaling-factor",
}
"""Kind of scaling -> the host's flags for it."""


def rope_scaling(flat: Mapping[str, object], where: str) -> str:
    """Return the kind of rope scaling in ``config.json``: ``rope_scaling``, or ``rope_parameters`` of transformers 5.

    ``rope_parameters`` may have one block per kind of layer (Gemma 3); the first kind that is not plain counts.
    """
    for key in ("rope_scaling", "rope_parameters"):
        value = flat.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {key} must be an object, got {short(value)}.")
        for block in (value, *(one for one in value.values() if isinstance(one, dict))):
            kind = str(block.get("rope_type", block.get("type", "")))[:40]
            if kind not in _PLAIN:
                return kind
    return ""
