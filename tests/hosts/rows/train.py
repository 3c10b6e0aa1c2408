"""Trains drawn rows in one checkout, whose folder is first on PYTHONPATH: ``train.py KIND CHECKOUT SEED FIRST COUNT``."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import draw
import mindspeed_rows
from forked_host import fork, import_libraries, import_megatron, release_of, run_ranks
from host_runs import Ran

from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.units import MIB

COMMON = (
    "--micro-batch-size 1 --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 8 --transformer-impl local "
    "--no-gradient-accumulation-fusion --no-rope-fusion --no-masked-softmax-fusion --no-persist-layer-norm --num-workers 0 "
    "--log-interval 1 --distributed-backend gloo --hidden-dropout 0 --attention-dropout 0 --seed 1 --hidden-size 64 "
    "--ffn-hidden-size 96 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
)
TOLERANCE = 1e-6
_LESS_MEMORY = 0.7
"""Of what the best plan takes: stages, tensor parallelism or recompute must give the rest."""
NORM_TOLERANCE = 1e-3
"""Norms are printed with three decimals."""
_DEPTH = re.compile(r"\bmtp_\d+ loss: ([-+.E0-9]+) ")
_NORM = re.compile(r"iteration +\d+/.* grad norm: ([-+.E0-9]+) ")
_VALIDATION = re.compile(r"validation loss at iteration \d+.*? lm loss value: ([-+.E0-9]+)")
_IMPORT = "import mindspeed_autoparallel\n"
_OWN = """
    def own_arguments(parser):
        parser.add_argument("--own-number", type=int)
        return parser

"""
_OWN_STEP = """
    from megatron.training import training as loop

    their_step = loop.train_step

    def own_step(*args, **kwargs):
        print("own step", flush=True)
        return their_step(*args, **kwargs)

    loop.train_step = own_step
"""
_REPLACED_STEP = """
    import inspect
    import textwrap

    from megatron.training import training as loop

    theirs = inspect.unwrap(loop.train_step)
    exec(compile(textwrap.dedent(inspect.getsource(theirs)), "own_step.py", "exec"), vars(loop))
"""
_CONTEXT = """
    import sys

    from megatron.core.transformer import dot_product_attention

    from mindspeed_autoparallel.runtime.attention.context_parallel import ContextParallelAttention

    local = dot_product_attention.DotProductAttention
    for module in [module for name, module in sys.modules.items() if name.startswith("megatron.")]:
        for name in [name for name, value in vars(module).items() if value is local]:
            setattr(module, name, ContextParallelAttention)
"""
_DIGEST = """
    import hashlib

    import torch

    digest = hashlib.sha256()
    for chunk in same_start.CHUNKS:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().numpy().tobytes())
    print("parameters", torch.distributed.get_rank(), digest.hexdigest(), flush=True)
"""
_DIGESTS = re.compile(r"^parameters (\d+ \w+)", re.MULTILINE)
_MUST: dict[str, dict[str, object]] = {
    "plans": {},
    "context": {"context": 2, "script": ""},
    "resume": {"steps": "iterations", "script": "", "distributed": True},
    "digests": {},
    "hybrid": {"kind": "hybrid", "script": ""},
    "search": {"kind": "hybrid", "script": ""},
    "mindspeed": {"kind": "mindspeed"},
}


@dataclass(frozen=True)
class Figures:
    """What a training printed, step by step."""

    losses: list[float]
    depths: list[float]
    """Losses of multi-token prediction, of every depth."""
    norms: list[float]
    validation: list[float]

    @classmethod
    def of(cls, ran: Ran) -> Figures:
        """Read the output."""
        found = (_DEPTH.findall(ran.output), _NORM.findall(ran.output), dict.fromkeys(_VALIDATION.findall(ran.output)))
        return cls(ran.losses, *([float(text) for text in texts] for texts in found))

    def then(self, later: Figures) -> Figures:
        """Return the figures of a training that went on."""
        names = ("losses", "depths", "norms", "validation")
        return Figures(*(getattr(self, name) + getattr(later, name) for name in names))

    def differs(self, other: Figures) -> str:
        """Return what differs from ``other``, in words; nothing where all is as near as it has to be."""
        for name, mine, theirs, tolerance in (
            ("losses", self.losses, other.losses, TOLERANCE),
            ("losses of predictions", self.depths, other.depths, TOLERANCE),
            ("validation losses", self.validation, other.validation, TOLERANCE),
            ("gradient norms", self.norms, other.norms, NORM_TOLERANCE),
        ):
            if len(mine) != len(theirs):
                return f"{len(mine)} {name}, one process has {len(theirs)}"
            worst = max((abs(a - b) / max(abs(b), 1e-30) for a, b in zip(mine, theirs, strict=True)), default=0.0)
            if worst > tolerance * 1.2:
                return f"{name} differ by {worst:.2g}: {mine} and {theirs}"
        return "" if self.losses else "no losses"


class Checkout:
    """Trainings in one checkout."""

    def __init__(self, sources: Path, folder: Path) -> None:
        self.sources, self.folder, self.runs = sources, folder, 0
        places = [sources, *map(Path, os.environ["PYTHONPATH"].split(os.pathsep))]
        self.release = tuple(map(int, release_of(places).split(".")))
        self.of_mindspeed = (sources / "mindspeed_llm").is_dir()
        self.seconds = 0.0
        self.data = folder / "data" / "text"
        if not self.of_mindspeed:
            self._write_data()

    def _write_data(self) -> None:
        import random

        import torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self.data.parent.mkdir()
        draw_ = random.Random(0)
        builder = IndexedDatasetBuilder(f"{self.data}.bin")
        for _ in range(80):
            tokens = torch.tensor([draw_.randrange(511) for _ in range(draw_.randint(30, 90))])
            builder.add_document(tokens, [len(tokens)])
        builder.finalize(f"{self.data}.idx")

    def script(self, row: draw.Row, start: str = "", end: str = "") -> str:
        """Return the row's program with our import, the same parameters in every layout, and what the row adds."""
        text, kind = (self.sources / row.program).read_text(), row.script
        main = re.search(r"^if __name__ == ['\"]__main__['\"]:.*\n", text, re.MULTILINE)
        assert main is not None
        body = text[main.end() :]
        added = "    import same_start\n\n    same_start.install()\n" + start
        if kind == "own arguments":
            added += _OWN
            body, count = re.subn(r"extra_args_provider=[^,\n]+", "extra_args_provider=own_arguments", body)
            if not count:
                body = body.replace("forward_step,\n", "forward_step,\n        extra_args_provider=own_arguments,\n", 1)
        added += {"own step": _OWN_STEP, "replaced step": _REPLACED_STEP}.get(kind, "")
        return _IMPORT + text[: main.end()] + added + body + end

    def run(self, script: str, words: str, world: int = 1) -> Ran:
        """Run ``script`` with the common words and ``words``."""
        self.runs += 1
        folder = self.folder / str(self.runs)
        folder.mkdir()
        file = folder / "training.py"
        file.write_text(script)
        vocabulary = "4095" if self.release < (0, 13) else "511"
        mcore = "--use-mcore-models" if self.release < (0, 17) else ""
        common = mindspeed_rows.common(COMMON) if self.of_mindspeed else COMMON
        line = f"{common} --global-batch-size {draw.BATCH} --vocab-size {vocabulary} {mcore} {words}"
        line = line.format(data=self.data, cache=self.folder / "cache")
        ran = run_ranks(file, line.split(), world, folder, limit_s=900)
        self.seconds += ran.seconds
        return ran

    def context(self, row: draw.Row) -> list[str]:
        """As ``plans``, with context parallelism: attention over gathered keys stands in for Transformer Engine's."""
        return self.plans(row, self.script(row, _CONTEXT))

    def hybrid(self, row: draw.Row) -> list[str]:
        """As ``plans``, of trainings whose kernels are stand-ins: hybrid models, and MindSpeed-LLM's."""
        return self.plans(row)

    mindspeed = hybrid

    def search(self, row: draw.Row) -> list[str]:
        """Search on two processes for two devices, in the place of the drawn plans; then again in less memory."""
        script, folder = self.script(row), self.folder / "searched"
        place = "--nnodes 1 --nproc-per-node 2 --node-rank 0 --master-addr localhost --master-port 29873"
        place += f" --simulated-nnodes 1 --simulated-nproc-per-node 2 --auto-parallel-work-dir {folder}/work"
        words = f"{row.words} --auto-parallel-mm {place} --auto-parallel-output-dir {folder}"
        plans: list[Plan] = []
        while len(plans) < 2:
            found = self.run(script, words)
            if found.exit_code:
                return [_error(found)]
            plans.append(Plan.read(folder / "plan.json"))
            limit = max(memory.peak_bytes for memory in plans[0].memory) * _LESS_MEMORY / MIB
            words += f" --auto-parallel-profile-file {folder}/work/profile.json"
            words += f" --auto-parallel-memory-limit-mib {limit:.3f}"
        labels = [f"{plan.layout.label()}, recomputed {plan.recomputed_of('text_decoder', 'full')}" for plan in plans]
        ends = self.plans(replace(row, own_layout="", plans=tuple(plans)))
        return [f"{label}: {end}" for label, end in zip(labels, ends, strict=False)]

    def resume(self, row: draw.Row) -> list[str]:
        """Train three steps by the first plan, and three by each of them, from a copy that ``convert`` made."""
        script, words = self.script(row), row.words.replace("--train-iters 3", "--train-iters 6")
        saved, copy = self.folder / f"saved{row.number}", self.folder / f"copy{row.number}"
        reshardable = "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
        kept = f"{reshardable} --save-interval 3 --exit-interval 3 --save"
        # Data behind a resume may come in another order: one process saves and resumes, too.
        alone = self.folder / f"alone{row.number}"
        halves = [
            self.run(script, f"{words} {kept} {alone}"),
            self.run(script, f"{words} {reshardable} --load {alone}"),
        ]
        for one in halves:
            if one.exit_code:
                return ["one process fails: " + _error(one)]
        whole = Figures.of(halves[0]).then(Figures.of(halves[1]))
        first = self._by_plan(script, f"{words} {kept} {saved}", row.plans[0])
        if first.exit_code:
            return [_error(first)]
        if code := self._convert("resplit", str(saved), str(copy), "--format", "torch_dist"):
            return [f"convert ends with {code}"]
        ends = []
        for plan, source in zip(row.plans, (copy, saved), strict=False):
            ran = self._by_plan(script, f"{words} {reshardable} --load {source}", plan)
            both = Figures.of(first).then(Figures.of(ran))
            ends.append(_error(ran) if ran.exit_code else both.differs(whole) or "equal")
        return ends

    def _convert(self, *words: str) -> int:
        from mindspeed_autoparallel.cli.main import main as command

        child = fork(lambda: int(command(["convert", *words]) or 0))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _by_plan(self, script: str, words: str, plan: Plan) -> Ran:
        file = self.folder / "plan.json"
        plan.write(file)
        words += mindspeed_rows.of_plan(plan) if self.of_mindspeed else ""
        return self.run(script, f"{words} --auto-parallel-plan {file}", plan.layout.num_devices)

    def digests(self, row: draw.Row) -> str:
        """Return losses and a digest of all parameters of the script's own layout, without a flag of ours."""
        own = f"{row.words} {row.own_layout}"
        parallel = "parallel-size" in own
        ran = self.run(self.script(row, end=_DIGEST), own, 2 if parallel or row.number % 2 else 1)
        return _error(ran) if ran.exit_code else f"{Figures.of(ran)} {sorted(set(_DIGESTS.findall(ran.output)))}"

    def plans(self, row: draw.Row, script: str = "") -> list[str]:
        """Return for each plan of ``row`` how it ended: "equal", the line of a refusal, or what is wrong."""
        one = self.run(self.script(row), row.words)
        script = script or self.script(row)
        if one.exit_code:
            return ["one process fails: " + _error(one)]
        ends = []
        for plan in row.plans:
            ran = self._by_plan(script, f"{row.words} {row.own_layout}", plan)
            differs = "" if ran.exit_code else Figures.of(ran).differs(Figures.of(one))
            beside = self._beside_native_flags(row, script, plan, ran) if differs else ""
            ends.append(_error(ran) if ran.exit_code else differs + beside or "equal")
        return ends

    def _beside_native_flags(self, row: draw.Row, script: str, plan: Plan, ran: Ran) -> str:
        """Train the plan's layout by Megatron's flags, our patches taken back, and compare that with the plan's run."""
        flags = re.search(r"^as native flags: (.*)$", ran.output, re.MULTILINE)
        bare = script.replace(_IMPORT, _IMPORT + "mindspeed_autoparallel.patching.ENGINE.undo_all()\n", 1)
        assert flags is not None and bare != script
        words = " ".join(shlex.split(flags[1]))
        native = self.run(bare, f"{row.words} {words}", plan.layout.num_devices)
        end = _error(native) if native.exit_code else Figures.of(ran).differs(Figures.of(native)) or "as the plan"
        return f"\n        by native flags, patches taken back: {end}"


def _error(ran: Ran) -> str:
    lines = [line for line in ran.output.splitlines() if line.strip()]
    own = [line for line in lines if re.match(r"(ConfigError|PlanError|PatchError)", line)]
    errors = [line for line in lines if re.match(r"\S*(Error|Exception)\b", line)]
    tail = "" if own else "\n".join(lines[-12:])
    return f"exit code {ran.exit_code}: {(own or errors or lines or ['nothing printed'])[0]}\n{tail}".strip()


def main() -> None:
    """Serve one checkout; the exit code is the number of deviations."""
    kind, sources, (seed, first, count) = sys.argv[1], Path(sys.argv[2]), map(int, sys.argv[3:6])
    rows = list(draw.rows(seed, first, count, _MUST[kind]))
    sys.exit(min((_import_alone if kind == "digests" else _plans)(kind, sources, rows), 100))


def _plans(kind: str, sources: Path, rows: list[draw.Row]) -> int:
    (import_libraries if kind == "mindspeed" else import_megatron)()
    wrong = 0
    with tempfile.TemporaryDirectory() as text:
        checkout = Checkout(sources, Path(text))
        for row in rows:
            before = checkout.seconds
            ends = getattr(checkout, kind)(row)
            print(f"{row.number}: {', '.join(row.labels)} [{checkout.seconds - before:.1f} s]")
            for plan, end in zip(row.plans, ends, strict=False):
                recompute = [dict(stage.recompute.get("text_decoder", {})) for stage in plan.stages]
                overlap = " overlap" if plan.layout.overlap_gradient_reduce else ""
                placed = f"{plan.layout.label()} {plan.layers_of('text_decoder')} {recompute}{overlap}"
                print(f"    {end}" if kind == "search" else f"    {placed}: {end}", flush=True)
                wrong += not end.endswith("equal")
        print(f"{len(rows)} rows, {wrong} deviations, {checkout.seconds:.0f} processor seconds")
    return wrong


def _import_alone(kind: str, sources: Path, rows: list[draw.Row]) -> int:
    """Compare trainings whose script imports this package with those of a process whose patches were taken back.

    They were taken back before Megatron was imported, so that no function of its was ever replaced; the CPU device
    stays, without which it does not start.
    """
    found: list[list[str]] = []
    with tempfile.TemporaryDirectory() as text:
        for patched in (True, False):
            folder = Path(text) / str(patched)
            folder.mkdir()

            def serve(folder: Path = folder, patched: bool = patched) -> int:
                from mindspeed_autoparallel.patching import ENGINE

                if not patched:
                    ENGINE.undo_all()
                import_megatron(features=False)
                checkout = Checkout(sources, folder)
                (folder / "found.json").write_text(json.dumps([checkout.digests(row) for row in rows]))
                states = [entry.state.name for entry in ENGINE.patches]
                print({state: states.count(state) for state in sorted(set(states))}, f"{checkout.seconds:.0f} s")
                return 0

            os.waitpid(fork(serve), 0)
            found.append(json.loads((folder / "found.json").read_text()))
    wrong = 0
    for row, patched, bare in zip(rows, *found, strict=True):
        same = patched == bare and bare.startswith("Figures") and not bare.endswith("[]")
        print(f"{row.number}: {', '.join(row.labels)}: {'bit-identical' if same else f'{patched} and {bare}'}")
        wrong += not same
    return wrong


if __name__ == "__main__":
    main()
