"""What the launch scripts start; the same as ``python -m mindspeed_autoparallel.reference.pretrain_vlm``."""

import mindspeed_autoparallel  # noqa: F401  # first: before megatron
from mindspeed_autoparallel.reference.pretrain_vlm import main

if __name__ == "__main__":
    main()
