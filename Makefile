# Everything here runs in .venv, which `make` builds from plain python3. ARGS goes to pytest, the demo or the bench.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
COMPILE := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m compileall -qq
ROOMS := protocol supervisor worker demo bench tests

.DEFAULT_GOAL := setup
.PHONY: setup compile demo test lint stress bench clean

setup: $(STAMP)

# Bytecode is compiled here, explicitly: without it each cold start of a worker takes twice as long, and the environment
# may forbid Python to write it on import. Packages ship a few files that no compiler accepts, hence `|| true`.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
		{ echo "Python 3.11, 3.12 or 3.13 is needed; name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments; install the package python3-venv, then run make again" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[test,lint,bench]'
	@$(COMPILE) -j 2 $(VENV)/lib || true
	@touch $@

# Ours too: every test starts servers, and what has changed is compiled again.
compile: $(STAMP)
	@$(COMPILE) $(ROOMS)

demo: compile
	$(BIN)/python demo/main.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy

test: lint compile
	$(BIN)/python -m pytest $(ARGS)

stress: compile
	$(BIN)/python -m pytest -m stress $(ARGS)

bench: compile
	$(BIN)/python bench/main.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
