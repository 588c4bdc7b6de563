#!/usr/bin/env bash
# Builds the environment that trains on TPUs in .venv-tpu: torch_xla belongs to one release of torch,
# which is older than this project's. It takes 8 GB, since torch brings the libraries of CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=.venv-tpu
constraints="$(mktemp)"
trap 'rm -f "$constraints"' EXIT

echo "Building the environment for TPUs in $environment ..."
grep -v '^torch~=' constraints.txt >"$constraints"
"${PYTHON:-python3}" -m venv "$environment"
"$environment/bin/python" -m pip --disable-pip-version-check --quiet install --no-compile \
    --requirement images/tpu/requirements.txt --constraint "$constraints"

# Its Python finds this project's packages from any folder, before torchtune's `recipes`.
"$environment/bin/python" - <<'EOF'
import os, sysconfig
from pathlib import Path

line = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n"
(Path(sysconfig.get_path("purelib")) / "00_llm_assets.pth").write_text(line)
EOF
