# Each target works on a fresh checkout: it makes .venv and installs what it needs, once.
#   make serve [ARGS="--port 9000"]    make test [ARGS="-k tree"]    make lint    make check    make clean
# Another interpreter: make test PYTHON=python3.12. Another environment: VENV=/path/to/venv.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(abspath $(VENV))/bin

# Client libraries that the tests run, each in an environment of its own.
CLIENTS := $(abspath $(VENV))/clients
PYTHON_CLIENTS := $(patsubst %,$(CLIENTS)/%/.installed,openai_python langchain litellm)
NODE_CLIENTS := $(patsubst %,$(CLIENTS)/%/.installed,openai_node ai_sdk)

# The repository root must not get on sys.path (docs/adr/0001-folders-and-links.md).
export PYTHONSAFEPATH := 1
unexport PYTHONPATH PYTHONHOME
# Tests start `specdec`, and torch's extension builder looks for ninja, by name.
export PATH := $(BIN):$(PATH)

.PHONY: serve test lint wheel clients python-clients check bench clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

serve: $(VENV)/.installed
	@$(BIN)/specdec serve $(ARGS)

test: $(VENV)/.installed-lint
	$(BIN)/pytest $(ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

wheel: $(VENV)/.installed-lint
	$(BIN)/python tests/check_wheel.py

# One line more in docs/latency.jsonl, and how it compares with those before.
bench: $(VENV)/.installed-lint
	$(BIN)/specdec bench latency --quick --append docs/latency.jsonl $(ARGS)

# What tests/clients runs; without them those tests are skipped.
clients: python-clients $(NODE_CLIENTS)

python-clients: $(PYTHON_CLIENTS)

# The tests come last, so that their closing line closes the output.
check: lint wheel $(if $(shell command -v npm),clients,python-clients) test

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache .coverage
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing specdec into $(VENV); this happens once and takes a few minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-lint: pyproject.toml | $(BIN)/python
	@echo "Installing specdec and its tests' tools into $(VENV); this happens once and takes a few minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[lint]'
	@touch $(VENV)/.installed $@

$(PYTHON_CLIENTS): $(CLIENTS)/%/.installed: tests/clients/%/requirements.txt | $(BIN)/python
	@echo "Installing the client $* into $(@D); this happens once."
	@$(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(NODE_CLIENTS): $(CLIENTS)/%/.installed: tests/clients/%/package.json
	@command -v npm >/dev/null || { \
	  echo "the client $* needs Node.js 20 or newer with npm, and npm is not here;" \
	    "install it, or only the Python clients: make python-clients"; exit 1; }
	@echo "Installing the client $* into $(@D); this happens once."
	@mkdir -p $(@D) && cp $< $(@D)/package.json
	@cd $(@D) && npm install --silent --no-audit --no-fund --ignore-scripts --no-package-lock
	@touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "specdec needs Python 3.11 to 3.13, and '$(PYTHON)' is not here; try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "specdec needs Python 3.11 to 3.13, and '$(PYTHON)' is another; try: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments; install its venv package (Debian: python3-venv)"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
