#!/bin/bash
# Downloads what a CUDA machine without network lacks into FOLDER (default .whl), for Python 3.12 on x86-64: at most 64 MiB.
set -eu
folder=${1:-.whl}
python=${PYTHON:-python3}
mkdir -p "$folder"
platforms=()
for name in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${name}_x86_64")
done
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
  -d "$folder" -c "$(dirname "$0")/../../docs/examples/constraints.txt" megatron-core ortools msgspec wrapt threadpoolctl immutabledict \
  flash-linear-attention==0.6.0 fla-core==0.6.0 einops
size=$(du -sm "$folder" | cut -f1)
echo "$folder: $size MiB"
[ "$size" -le 64 ] || { echo "more than 64 MiB: carry less" >&2; exit 1; }
