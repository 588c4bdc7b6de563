#!/usr/bin/env bash
# Fills gpu-kit/ with all that `make gpu` needs beside torch, in an archive for each Python in $PYTHONS.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
names=(absl-py accelerate annotated-types anyio fsspec h11 httpcore2 httpx2 huggingface-hub idna numpy
    packaging protobuf psutil pyarrow pydantic pydantic-core pyyaml regex safetensors sniffio tensorboard
    tokenizers torchao tqdm transformers truststore typing-extensions typing-inspection)
kit=gpu-kit
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$kit"
mkdir -p "$kit"
wanted=$(IFS='|' && echo "${names[*]}")
awk -v wanted="^($wanted)==" '/^[^ ]/ { listed = $0 ~ wanted } listed' requirements.lock >"$work/lock"
# What each recipe is tried on is made here: Spark's side of the project is not in the kit.
"$python" -m benchmarks.gpu.recipes "$work/projects"
tar --create --xz --file "$kit/projects.tar.xz" --directory "$work/projects" .
eval "$("$python" scripts/pip_settings.py)"
for version in ${PYTHONS:-$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')}; do
    site="$work/$version"
    .venv/bin/uv pip install --quiet --no-deps --require-hashes --only-binary :all: --target "$site" \
        --python-version "$version" --python-platform x86_64-manylinux_2_28 --requirement "$work/lock"
    # A run finds by the entry points of this project what it trains; its code is in the checkout.
    mkdir "$site/llm_assets.dist-info"
    cp .venv/lib/python*/site-packages/llm_assets-*.dist-info/{METADATA,entry_points.txt} \
        "$site/llm_assets.dist-info"
    XZ_OPT="--threads=0 --x86 --lzma2=preset=2,dict=32MiB" tar --create --xz \
        --file "$kit/$version.tar.xz" --directory "$site" \
        --exclude={tests,include,src,webfiles.zip} --exclude='*.'{a,pxd,pxi,pyi,pyx} \
        --exclude='*'{_flight,_s3}'*' --exclude='*/torchao/*.so' .
done
megabytes=$(du -sm "$kit" | cut -f1)
echo "$kit: for Python $(cd "$kit" && echo [0-9]*.xz | sed 's/\.tar\.xz//g'), $megabytes MB"
[[ $megabytes -le 50 ]] || echo "That is more than 50 MB: a kit for one Python is less." >&2
