# make race   sets up a private environment and runs the race
# make test   sets up and runs lint, types and the quick tests
# make lint   checks style and types alone
# make test-full runs all tests; make costs records how long each takes
# make test-oldest runs the tests on the oldest versions admitted
# make test-matrix runs the tests on every Python found and on every line of JAX; make test-states only
#             checks that a state saved on one of them is restored on each
# make test-accelerators compiles for TPUs and GPUs, which need not be there
# make facts  records what these programs do, where it has changed
# make mutants changes the code in one place at a time, and looks whether a test fails
# make colabs executes the notebooks
# make bench  runs the benchmarks against optax, and torch if it is installed; make bench-full stores them
#             (make docs then puts them into benchmarks/results.md)
# make docs   regenerates the generated parts of the pages
# make dist   builds the sdist and the wheel, and tries the wheel in an environment without extras
# make site   builds the site into site/, offline; make site-check checks its links, names and search

VENV := .venv
BIN := $(VENV)/bin
# As many as there are cores.
WORKERS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
# The Python to set up environments with; by default the newest one on the PATH that has all packages.
PYTHON ?=

.PHONY: race test lint test-full costs test-oldest test-matrix test-states test-accelerators facts mutants colabs bench bench-full docs dist
.PHONY: site site-check clean

race: $(VENV)/race.installed
	$(BIN)/optzoo race $(ARGS)

# The tests keep compiled programs in $(VENV)/jax_programs (tests/README.md). ARGS="-k adam" selects.
# FILES=tests/first_order/test_adam.py runs some files alone: in one process, without lint and types.
FILES ?=
test: TESTS ?= not full
test test-full: $(if $(FILES),$(VENV)/dev.installed,lint)
	$(BIN)/python -m pytest -q $(or $(FILES),-n $(WORKERS) --dist worksteal) \
	  $(if $(TESTS),-m "$(TESTS)") $(ARGS)

# All tests, with empty folders for programs; recorded in tests/costs.json. ARGS is for pytest.
costs: $(VENV)/dev.installed
	rm -rf $(VENV)/jax_programs
	$(BIN)/python -m pytest -q $(or $(FILES),-n $(WORKERS) --dist worksteal) --record-costs $(ARGS)

lint: $(VENV)/dev.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

# The same tests on the oldest versions that pyproject.toml admits, for which a new Python has no wheels.
test-oldest:
	$(MAKE) .venv-oldest/test.installed VENV=.venv-oldest PIP_ARGS="-c tests/oldest.txt" \
	  PYTHON="$(or $(PYTHON),$(shell sh tests/versions/pythons.sh | tail -n 1))"
	.venv-oldest/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m "not full" $(ARGS)

# Environments, logs and saved states are in .venv-matrix. ARGS="--only python3.13,jax0.9 -k adam".
test-matrix test-states:
	$(or $(PYTHON),python3) tests/versions/matrix.py $(if $(filter test-states,$@),--states,-n $(WORKERS)) $(ARGS)

# Compiles for TPUs and GPUs, with compilers that need neither; in an environment of its own, because
# JAX looks for a device where they are installed.
test-accelerators:
	$(MAKE) .venv-accelerators/accelerators.installed VENV=.venv-accelerators
	JAX_PLATFORMS=cpu .venv-accelerators/bin/python -m pytest -q -p no:cacheprovider \
	  -n $(WORKERS) --dist worksteal --confcutdir=tests/accelerators tests/accelerators $(ARGS)

# Recorded in tests/accelerators/facts; make docs then puts it into the pages. ARGS="--only lazy_adam --all".
facts:
	$(MAKE) .venv-accelerators/accelerators.installed VENV=.venv-accelerators
	JAX_PLATFORMS=cpu .venv-accelerators/bin/python -m tests.accelerators.facts $(ARGS)

# ARGS="--number 50 --seed 3 optzoo/sparse"; results are kept in $(VENV)/mutants.
mutants: $(VENV)/mutants.installed
	$(BIN)/python -m tests.mutants $(ARGS)

colabs: $(VENV)/colabs.installed
	$(BIN)/jupyter nbconvert --to notebook --inplace --execute colabs/*.ipynb

bench: $(VENV)/bench.installed
	$(BIN)/python benchmarks/suite.py

bench-full: $(VENV)/bench.installed
	$(BIN)/python benchmarks/suite.py --full

docs: $(VENV)/dev.installed
	$(BIN)/python -m tests.test_docs

# ARGS="--race 'race --quick'" runs the race on everything.
dist: $(VENV)/dist.installed
	$(BIN)/python tests/release/dist.py $(ARGS)

site: $(VENV)/site.installed
	$(BIN)/python docs/site/build.py

site-check: $(VENV)/site.installed
	$(BIN)/python docs/site/check.py

# One environment; each stamp means that the extra of its name is installed in it.
$(VENV)/%.installed: pyproject.toml
	@PYTHON="$(PYTHON)" sh tests/versions/environment.sh $(VENV) $* $(PIP_ARGS)
	@touch $@

clean:
	rm -rf .venv .venv-oldest .venv-matrix .venv-accelerators .venv-site race site build dist
