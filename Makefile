# What there is to do with Baton: `make` lists it. Needs python3 >= 3.11 with pip, and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

MODEL ?= smollm2-135m
HOST ?= 127.0.0.1
PORT ?= 8000
# more flags for serve and bench, e.g. ARGS="--threads 4"
ARGS ?=

INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help serve check test test-full sim bench docs clean

help: ## list what there is to make
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# Debian ships venv without ensurepip; the second form then brings pip in from outside.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Baton needs Python 3.11 or newer")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
		{ $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[serve,dev]'
	@touch $@

serve: $(INSTALLED) ## serve MODEL at HOST:PORT (fetched if it is not here)
	$(BIN)/baton serve --model $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

check: $(INSTALLED) ## lint, format, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p baton
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest tests/test_layers.py tests/test_style.py

# Two lanes, for most tests wait or keep one processor busy; then, alone, what measures times and memory.
QUIET := -m "not full and not alone" --durations=10
test: $(INSTALLED) ## the tests that CI runs, some six minutes on two cores
	@log=$$(mktemp) && trap 'rm -f "$$log"' EXIT && \
	{ $(BIN)/pytest $(QUIET) tests/workers tests/system/test_[am-z]*.py >"$$log" 2>&1 & } && beside=$$! && status=0 && \
	{ $(BIN)/pytest $(QUIET) --ignore=tests/workers --ignore-glob='tests/system/test_[am-z]*' || status=$$?; } && \
	{ wait $$beside || status=$$?; } && cat "$$log" && \
	{ $(BIN)/pytest -m "alone and not full" --durations=10 || status=$$?; } && exit $$status

test-full: test ## all tests
	$(BIN)/pytest -m full --durations=10

sim: $(INSTALLED) ## the simulated worlds, at both levels: faults, seeds, oracles
	$(BIN)/python -m tests.sim --seeds 2000

bench: $(INSTALLED) ## what the orchestration costs, at each door
	$(BIN)/python -m baton.ops.bench.orchestration $(ARGS)

docs: $(INSTALLED) ## write the pages that are derived from the program
	$(BIN)/python -m baton.ops.docs docs

clean: ## remove caches and build products (not $(VENV))
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 -r rm -rf
