"""Rank 0 sends tensors and gives their data up before it waits; rank 1 receives them later."""

import json
import os
import time

from mindspeed_autoparallel.runtime.devices.selection import prepare_for_megatron

prepare_for_megatron()

import torch  # noqa: E402

NUM, SIZE = 20, 200_000
torch.distributed.init_process_group("gloo")
if os.environ["RANK"] == "0":
    works = []
    for number in range(NUM):
        tensor = torch.full((SIZE,), float(number))
        works.append(torch.distributed.isend(tensor=tensor, dst=1))
        tensor.data = torch.empty((1,))
        _taken_again = torch.full((SIZE,), -1.0)
    for work in works:
        work.wait()
else:
    time.sleep(0.5)
    received = [torch.empty(SIZE) for _ in range(NUM)]
    for work in [torch.distributed.irecv(tensor, src=0) for tensor in received]:
        work.wait()
    wrong = sum(not bool((tensor == number).all()) for number, tensor in enumerate(received))
    print("RESULT " + json.dumps({"wrong": wrong}))
torch.distributed.destroy_process_group()
