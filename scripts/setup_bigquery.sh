#!/usr/bin/env bash
# Builds the environment of the BigQuery emulator, which the tests use, in .venv-bigquery: its
# dependencies are at odds with this project's.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=.venv-bigquery

echo "Building the BigQuery emulator's environment in $environment ..."
[[ -x $environment/bin/python ]] || "${PYTHON:-python3}" -m venv "$environment"
eval "$(.venv/bin/python scripts/pip_settings.py)"
.venv/bin/uv pip install --quiet --python "$environment/bin/python" \
    bqemulator==1.4.0 numpy==2.4.6 \
    duckdb==1.5.5 duckdb-extension-spatial==1.5.5 duckdb-extension-avro==1.5.5
