"""What the launch scripts start: the training of ``reference_vlm``, the package beside this file."""

import mindspeed_autoparallel  # noqa: F401  # first: before megatron
from reference_vlm.pretrain_vlm import main

if __name__ == "__main__":
    main()
