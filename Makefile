# Each target makes its own virtual environment if there is none.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-all lint bench fits experiment docs docs-check dist
.DEFAULT_GOAL := demo

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev,models,report,replay,serve]' -c constraints.txt
	touch $@

# Probe this machine, estimate two models on one and two devices, then train one to compare.
# Code 1 is a result: a machine too busy for its profile to be replaced, a prediction that missed.
demo: $(INSTALLED)
	$(BIN)/estimator probe || test $$? -eq 1
	$(BIN)/estimator estimate examples/demo_models.py:gpt2 --on 1x1:local
	$(BIN)/estimator estimate examples/demo_models.py:gpt2 --on 1x2:local
	$(BIN)/estimator estimate examples/demo_models.py:resnet18 --on 1x1:local
	$(BIN)/estimator estimate examples/demo_models.py:resnet18 --on 1x2:local
	$(BIN)/estimator validate examples/demo_models.py:resnet18 --on 1x2:local --repeats 3 || test $$? -eq 1

# Two workers, each of which takes over from the other what that has not come to.
TESTS := $(BIN)/python -m pytest -q -n 2 --dist worksteal

test: $(INSTALLED)
	$(TESTS)

# The same tests, with ten times as many random examples and hostile inputs.
test-all: $(INSTALLED)
	ESTIMATOR_FUZZ=10000 $(TESTS) --hypothesis-profile=thorough

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo --config tests/import_contracts.toml

# The site, in site/; it loads nothing from other hosts.
docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet -e '.[docs]' -c constraints.txt
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python tools/check_site.py site

# Every command of docs/ prints what its page says, numbers aside: minutes.
docs-check: docs
	$(BIN)/python tools/check_docs.py

# Wheel and sdist, checked, then tried in an empty environment without extras.
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python -m pip install --quiet build twine -c constraints.txt
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tools/check_wheel.py dist

# SUITE is one of those that 'python -m benchmarks list' prints; add QUICK=1 for a subset in minutes.
SUITE ?= published
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks run $(SUITE) $(if $(QUICK),--quick)

# Write data/fits/kernels.json again; BANK is a folder of timm's graphs, DATA one of tables.
fits: $(INSTALLED)
	test -n "$(BANK)" || { echo "give BANK=FOLDER"; exit 2; }
	PYTHONPATH=benchmarks $(BIN)/python tools/fit_kernels.py $(if $(DATA),--data $(DATA)) --bank $(BANK)

# The schedulers' experiment: minutes on two cores; add QUICK=1 for one seed.
experiment: $(INSTALLED)
	$(BIN)/python -m benchmarks run schedulers $(if $(QUICK),--quick)
