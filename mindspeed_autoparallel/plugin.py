"""Plan and train inside MindSpeed-MM's native FSDP2 trainer: name this module in ``training.plugin``.

    training:
      plugin: [mindspeed_mm/fsdp/models/qwen3vl, mindspeed_autoparallel.plugin]

Then ``--auto-parallel-mm`` or ``--auto-parallel-plan plan.json`` after the YAML's name works as in Megatron
(docs/fsdp2.md). This is a module, not a package: the trainer imports every module of a package that is named there.
"""

from mindspeed_autoparallel.runtime.fsdp2.entry import install

install()
