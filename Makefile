# make run and make test are all that a fresh machine needs. Everything lands in .venv and out/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DATA ?= ../shared/data
# Nothing is fetched that a lock does not name, and nothing is installed that has not one of the hashes there.
HASHED := pip install --quiet --disable-pip-version-check --require-hashes --no-deps

.PHONY: help run calculator test test-fast test-long test-lowest test-pythons fuzz audit mutants coverage lint bench bench-measure bench-journal fit fit-cards fit-attention public-journal bench-accuracy bench-match bench-datapath bench-diagnose bench-diagnose-gpu bench-cluster bench-gpu bench-run bench-scripts bench-serve bench-soak bench-kills bench-thesis bench-callbacks bench-nodes bench-memory bench-adapters bench-experts bench-practitioners bench-architectures bench-accelerator docs docs-check docs-generate docs-refresh pictures session zoo-workloads lock clean

help:
	@echo "make run         the whole loop once on real photographs: trace, forecast, train, compare (about two minutes)"
	@echo "make calculator  five image networks over batch 1 to 70, measured here and forecast on four cards; all kept (about ten minutes)"
	@echo "make test        lint, types, and every test"
	@echo "make test-fast   the tests that take no more than a few seconds each"
	@echo "make test-long   what make test leaves out: rarely failing tests that take long (some minutes)"
	@echo "make test-lowest  the fast tests on the oldest versions that pyproject.toml admits, all but torch (LOWEST=tests/journal for some of them)"
	@echo "make test-pythons  what runs without torch, on Python 3.12 and 3.13 where they are installed"
	@echo "make fuzz        hostile files of every type, for MINUTES=30"
	@echo "make audit       pinned packages beside the database of known vulnerabilities, and a bill of materials"
	@echo "make mutants     small faults planted in the arithmetic, and how many of them its tests notice (SAMPLE=150 of each module; an hour)"
	@echo "make coverage    branches of src that the tests reach, commands in child processes included (TESTS=tests/job for a part)"
	@echo "make lint        ruff and mypy"
	@echo "make bench       commands as whole processes, interleaved, and tracing times, into benchmarks/results/"
	@echo "make bench-journal  the journal under load, on SQLite and PostgreSQL (a quarter of an hour)"
	@echo "make bench-measure   how good measure, its jumps and calibrate are, on a machine that does nothing else (an hour)"
	@echo "make bench-diagnose  verdicts, planted milliseconds and foretold savings on 32 scripts; what watching costs (half an hour)"
	@echo "make bench-diagnose-gpu  the same on a machine with a GPU, with 16 scripts of its own (a quarter of an hour)"
	@echo "make bench-datapath  precompute and reading back against litdata, webdataset and Hugging Face datasets (a quarter of an hour)"
	@echo "make fit-products  the kernel model of products, from measured kernels of single cards (a few minutes)"
	@echo "make fit-cards   fit convolutions, norms and what moves bytes on measured kernels, by generation and card (ten minutes)"
	@echo "make fit         fit the kernel constants on $(DATA), residuals into fitting/residuals.md (a few minutes)"
	@echo "make fit-attention  fit fused attention on measured kernels, and say what it errs on those left out (a quarter of an hour)"
	@echo "make public-journal  package the measurements that may be shared, with the forecasts of this version (a minute or two; the first time twenty)"
	@echo "make bench-accuracy  refit without each card and family, forecast what was left out (half an hour; goes on where it was interrupted)"
	@echo "make bench-match  how long match takes; the cost of failures against a simulation (some minutes)"
	@echo "make bench-cluster   many GPUs on held-out runs, the search, links and steps between shaped hosts (half an hour, as root)"
	@echo "make bench-gpu   forecasts beside steps that were measured on an H100 and an H200 (needs no GPU)"
	@echo "make bench-scripts  three unchanged scripts from their defaults to the best of this machine (half an hour)"
	@echo "make bench-run   the ladder, Slurm, config writers, verify and the noise scale on a machine that does nothing else (an hour, as root)"
	@echo "make bench-nodes  faults planted on one of four nodes of a real Slurm, and what watch and diagnose say of each (ten minutes, as root)"
	@echo "make bench-accelerator  faults planted in the code for GPUs, and the test on a simulated device that catches each (half an hour)"
	@echo "make bench-memory, bench-adapters, bench-experts  peaks and fits, steps of LoRA and QLoRA, divided experts, beside measured rows"
	@echo "make bench-practitioners  what plan and match recommend for thirty known trainings, beside what practitioners do (ten minutes)"
	@echo "make bench-callbacks  the callbacks' time left against what trainings then took, on a machine that does nothing else (ten minutes)"
	@echo "make bench-serve   the dashboard over a million runs in Chromium, 50 clients, hostile requests (ten minutes)"
	@echo "make bench-soak  people who work with the dashboard beside hundreds who ask nothing (MINUTES=30)"
	@echo "make bench-kills  every verb ended at random moments (KILLS=100 of each; an hour or more)"
	@echo "make docs        the documentation as a site, into out/docs"
	@echo "make docs-check  run everything that README.md and docs/ show, and compare"
	@echo "make docs-generate  options of verbs, constants and other generated parts of docs/"
	@echo "make pictures    the pages of docs/pictures, made anew (a quarter of an hour, on a machine that does nothing else)"
	@echo "make session     the README's terminal picture and the recorded session, from real commands (two minutes)"
	@echo "make zoo-workloads  the packaged traces of the built-in models, made anew after a change of the tracer or of torch (a few minutes)"
	@echo "make lock        the lock files anew: versions from .venv or the files themselves, hashes from PyPI"
	@echo "make docs-refresh   run everything that docs/ show, and put the real output there (a quarter of an hour, on a machine that does nothing else)"

$(VENV)/installed: requirements.lock requirements-cuda.lock pyproject.toml tools/environment.sh
	PYTHON=$(PYTHON) tools/environment.sh $(VENV) requirements.lock
	@touch $@

# torchvision's wheels are built against CUDA builds of torch; without its dependencies, and beside the shim in
# tests/shims, its model definitions load all the same. Apart from .venv, so that nothing else sees them.
.zoo/installed: requirements-zoo.lock | $(VENV)/installed
	$(BIN)/python -m $(HASHED) --upgrade --target .zoo -r requirements-zoo.lock
	@touch $@

# transformers and peft as fms-acceleration's runs had them (its scripts/benchmarks/refs/requirements.txt)
.fms/installed: requirements-fms.lock | $(VENV)/installed
	$(BIN)/python -m $(HASHED) --upgrade --target .fms -r requirements-fms.lock
	@touch $@

# The engines that planted scripts are written for. deepspeed has no wheel on PyPI and is built with no C++ operators, by the
# setuptools of .venv: one that a build in isolation would fetch has no hash.
.engines/installed: requirements-engines.lock | $(VENV)/installed
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(BIN)/python -m $(HASHED) --no-build-isolation --upgrade \
	  --target .engines -r requirements-engines.lock
	@touch $@

# Launchers and loaders that planted scripts are written for. antlr4, which OmegaConf reads with, has no wheel on PyPI.
.frameworks/installed: requirements-frameworks.lock | $(VENV)/installed
	$(BIN)/python -m $(HASHED) --no-build-isolation --upgrade --target .frameworks -r requirements-frameworks.lock
	@touch $@

# Sphinx, which needs no torch; apart, so that .venv stays what trainpace is tested with.
.docs/installed: requirements-docs.lock | $(VENV)/installed
	$(BIN)/python -m $(HASHED) --upgrade --target .docs -r requirements-docs.lock
	@touch $@

# A kernel for notebooks, and what runs them in tests.
.notebook/installed: requirements-notebook.lock | $(VENV)/installed
	$(BIN)/python -m $(HASHED) --upgrade --target .notebook -r requirements-notebook.lock
	@touch $@

# TraceML, whose verdicts stand beside ours.
.peers-watch/installed: requirements-peers-watch.lock | $(VENV)/installed
	$(BIN)/python -m $(HASHED) --upgrade --target .peers-watch -r requirements-peers-watch.lock
	@touch $@

# Peers that are only measured against, likewise apart: they would pull versions of their own into .venv.
.peers/installed: requirements-peers.lock | $(VENV)/installed
	$(BIN)/python -m $(HASHED) --upgrade --target .peers -r requirements-peers.lock
	@touch $@

run: $(VENV)/installed
	$(BIN)/python examples/first_look.py

calculator: $(VENV)/installed
	$(BIN)/python examples/calculator.py

test: $(VENV)/installed .zoo/installed .engines/installed .frameworks/installed .docs/installed .notebook/installed lint
	$(BIN)/python -m pytest

test-long: $(VENV)/installed .zoo/installed
	PYTHONPATH=.zoo:tests/shims $(BIN)/python -m pytest -m long

test-fast: $(VENV)/installed
	$(BIN)/python -m pytest -m "not slow"

# The oldest versions that pyproject.toml admits. Torch is not among them: PyPI has no CPU build of 2.6 for Linux.
.lowest/installed: requirements-lowest.lock requirements-cuda.lock pyproject.toml tools/environment.sh
	PYTHON=$(PYTHON) tools/environment.sh .lowest requirements-lowest.lock
	@touch $@

# Warnings are no errors there: old packages warn about today's Python and NumPy.
LOWEST ?= tests
test-lowest: .lowest/installed
	@echo "the oldest versions that pyproject.toml admits, all but torch: $$(.lowest/bin/python -m pip freeze | grep '^torch==') instead of 2.6"
	.lowest/bin/python -m pytest -m "not slow and not long" -W default $(LOWEST)

# Other Pythons than that of .venv, as far as tests run without torch: no CPU build of it for them is at hand.
PYTHONS ?= 3.12 3.13
PYTHONS_TESTS := tests/forecast tests/core tests/job tests/plan tests/job tests/supply/test_command_without_torch.py tests/test_architecture.py \
  tests/test_documents.py tests/test_intake.py tests/test_lazy.py tests/test_records.py tests/test_trend.py tests/test_units.py
.pythons/%/installed: requirements-pythons.lock pyproject.toml tools/environment.sh
	PYTHON=$(call interpreter,$*) tools/environment.sh .pythons/$* requirements-pythons.lock
	@touch $@
interpreter = $(firstword $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python) $(shell command -v python$(1)))
FOUND = $(foreach version,$(PYTHONS),$(if $(call interpreter,$(version)),$(version)))

test-pythons: $(patsubst %,.pythons/%/installed,$(FOUND))
	@echo "Pythons found: $(if $(FOUND),$(FOUND),none) (of $(PYTHONS)). Not covered there: all that needs torch (tracing, measuring, watching, running)."
	for version in $(FOUND); do PYTHONPATH=tests .pythons/$$version/bin/python -m pytest -p supply.without_torch -q \
	  -m "not slow and not long" $(PYTHONS_TESTS) || exit 1; done

# how long: MINUTES=30
MINUTES ?= 30
# atheris has wheels for some Pythons and machines only; without it the files are mutated without guidance
.fuzz/installed: requirements-fuzz.lock | $(VENV)/installed
	mkdir -p .fuzz
	-$(BIN)/python -m $(HASHED) --only-binary :all: --upgrade --target .fuzz -r requirements-fuzz.lock
	@touch $@

fuzz: $(VENV)/installed .fuzz/installed
	PYTHONPATH=.fuzz $(BIN)/python tools/fuzz.py --minutes $(MINUTES)

# What looks after the locks: uv, pip-audit, cyclonedx-bom; apart, so that make lock does not take them for what trainpace needs.
.audit/installed: requirements-audit.lock | $(VENV)/installed
	$(BIN)/python -m $(HASHED) --upgrade --target .audit -r requirements-audit.lock
	@touch $@

audit: .audit/installed
	PYTHONPATH=.audit $(BIN)/python tools/audit.py

# mutmut without its browser, so that no other version of a package of .venv comes along
.mutmut/installed: requirements-mutmut.lock | $(VENV)/installed
	$(BIN)/python -m $(HASHED) --upgrade --target .mutmut -r requirements-mutmut.lock
	@touch $@

SAMPLE ?= 150
mutants: .mutmut/installed
	PYTHONPATH=.mutmut $(BIN)/python tools/mutants.py --sample $(SAMPLE)

.coverage-tools/installed: requirements-coverage.lock | $(VENV)/installed
	$(BIN)/python -m $(HASHED) --upgrade --target .coverage-tools -r requirements-coverage.lock
	@touch $@

# Apart from `make test`, which it makes 1.8 times as long in processor time. A .pth file in .venv, there only for the run, lets
# every Python process that a test starts measure itself, whatever PYTHONPATH the test gives it.
TESTS ?= tests
COVERAGE_HOOK = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/trainpace-coverage.pth
coverage: $(VENV)/installed .zoo/installed .engines/installed .frameworks/installed .coverage-tools/installed
	hook="$(COVERAGE_HOOK)"; trap 'rm -f "$$hook"' EXIT INT TERM; mkdir -p out/coverage; \
	printf '%s\nimport os; "COVERAGE_PROCESS_CONFIG" in os.environ and __import__("coverage").process_startup()\n' \
	  "$(CURDIR)/.coverage-tools" > "$$hook"; \
	$(BIN)/python -m coverage erase; $(BIN)/python -m coverage run -m pytest $(TESTS); tests=$$?; \
	$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage report; exit $$tests

lint: $(VENV)/installed
	$(BIN)/ruff check src tests benchmarks examples fitting docs tools
	$(BIN)/ruff format --check src tests benchmarks examples fitting docs tools
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python benchmarks/startup.py

bench-journal: $(VENV)/installed
	$(BIN)/python benchmarks/journal.py

bench-measure: $(VENV)/installed .zoo/installed
	PYTHONPATH=.zoo:tests/shims $(BIN)/python benchmarks/measure.py
	$(BIN)/python benchmarks/jumps.py --data $(DATA)
	$(BIN)/python benchmarks/journal_repeats.py
	$(BIN)/python benchmarks/journal.py

bench-callbacks: $(VENV)/installed .engines/installed
	PYTHONPATH=.engines $(BIN)/python benchmarks/time_left.py

bench-accelerator: $(VENV)/installed
	$(BIN)/python benchmarks/accelerator_faults.py

# where a GPU is: FOLDER gets the recordings; then `python benchmarks/diagnose_gpu.py table FOLDER` anywhere
FOLDER ?= out/diagnose_gpu
bench-diagnose-gpu: $(VENV)/installed
	$(BIN)/python benchmarks/diagnose_gpu.py measure $(FOLDER)
	$(BIN)/python benchmarks/diagnose_gpu.py table $(FOLDER)

bench-diagnose: $(VENV)/installed .engines/installed .peers-watch/installed
	$(BIN)/python benchmarks/diagnose.py

bench-datapath: $(VENV)/installed .peers/installed
	$(BIN)/python benchmarks/datapath.py
	$(BIN)/python benchmarks/thesis_case.py

# The measured runs are traced once into out/traces (about six minutes), then every use of them takes seconds.
# Before, fitting/prepare.py writes what the named collections leave to their readers into columns that any table may have.
TRACES ?= out/traces
PREPARED ?= out/prepared
$(TRACES)/done: $(VENV)/installed .zoo/installed
	$(BIN)/python -m fitting.prepare --data $(DATA) --output $(PREPARED)
	for file in measured_runs timm_inference runs2; do PYTHONPATH=.zoo:tests/shims $(BIN)/trainpace validate \
	  $(PREPARED)/$$file.parquet --models $(DATA) --traces $(TRACES) --json > /dev/null; done
	@touch $@

# single kernels; --out CARDS and --shapes 4 show what it gives on cards and shapes that it has not seen
fit-cards: $(VENV)/installed .zoo/installed
	PYTHONPATH=.:.zoo:tests/shims $(BIN)/python -m fitting.cards --data $(DATA)

fit: $(TRACES)/done
	PYTHONPATH=.:.zoo:tests/shims $(BIN)/python -m fitting.fit --data $(DATA) --traces $(TRACES)

# measured products of single cards; prints what it gives on shapes, cards and generations that it has not seen
fit-products: $(VENV)/installed
	PYTHONPATH=. $(BIN)/python -m fitting.products --data $(DATA)

fit-attention: $(VENV)/installed
	PYTHONPATH=. $(BIN)/python -m fitting.attention --data $(DATA) --folds

# after every change of constants: the packaged forecasts are of one version, which a test checks
public-journal: $(VENV)/installed .zoo/installed
	PYTHONPATH=.:.zoo:tests/shims $(BIN)/python -m fitting.public_journal --data $(DATA) --traces $(TRACES)

bench-accuracy: $(TRACES)/done
	PYTHONPATH=.:.zoo:tests/shims $(BIN)/python benchmarks/accuracy.py --data $(DATA) --traces $(TRACES) --again --write-intervals

bench-match: $(VENV)/installed
	$(BIN)/python benchmarks/goodput.py
	$(BIN)/python benchmarks/match_speed.py

# as root, for hosts as network namespaces with links of known speed
bench-cluster: $(TRACES)/done
	PYTHONPATH=.:.zoo:tests/shims $(BIN)/python benchmarks/cluster_accuracy.py --data $(DATA) --traces $(TRACES) --again
	$(BIN)/python benchmarks/cluster_search.py
	$(BIN)/python benchmarks/cluster_links.py
	$(BIN)/python benchmarks/cluster_steps.py

bench-gpu: $(VENV)/installed .zoo/installed
	PYTHONPATH=.:.zoo:tests/shims $(BIN)/python benchmarks/gpu_accuracy.py

bench-serve: $(VENV)/installed
	$(BIN)/python benchmarks/dashboard.py

# how long: MINUTES=30
bench-soak: $(VENV)/installed
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES)

KILLS ?= 100
bench-kills: $(VENV)/installed
	$(BIN)/python benchmarks/kills.py --kills $(KILLS)

# as root, for a Slurm whose nodes are network namespaces
bench-run: $(VENV)/installed .zoo/installed .engines/installed
	PYTHONPATH=.engines $(BIN)/python benchmarks/run_ladder.py
	PYTHONPATH=.engines $(BIN)/python benchmarks/run_slurm.py
	PYTHONPATH=.engines $(BIN)/python benchmarks/config_writers.py
	PYTHONPATH=.zoo:tests/shims $(BIN)/python benchmarks/equivalence.py
	$(BIN)/python benchmarks/noise_scale.py

bench-scripts: $(VENV)/installed
	$(BIN)/python benchmarks/script_ladders.py

# as root, for a Slurm whose nodes are network namespaces
bench-nodes: $(VENV)/installed
	$(BIN)/python benchmarks/run_nodes.py

bench-memory: $(VENV)/installed .zoo/installed .fms/installed
	PYTHONPATH=.:.zoo:tests/shims $(BIN)/python -m benchmarks.memory $(DATA)

bench-adapters: $(VENV)/installed .zoo/installed .fms/installed
	PYTHONPATH=.:.zoo:tests/shims $(BIN)/python benchmarks/adapters.py

bench-practitioners: $(VENV)/installed
	$(BIN)/python benchmarks/practitioners.py

bench-experts: $(VENV)/installed
	PYTHONPATH=. $(BIN)/python -m benchmarks.experts --data $(DATA)

bench-architectures: $(VENV)/installed .zoo/installed
	PYTHONPATH=.zoo:tests/shims $(BIN)/python benchmarks/architectures.py

# as root: the thesis replayed on a Slurm of four nodes
bench-thesis: $(VENV)/installed .engines/installed
	PYTHONPATH=.engines $(BIN)/python benchmarks/thesis_replay.py

docs: $(VENV)/installed .docs/installed
	PYTHONPATH=.docs $(BIN)/python -m sphinx -q -W -E -d out/docs-trees docs out/docs
	@echo "out/docs/index.html"

docs-check: $(VENV)/installed .docs/installed
	$(BIN)/python -m pytest tests/test_docs.py -o addopts=

pictures: $(VENV)/installed
	$(BIN)/python benchmarks/pictures.py
	$(BIN)/python benchmarks/chart_gallery.py

session: $(VENV)/installed
	$(BIN)/python tools/session.py --keep

docs-generate: $(VENV)/installed
	$(BIN)/python tools/generate.py
	$(BIN)/python tools/api_stub.py
	$(BIN)/python tools/man_page.py

docs-refresh: docs-generate
	OMP_NUM_THREADS=1 $(BIN)/python tools/pages.py --write docs/tutorial.md docs/sources.md docs/recipes/*.md docs/verbs/*.md

zoo-workloads: $(VENV)/installed
	$(BIN)/python tools/zoo_workloads.py

lock: .audit/installed
	$(BIN)/python tools/lock.py

clean:
	rm -rf $(VENV) .zoo .fms .engines .frameworks .docs .notebook .audit .fuzz .mutmut mutants .coverage-tools .lowest .pythons .sim .peers .peers-watch out docs/results .pytest_cache .mypy_cache .ruff_cache .hypothesis
