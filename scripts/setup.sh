#!/usr/bin/env bash
# Builds the environment in $VENV from requirements.lock: with `local` what `make run` uses, with `all`
# every extra and what the tests use. Needs Python 3.11, 3.12 or 3.13, nothing else. Whatever interrupts
# it, the next call goes on from what is there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=${VENV:-.venv}
part=$1

stop() { printf '%s\n' "$@" >&2; exit 1; }
interrupted() {
    stop "The environment is not complete; the reason is in the lines above. The same command again" \
        "goes on where this one stopped."
}
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null ||
    stop "llm-assets needs Python 3.11, 3.12 or 3.13, and $python is $("$python" -V 2>&1 || true)." \
        "Name another one: make PYTHON=python3.11"
"$python" -c 'import ensurepip' 2>/dev/null ||
    stop "Python's venv module is missing; on Debian: apt-get install python3-venv"
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024) }')
[[ -x $venv/bin/python || $free -ge 4000 ]] || stop "The environment takes up to 3.5 GB, and $PWD has $free MB free."

echo "Building the environment in $venv (about a minute, once) ..."
trap interrupted ERR
trap 'trap - ERR; interrupted' INT TERM
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-compile)

# uv installs in a fifth of pip's time. It does not read pip's configuration, in which a machine's
# indexes, links and certificates stand, so it is told what pip knows.
awk '/^[^ ]/ { listed = /^uv==/ } listed' requirements.lock >"$venv/uv.lock"
if "${pip[@]}" --require-hashes --requirement "$venv/uv.lock" --only-binary :all:; then
    eval "$("$venv/bin/python" scripts/pip_settings.py)"
    install=("$venv/bin/uv" pip install --quiet --python "$venv/bin/python")
else
    echo "uv cannot be installed here; trying pip alone, which takes about four minutes." >&2
    install=("${pip[@]}")
fi
awk -v part="$part" '/^# Only for/ && part == "local" { exit } 1' requirements.lock >"$venv/$part.lock"
"${install[@]}" --no-deps --require-hashes --requirement "$venv/$part.lock"

# Where there is no GPU, torch's build for processors, which has a fifth of the size; without a way to
# it, the default one.
torch="$(sed -n 's/^ *"\(torch[~=<>]=*[^"]*\)".*/\1/p' pyproject.toml)"
if [[ -z ${UV_FIND_LINKS:-} && ${install[0]} == *uv ]]; then
    "${install[@]}" "$torch" --torch-backend auto 2>/dev/null || "${install[@]}" "$torch"
else
    "${install[@]}" "$torch"
fi
"${install[@]}" --no-deps --editable .

# torchtune installs a package named `recipes` that only raises; this project's own comes first.
"$venv/bin/python" - <<'END'
import os, sysconfig
from pathlib import Path

line = f"import sys; sys.path.insert(0, {os.getcwd()!r})\n"
(Path(sysconfig.get_path("purelib")) / "00_llm_assets.pth").write_text(line)
END

# What nothing here starts: the packages' own tests, torch's compiler of messages, OpenVINO for other
# processors than the main one, Spark's store of streams. It is an eighth of the disk. The next call does
# not bring it back: to pip and uv the packages are as they were. The archive below knows Spark's jars.
packages=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
(
    cd "$packages"
    rm -rf torch/test pyspark/jars/rocksdbjni-*.jar
    rm -f openvino/libs/{libopenvino_intel_{gpu,npu}_plugin.so,cache.json}
    find torch/bin -type f ! -name torch_shm_manager -delete
    for package in matplotlib networkx numpy pandas pyarrow scipy sklearn sympy; do
        find "$package" -type d -name tests -prune -exec rm -rf {} +
    done
)
# uv comes again in seconds; only a developer's environment keeps it.
[[ $part == all ]] || "$venv/bin/python" -m pip --quiet uninstall --yes uv 2>/dev/null

# Spark starts in half the time from classes that were parsed once. Nothing waits for them but Spark's
# start, so what `make run` needs first goes on meanwhile; interrupted, they are made by `make setup`.
keep_classes() {
    [[ $venv/share/llm-assets/spark.jsa -nt requirements.lock &&
        $venv/share/llm-assets/spark.jsa -nt $packages/pyspark/jars ]] ||
        "$venv/bin/python" -m spark_jobs.runtime.class_archive >/dev/null 2>&1 ||
        echo "Spark's Java classes could not be kept in a file; Spark will start slower." >&2
}
if [[ $part == all ]]; then
    keep_classes
else
    keep_classes >/dev/null 2>&1 &
fi

# By these two `dagster asset materialize` finds the definitions and the history.
activate="$venv/bin/activate"
if ! grep -qF "export DAGSTER_HOME=\"$PWD\"" "$activate"; then
    cat >>"$activate" <<END

export DAGSTER_MODULE_NAME=llm_assets.definitions
export DAGSTER_HOME="$PWD"
END
fi
