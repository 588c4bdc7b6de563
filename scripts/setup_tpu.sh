#!/usr/bin/env bash
# Builds the environment that trains on TPUs in .venv-tpu: torch_xla belongs to one release of torch,
# which is older than this project's. It takes 8 GB, since torch brings the libraries of CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=.venv-tpu

echo "Building the environment for TPUs in $environment ..."
[[ -x $environment/bin/python ]] || "${PYTHON:-python3}" -m venv "$environment"
eval "$(.venv/bin/python scripts/pip_settings.py)"
.venv/bin/uv pip install --quiet --python "$environment/bin/python" \
    --requirement images/tpu/requirements.txt --constraint requirements.lock

.venv/bin/uv pip install --quiet --python "$environment/bin/python" --no-deps --editable .

# Its Python finds this project's packages from any folder, before torchtune's `recipes`.
"$environment/bin/python" - <<'EOF'
import os, sysconfig
from pathlib import Path

line = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n"
(Path(sysconfig.get_path("purelib")) / "00_llm_assets.pth").write_text(line)
EOF
