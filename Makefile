# The two commands a new user needs: `make run` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ALL_READY := $(VENV)/.all-ready
SETUP := requirements.lock pyproject.toml scripts/setup.sh scripts/pip_settings.py
BIGQUERY_READY := .venv-bigquery/.ready
TPU_READY := .venv-tpu/.ready
SITE_READY := .venv-site/.ready
V ?= 0
PORT ?= 3000

.DEFAULT_GOAL := help
# Environments are built side by side.
MAKEFLAGS += --jobs=2
# Images for containers often set it, and then every process compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup setup-tpu run stop ui up down demo-cloud test soak lint lock format docs site bench gpu-kit gpu clean

help: ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(ALL_READY) ## Build the environment in .venv with every extra (about a minute, once)

$(READY): $(SETUP)
	@PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup.sh local
	@touch $(READY)

$(ALL_READY): $(SETUP)
	@PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup.sh all
	@touch $(READY) $(ALL_READY)

$(BIGQUERY_READY): $(ALL_READY) scripts/setup_bigquery.sh
	@PYTHON=$(PYTHON) scripts/setup_bigquery.sh
	@touch $(BIGQUERY_READY)

setup-tpu: $(TPU_READY) ## Build the environment that trains on TPUs, in .venv-tpu (8 GB)

$(TPU_READY): $(ALL_READY) requirements.lock images/tpu/requirements.txt scripts/setup_tpu.sh
	@PYTHON=$(PYTHON) scripts/setup_tpu.sh
	@touch $(TPU_READY)

run: $(READY) ## Materialize the whole graph and serve the result (V=1 shows the full log)
	@V=$(V) $(BIN)/llm-assets run

stop: $(READY) ## Stop the endpoint
	@$(BIN)/llm-assets stop

ui: $(READY) ## Open the Dagster UI on http://127.0.0.1:3000
	@. $(BIN)/activate && env -u DAGSTER_MODULE_NAME dagster dev -w workspace.yaml -h 127.0.0.1 -p $(PORT)

up: $(READY) ## Keep UI, daemon and board running, on 127.0.0.1:3000 and :8012
	@$(BIN)/llm-assets up --port $(PORT)

down: $(READY) ## Stop them; the endpoint keeps serving
	@$(BIN)/llm-assets down

demo-cloud: $(ALL_READY) $(BIGQUERY_READY) ## Run the whole graph on a local Google Cloud, no account needed
	@. $(BIN)/activate && python -m tests.stand_ins.demo

test: $(ALL_READY) $(BIGQUERY_READY) ## Run the tests
	@. $(BIN)/activate && pytest

soak: $(ALL_READY) $(BIGQUERY_READY) $(TPU_READY) ## Run the tests that take longer than a minute each; the last takes ten, alone
	@. $(BIN)/activate && pytest -m soak --ignore=tests/serving/test_soak.py \
		&& pytest -n 0 -s -m soak tests/serving/test_soak.py

lint: $(ALL_READY) ## Check style, security, format, types, imports and words
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports --no-logo \
		&& $(BIN)/python scripts/check_vocabulary.py

lock: $(ALL_READY) ## Renew requirements.lock; scripts/lock.sh --upgrade takes newer versions
	@scripts/lock.sh

format: $(ALL_READY) ## Format the code
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

docs: $(ALL_READY) ## Regenerate docs/settings.md and docs/benchmarks.md
	@$(BIN)/python -m scripts.write_reference

$(SITE_READY): $(ALL_READY) scripts/site_requirements.txt
	@$(PYTHON) -m venv .venv-site && eval "$$($(BIN)/python scripts/pip_settings.py)" && \
		$(BIN)/uv pip install --quiet --python .venv-site/bin/python -r scripts/site_requirements.txt
	@touch $(SITE_READY)

site: $(SITE_READY) ## Build the docs as a site in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --quiet

bench: $(ALL_READY) ## Run one benchmark: make bench NAME=train_cpu (KEEP=1 puts its result into the docs)
	@. $(BIN)/activate && python -m benchmarks $(NAME) $(if $(filter-out 0,$(KEEP)),--keep) $(ARGS)

gpu-kit: $(ALL_READY) ## Fill gpu-kit/ with what `make gpu` needs on a machine without a network
	@scripts/gpu_kit.sh

gpu: ## Measure on a GPU, from this checkout and gpu-kit/ alone: make gpu PARTS="probe trainer"
	@scripts/gpu.sh $(PARTS)

clean: ## Remove the environment, the store and the registry; `llm-assets clean` keeps what is needed
	@rm -rf $(VENV) .venv-bigquery .venv-site .venv-tpu .llm_assets
