# make run and make test are all that a fresh machine needs. Everything lands in .venv, in folders
# beside it and in out/. Benchmarks, fits and rarer tasks: python -m benchmarks, python -m fitting,
# python -m tools; each lists its tasks.
PYTHON ?= python3
BIN := .venv/bin
LOCKS := locks/trainpace.lock tools/install.sh
# what the tests put beside .venv
PARTS := .zoo/installed .engines/installed .frameworks/installed .tools/installed
CHECKED := src tests benchmarks examples fitting docs tools

.PHONY: help run test test-slow test-all lint docs clean

help:
	@echo "make run       the whole loop once: trace, forecast, train, compare (two minutes)"
	@echo "make test      lint, types and the tests that take a few seconds each (12 minutes)"
	@echo "make test-all  the same, then the slow tests: what CI runs (45 minutes)"
	@echo "make lint      ruff and mypy"
	@echo "make docs      the documentation as a site, into out/docs"
	@echo "make clean     remove what make created"
	@echo
	@echo "$(BIN)/python -m benchmarks    benchmarks, one line each"
	@echo "$(BIN)/python -m fitting       fits of the kernel models, one line each"
	@echo "$(BIN)/python -m tools         locks, generated pages, fuzzing and other rare tasks"

.venv/installed: $(LOCKS) pyproject.toml
	PYTHON=$(PYTHON) tools/install.sh main .venv
	@touch $@

.%/installed: $(LOCKS) | .venv/installed
	tools/install.sh $* .$*
	@touch $@

run: .venv/installed
	$(BIN)/python examples/first_look.py

test: lint $(PARTS)
	$(BIN)/python -m pytest -m "not slow and not long"

test-slow: $(PARTS)
	$(BIN)/python -m pytest -m "slow and not long"

test-all: test test-slow

lint: .venv/installed
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy

docs: .tools/installed
	PYTHONPATH=.tools $(BIN)/python -m sphinx -q -W -E -d out/docs-trees docs out/docs
	@echo "out/docs/index.html"

clean:
	rm -rf .venv $(dir $(PARTS)) .fms .peers .fuzz .lowest .pythons .sim out docs/results \
	  mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis
