#!/usr/bin/env bash
# Installs gpu-kit/ into a folder of its own, in seconds and without a network, and runs the parts.
set -euo pipefail
cd "$(dirname "$0")/.."
# A checkout that was set up has all that is needed in its own environment.
own=.venv/bin/python
[[ -x $own ]] || own=python3
python=${PYTHON:-$own}
stop() { printf '%s\n' "$@" >&2; exit 1; }
ls gpu-kit/*.whl >/dev/null 2>&1 || stop "gpu-kit/ is empty. Fill it where there is a network: make gpu-kit"
for name in torch numpy pyarrow tensorboard; do
    "$python" -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('$name'))" ||
        stop "$python has no $name, which the kit does not bring."
done
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" -m pip --disable-pip-version-check --quiet install --no-index --no-deps --no-compile \
    --find-links gpu-kit --target "$site" \
    annotated-types fsspec pydantic pydantic-core safetensors typing-extensions \
    typing-inspection llm-assets
PYTHONPATH="$PWD:$site" "$python" -m benchmarks.gpu --results "${OUT:-gpu-results}" "$@"
