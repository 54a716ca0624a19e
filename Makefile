# make race   sets up a private environment and runs the race
# make test   sets up and runs lint, types and all tests
# make test-full also runs the long tests
# make test-oldest runs the tests on the oldest versions admitted
# make colabs executes the notebooks
# make bench  runs the benchmarks against optax, and torch if it is installed; make bench-full stores them
#             (make docs then puts them into docs/performance.md)
# make docs   regenerates the generated parts of the pages

VENV := .venv
BIN := $(VENV)/bin
# On the two cores of CI, more workers are not faster.
WORKERS ?= 2

.PHONY: race test test-full test-oldest colabs bench bench-full docs clean

race: $(VENV)/race.installed
	$(BIN)/optzoo race $(ARGS)

# The tests keep compiled programs in $(VENV)/jax_programs (tests/README.md). ARGS="-k adam" selects.
test: TESTS ?= not full
test test-full: $(VENV)/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/python -m pytest -q -n $(WORKERS) $(if $(TESTS),-m "$(TESTS)") $(ARGS)

# The same tests on the oldest versions that pyproject.toml admits.
test-oldest:
	$(MAKE) .venv-oldest/test.installed VENV=.venv-oldest PIP_ARGS="-c tests/oldest.txt"
	.venv-oldest/bin/python -m pytest -q -n $(WORKERS) -m "not full" $(ARGS)

colabs: $(VENV)/colabs.installed
	$(BIN)/jupyter nbconvert --to notebook --inplace --execute colabs/*.ipynb

bench: $(VENV)/race.installed
	$(BIN)/python benchmarks/suite.py

bench-full: $(VENV)/race.installed
	$(BIN)/python benchmarks/suite.py --full

docs: $(VENV)/dev.installed
	$(BIN)/python -m tests.test_docs

# One environment; each stamp means that the extra of its name is installed in it.
$(VENV)/%.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --editable ".[$*]"
	touch $@

# The first Python that is new enough and can create an environment with pip.
$(BIN)/python:
	@for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  echo "setting up $(VENV) with $$($$python --version)"; \
	  $$python -m venv $(VENV) && exit 0; \
	  rm -rf $(VENV); \
	done; \
	echo "no Python >= 3.11 with the venv module on the PATH" >&2; exit 1

clean:
	rm -rf .venv .venv-oldest race
