"""Reads launch flags with a MindSpeed host's own parser and validators; prints which fail as JSON.

host_flags.py mindspeed_llm|mindspeed_mm < {name: [words, devices]}
"""

import json
import os
import sys

host = sys.argv[1]
sys.argv = ["pretrain_gpt.py"]
import mindspeed_autoparallel  # noqa: E402, F401  # before megatron

if host == "mindspeed_llm":
    from mindspeed_llm import megatron_adaptor  # noqa: F401
else:
    import mindspeed.megatron_adaptor  # noqa: F401
from megatron.training import arguments as megatron_arguments  # noqa: E402

provider = None
if host == "mindspeed_mm":
    from mindspeed_mm.configs.config import mm_extra_args_provider as provider


def failure(words: list[str], devices: int) -> str:
    """Return why the host refuses ``words``, or nothing."""
    sys.argv = ["pretrain_gpt.py", *words]
    os.environ.update(WORLD_SIZE=str(devices), RANK="0", LOCAL_RANK="0")
    try:
        found = megatron_arguments.parse_args(provider)
        if host == "mindspeed_llm" or "--mm-model" in words:  # MindSpeed-MM's validators read that file
            megatron_arguments.validate_args(found, {"tokenizer_type": "NullTokenizer"})
    except (Exception, SystemExit) as error:
        return repr(error)
    return ""


cases: dict[str, tuple[list[str], int]] = json.load(sys.stdin)
found = {name: failure(*case) for name, case in cases.items()}
print(json.dumps({name: reason for name, reason in found.items() if reason}))
