# The two commands of the README: `make quickstart` and `make test`. Both make .venv first if it is not there.
PYTHON ?= python3
BIN := .venv/bin
TESTS := $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder

.PHONY: quickstart test coverage install lint clean

quickstart: install
	$(BIN)/strop train recipes/quickstart.yaml --fresh

test: install
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy
	$(TESTS)

# The tests, and which lines of src/ they reach: at least 85 of 100. Takes a sixth longer.
coverage: install
	$(TESTS) --cov --cov-report=term:skip-covered --cov-fail-under=85

install: .venv/installed

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

lint: install
	$(BIN)/ruff check --fix src tests examples benchmarks
	$(BIN)/ruff format src tests examples benchmarks

clean:
	rm -rf .venv .coverage .mypy_cache .pytest_cache .ruff_cache
