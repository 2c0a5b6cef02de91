# Two commands: `make demo` runs a real model, `make test` runs the tests. Both set up .venv when something is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint generate setup sanitize clean

demo: $(STAMP)
	@$(BIN)/ktopt run rules/smollm2/cpu.yaml --show-plan \
	  --model smollm2-135m --weights "$$($(BIN)/python -P scripts/demo_weights.py)" \
	  --prompt "What is a compiler? Answer in two sentences." -n 96 --greedy

test: $(STAMP)
	$(BIN)/python -P -m pytest -q $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -P scripts/generate.py --check

generate: $(STAMP)
	$(BIN)/python -P scripts/generate.py

# the C++ kernels under address, undefined-behaviour and thread sanitizers; takes some minutes
sanitize: $(STAMP)
	$(BIN)/python -P scripts/sanitize.py

setup: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
