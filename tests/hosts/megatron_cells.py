"""Cells of the table hosts x features: tiny models of Megatron-LM's own scripts, run in a source checkout on CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from host_runs import Ran

ROOT = Path(__file__).parents[2]
COMMON = [
    "--micro-batch-size",
    "1",
    "--tokenizer-type",
    "NullTokenizer",
    "--make-vocab-size-divisible-by",
    "8",
    "--lr",
    "1e-3",
    "--train-iters",
    "3",
    "--eval-interval",
    "1000",
    "--eval-iters",
    "0",
    "--transformer-impl",
    "local",
    "--no-gradient-accumulation-fusion",
    "--no-rope-fusion",
    "--no-masked-softmax-fusion",
    "--no-persist-layer-norm",
    "--num-workers",
    "0",
    "--normalization",
    "RMSNorm",
    "--disable-bias-linear",
    "--position-embedding-type",
    "rope",
    "--log-interval",
    "1",
    "--distributed-backend",
    "gloo",
    "--hidden-dropout",
    "0",
    "--attention-dropout",
    "0",
    "--seed",
    "1",
    "--num-layers",
    "4",
    "--hidden-size",
    "64",
    "--ffn-hidden-size",
    "160",
    "--num-attention-heads",
    "4",
]
GPT = [
    "--seq-length",
    "64",
    "--max-position-embeddings",
    "64",
    "--global-batch-size",
    "8",
    "--mock-data",
    "--swiglu",
    "--untie-embeddings-and-output-weights",
    "--use-distributed-optimizer",
]
EXPERTS = [
    "--num-experts",
    "4",
    "--moe-router-topk",
    "2",
    "--moe-token-dispatcher-type",
    "alltoall",
    "--moe-ffn-hidden-size",
    "96",
    "--moe-router-load-balancing-type",
    "none",
]
LATENT = [
    "--multi-latent-attention",
    "--q-lora-rank",
    "32",
    "--kv-lora-rank",
    "32",
    "--qk-head-dim",
    "16",
    "--qk-pos-emb-head-dim",
    "8",
    "--v-head-dim",
    "16",
]
VLM = [
    "--seq-length",
    "576",
    "--max-position-embeddings",
    "1024",
    "--decoder-seq-length",
    "600",
    "--global-batch-size",
    "4",
    "--img-h",
    "56",
    "--img-w",
    "56",
    "--patch-dim",
    "14",
    "--split",
    "100,0,0",
    "--ckpt-format",
    "torch",
]
HYBRID = [
    *GPT,
    *("--hybrid-layer-pattern", "M-*-M-", "--spec", "local_hybrid", "hybrid_stack_spec"),
    *("--mamba-state-dim", "16", "--mamba-head-dim", "16", "--mamba-num-groups", "2"),
]
"""The kernels and the stack are stand-ins (``hybrid_stand_ins``); einops must be installed."""
SCRIPTS = {"vlm": "pretrain_vlm.py", "hybrid": "pretrain_hybrid.py"}
MODELS = {
    "dense": GPT,
    "gqa": [*GPT, "--group-query-attention", "--num-query-groups", "2"],
    "tied": [word for word in GPT if word != "--untie-embeddings-and-output-weights"],
    "moe": [*GPT, *EXPERTS],
    "first_dense": [*GPT, *EXPERTS, "--moe-layer-freq", "([0]*1+[1]*3)"],
    "mla": [*GPT, *LATENT],
    "mtp": [*GPT, "--mtp-num-layers", "1"],
    "hybrid": HYBRID,
    "vlm": VLM,
}
_MAIN = 'if __name__ == "__main__":\n'
_SAME_START = "    import same_start\n\n    same_start.install()\n"
NODE = ["--nnodes", "1", "--nproc-per-node", "2", "--node-rank", "0", "--master-addr", "localhost"]


@dataclass(frozen=True, kw_only=True)
class Host:
    """A source checkout of Megatron-LM, and a copy of its scripts with our import in front."""

    sources: Path
    folder: Path

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor number."""
        text = (self.sources / "megatron" / "core" / "package_info.py").read_text()
        major, minor = (int(re.search(rf"^{name} = (\d+)", text, re.MULTILINE)[1]) for name in ("MAJOR", "MINOR"))
        return major, minor

    def flags(self, model: str) -> list[str]:
        """The model's flags as this release spells them."""
        # 0.12's mock data has tokens up to 4095, whatever the tokenizer. With the tokenizer's last one it is a multiple of
        # 8 x TP: Megatron's loss counts rows that pad a vocabulary, so TP would change it.
        vocabulary = ["--vocab-size", "4095" if self.release < (0, 13) else "511"]
        words = COMMON[: COMMON.index("--num-layers")] + COMMON[COMMON.index("--num-layers") + 2 :]
        common = words if model == "hybrid" else COMMON
        return [*common, *MODELS[model], *vocabulary, *(["--use-mcore-models"] if self.release < (0, 17) else [])]

    def script(self, model: str) -> Path:
        """The script of ``model``, with our import, and with the same parameters in every layout."""
        name = SCRIPTS.get(model, "pretrain_gpt.py")
        copy = self.folder / name
        text = (self.sources / name).read_text()
        copy.write_text("import mindspeed_autoparallel\n" + text.replace(_MAIN, _MAIN + _SAME_START))
        return copy

    def run(self, words: list[str], timeout_s: float = 900.0, **variables: str) -> Ran:
        """Run a Python command in the checkout's environment on CPU, with more ``variables``."""
        here = Path(__file__).parent
        folders = (self.sources, ROOT, here, here / "hybrid_stand_ins", os.environ.get("PYTHONPATH", ""))
        path = os.pathsep.join(map(str, folders))
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "MINDSPEED_AUTOPARALLEL_DEVICE": "cpu",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            **variables,
        }
        begin = time.monotonic()
        done = subprocess.run(
            [sys.executable, *words],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Ran(exit_code=done.returncode, output=done.stdout, seconds=time.monotonic() - begin)

    def search(self, model: str, port: int, *more: str) -> Ran:
        """``--auto-parallel-mm`` for four devices; its files are in ``folder``."""
        places = ["--auto-parallel-work-dir", str(self.folder / "work"), "--auto-parallel-output-dir", str(self.folder)]
        cluster = ["--simulated-nnodes", "1", "--simulated-nproc-per-node", "4"]
        words = ["--auto-parallel-mm", *NODE, "--master-port", str(port), *cluster, *places, *more]
        return self.run([str(self.script(model)), *self.flags(model), *words])

    def plan(self) -> dict:
        """What the search wrote."""
        return json.loads((self.folder / "plan.json").read_text())
