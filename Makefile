# Needs GNU make and Python 3.11 or newer, nothing else: every target makes .venv and installs what it lacks.
# The variables below can be set on the command line: make test PYTEST_ARGS="-n 8 -k restore"

PYTHON ?= python3
PYTEST_ARGS ?= -n 2
GOLDEN ?= ../shared/golden/official_tiny

BIN := .venv/bin
STAMPS := .venv/.stamps
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.NOTPARALLEL:
.PHONY: help reload test test-long bench notebooks notebooks-check parity lint clean

## make reload           run the reload gate: cold, device, host and disk give the same bits
## make test             run the tests
## make test-long        run them all, the slow ones too, with many more examples
## make bench            measure
## make notebooks        execute the notebooks and write them
## make notebooks-check  execute the notebooks and compare with the written ones
## make parity           compare with other implementations
## make lint             check style and types
## make clean            remove .venv and every cache
help:
	@sed -n 's/^## //p' Makefile

reload: $(STAMPS)/core
	$(BIN)/goldenkv reload

test: $(STAMPS)/test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: $(STAMPS)/test
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "" --hypothesis-profile=long

bench: $(STAMPS)/parity
	$(BIN)/python tests/bench/run.py

notebooks: $(STAMPS)/explore
	$(BIN)/python notebooks/build.py

notebooks-check: $(STAMPS)/explore
	$(BIN)/python notebooks/build.py --check

parity: $(STAMPS)/parity $(STAMPS)/test
	$(BIN)/python -m pytest tests/parity
	$(BIN)/goldenkv parity --transformers
	@if [ -d "$(GOLDEN)" ]; then set -ex; \
	    $(BIN)/goldenkv parity "$(GOLDEN)" --which plain; \
	    $(BIN)/goldenkv parity "$(GOLDEN)" --which quantised; \
	else echo "skipped: parity with the official implementation, as there is no folder $(GOLDEN)"; fi

lint: $(STAMPS)/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf .venv .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist

# A stamp says that an extra is installed; a change of what to install makes it stale.
$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "goldenkv needs Python 3.11 or newer, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." \
	         "Name another: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/core: pyproject.toml constraints.txt | $(STAMPS)/venv
	$(PIP) -e .
	@touch $@

$(STAMPS)/%: $(STAMPS)/core
	$(PIP) -e ".[$*]"
	@touch $@
