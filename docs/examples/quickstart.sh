#!/usr/bin/env bash
# On a fresh machine: installs, searches for a plan for 8 x 16 simulated devices on CPU, trains with a plan on one process per
# core, and ends with the path of the report. Everything it writes is under out/quickstart; what Megatron says goes to
# quickstart.log there.
set -euo pipefail
cd "$(dirname "$0")/../.."
root="$PWD"
. docs/examples/python312.sh
install_into_venv "dev"

python="$root/.venv/bin/python"
out="$root/out/quickstart"
example="$root/docs/examples/qwen2vl_tiny"
log="$out/quickstart.log"
mkdir -p "$out"
: > "$log"
trap 'echo "quickstart failed; the whole output is in $log, its end:" >&2; tail -n 20 "$log" >&2' ERR
# A plan is compared with a training that has a core for every device.
devices=1
while [ $((devices * 2)) -le "$(env -u OMP_NUM_THREADS nproc)" ] && [ "$devices" -lt 4 ]; do devices=$((devices * 2)); done
# Small processes on few cores: threads would only fight each other.
export OMP_NUM_THREADS=1 MINDSPEED_AUTOPARALLEL_DEVICE=cpu

TRAINING_ARGS="
    --use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 1
    --tokenizer-type NullTokenizer --vocab-size 512 --seq-length 128 --max-position-embeddings 1024
    --make-vocab-size-divisible-by 1 --normalization RMSNorm --swiglu
    --lr 1.0e-3 --weight-decay 0 --clip-grad 1.0 --train-iters 12 --seed 42 --use-distributed-optimizer
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --log-interval 1 --eval-interval 10000 --eval-iters 0 --distributed-backend nccl
    --mm-data $example/data.json --mm-model $example/model.json --mm-tool $example/tools.json
"

search() { # run directory, nodes, devices per node, global batch size
    mkdir -p "$out/$1"
    "$python" docs/examples/pretrain_vlm.py $TRAINING_ARGS \
        --global-batch-size "$4" \
        --auto-parallel-mm --nnodes 1 --nproc-per-node 2 --master-addr localhost --master-port 6010 --node-rank 0 \
        --simulated-nnodes "$2" --simulated-nproc-per-node "$3" \
        --auto-parallel-work-dir "$out/work" --auto-parallel-output-dir "$out/$1" 2>> "$log" | tee -a "$log"
}

echo "== 1. find the best plan for 8 x 16 devices, measuring on 2 CPU processes"
search cluster 8 16 512
echo "== 2. the same for 1 x $devices devices, one per core here: the measurements are reused"
search local 1 "$devices" 16
echo "== 3. train with that plan on $devices processes"
"$python" -m torch.distributed.run --nproc-per-node "$devices" --master-port 6011 docs/examples/pretrain_vlm.py \
    $TRAINING_ARGS --global-batch-size 16 --auto-parallel-plan "$out/local/plan.json" --auto-parallel-check-steps 12 >> "$log" 2>&1
# Of the training's output: the plan against what was measured, and the last loss.
sed -n '/^plan against/,/^ \[20/{/^ \[20/!p;}' "$log"
grep -E '^ \[20.* iteration ' "$log" | tail -n 1 | sed -E 's/^.*iteration +([0-9]+)\/ *([0-9]+).*lm loss: ([^ ]+).*$/iteration \1 of \2: lm loss \3/'
echo "== done"
echo "plan for 8 x 16 devices: $out/cluster/auto_parallel_search_optimal_config.json"
echo "report page:             $out/cluster/auto_parallel_report.html"
echo "log:                     $log"
