# `make demo` and `make test` need Python 3.11 or newer and make; all else is installed into .venv.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# the first interpreter that is new enough
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
    $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
INPUTS := pyproject.toml constraints.txt
LINTED := protos drafter verifier kernels models bench tests
TYPED := protos/outrider drafter verifier kernels

.PHONY: demo test soak gpu-test lint protos clean

# only a prompt given to make counts, and it is taken as it stands: no $ is expanded
ifeq ($(origin PROMPT),command line)
override PROMPT := $(value PROMPT)
export PROMPT
else
unexport PROMPT
endif

demo: $(VENV)/serve.stamp
	@$(BIN)/outrider demo $${PROMPT+-- "$$PROMPT"}

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -q

# the minutes-long and statistical ones
soak: $(VENV)/test.stamp
	$(BIN)/python -m pytest -q -m "slow and not gpu" --timeout 3600

# needs a CUDA device, and so a torch that has CUDA: PYTEST=... names one that does
PYTEST ?= $(BIN)/python -m pytest
gpu-test:
	$(PYTEST) -q -m gpu tests/kernels/gpu tests/verifier/test_blocks.py tests/drafter/test_graphs.py \
		tests/drafter/test_trees.py tests/bench/test_continued.py

lint: $(VENV)/test.stamp
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy $(TYPED)

# the committed stubs and the protoset, from the protos
protos: $(VENV)/test.stamp
	$(BIN)/python protos/generate.py

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11 or newer as python3, or PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Torch comes first, as the build without CUDA: from the registry where it has that build, else from
# torch's own index. Elsewhere than on Linux the ordinary build has no CUDA.
$(VENV)/torch.stamp: constraints.txt | $(BIN)/python
	@echo "installing torch $(TORCH) for the CPU (0.7 GB; all of it takes two to three minutes)"
	@if [ "$$(uname)" = Linux ]; then \
	    $(PIP) "torch==$(TORCH)+cpu" 2>/dev/null || \
	    $(PIP) "torch==$(TORCH)+cpu" --extra-index-url https://download.pytorch.org/whl/cpu; \
	else \
	    $(PIP) "torch==$(TORCH)"; \
	fi
	@touch $@

$(VENV)/serve.stamp: $(INPUTS) $(VENV)/torch.stamp
	@echo "installing outrider and what it serves with"
	@$(PIP) setuptools
	@$(PIP) --no-build-isolation --editable '.[serve]'
	@touch $@

# dflash is an oracle of the tests; its own pins are not ours
$(VENV)/test.stamp: $(VENV)/serve.stamp
	@echo "installing what the tests need"
	@$(PIP) --no-build-isolation --editable '.[test]'
	@$(PIP) --no-deps dflash
	@touch $@
