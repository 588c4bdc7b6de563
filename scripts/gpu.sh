#!/usr/bin/env bash
# Runs the parts: in this checkout's environment, or with $PYTHON, which has torch, and gpu-kit/.
set -euo pipefail
cd "$(dirname "$0")/.."
stop() { printf '%s\n' "$@" >&2; exit 1; }
python=.venv/bin/python
if [[ -n ${PYTHON:-} || ! -x $python ]]; then
    python=${PYTHON:-python3}
    "$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' ||
        stop "$python has no torch. Name one that has: make gpu PYTHON=/path/to/python"
    version=$("$python" -c 'import sys; print(*sys.version_info[:2], sep=".")')
    kit=gpu-kit/$version.tar.xz
    [[ -f $kit ]] ||
        stop "$kit is absent. Make it where there is a network: make gpu-kit PYTHONS=$version"
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m tarfile --extract "$kit" "$site"
    export PYTHONPATH="$PWD:$site"
fi
"$python" -m benchmarks.gpu --results "${OUT:-gpu-results}" "$@"
