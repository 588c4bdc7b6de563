#!/usr/bin/env bash
# Runs the tests twenty times in a row while two busy loops share the machine, and stops at the first
# failure. What each run printed is kept by commit in .llm_assets/under_load: the same command again
# goes on after the last run that passed. Another command in place of `make test` may follow.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# -gt 0 ]] || set -- make test
[[ -z $(git status --porcelain) ]] || echo "Not all changes are committed; runs are counted by commit." >&2
folder=.llm_assets/under_load/$(git rev-parse --short HEAD)
mkdir -p "$folder"
busy=()
trap 'kill "${busy[@]}"' EXIT
for _ in 1 2; do
    while :; do :; done &
    busy+=($!)
done
for run in {01..20}; do
    [[ -f $folder/$run.passed ]] && continue
    if ! "$@" >"$folder/$run.failed" 2>&1; then
        tail -n 50 "$folder/$run.failed"
        echo "Run $run of 20 failed: $folder/$run.failed" >&2
        exit 1
    fi
    mv "$folder/$run.failed" "$folder/$run.passed"
    echo "$run of 20 passed: $(tail -n 1 "$folder/$run.passed")"
done
