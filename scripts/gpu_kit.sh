#!/usr/bin/env bash
# Fills gpu-kit/ with the wheels that `make gpu` needs beside torch, numpy, pyarrow and tensorboard,
# which a machine with a GPU has: pyarrow alone is larger than what such a machine may let one bring.
set -euo pipefail
cd "$(dirname "$0")/.."
kit=gpu-kit
rm -rf "$kit"
mkdir -p "$kit"
names=(annotated-types fsspec pydantic pydantic-core safetensors typing-extensions typing-inspection)
pinned() { sed -n "s/^\($1==[^ ;]*\).*/\1/p" requirements.lock; }
for python in 3.11 3.12 3.13; do
    for name in "${names[@]}"; do
        .venv/bin/python -m pip --disable-pip-version-check --quiet download --no-deps \
            --only-binary=:all: --python-version "$python" --implementation cp \
            --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
            --platform manylinux2014_x86_64 --dest "$kit" "$(pinned "$name")"
    done
done
# Its own wheel declares the recipes by which a run finds what it trains.
.venv/bin/uv build --quiet --wheel --out-dir "$kit" .
rm -f "$kit/.gitignore"
megabytes=$(du -sm "$kit" | cut -f1)
echo "$kit: $(find "$kit" -name '*.whl' | wc -l) wheels, $megabytes MB"
[[ $megabytes -le 50 ]]
