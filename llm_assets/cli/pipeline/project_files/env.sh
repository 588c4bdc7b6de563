# After `. ./env.sh`, Dagster's own commands find the definitions, the run history and the pipeline file.
here="$(cd "$(dirname "${BASH_SOURCE[0]:-$0}")" && pwd)"
export DAGSTER_MODULE_NAME=llm_assets.definitions
export DAGSTER_HOME="$here"
export LLM_ASSETS_CONFIG="$here/{pipeline}"
