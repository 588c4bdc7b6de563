# After `. ./env.sh`, Dagster's own commands find the definitions, the run history and the pipeline file.
# bash and zsh say where this file is; for any other shell it has to be in the current folder.
if [ -n "${BASH_SOURCE:-}" ]; then
    here="$(dirname "$BASH_SOURCE")"
elif [ -n "${ZSH_VERSION:-}" ]; then
    here="$(dirname "$0")"
else
    here=.
    [ -f env.sh ] || echo "env.sh is not in this folder. Go to its folder, then: . ./env.sh" >&2
fi
here="$(CDPATH= cd "$here" && pwd)"
export DAGSTER_MODULE_NAME=llm_assets.definitions
export DAGSTER_HOME="$here"
export LLM_ASSETS_CONFIG="$here/{pipeline}"
