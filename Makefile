# Needs Python 3.11 or newer, make and a package index. `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
# Two processes with one thread each: more threads on a small machine only wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: help install demo test long slow full oldest readme coverage coverage-libraries bench gpu paper docs lint format typecheck check clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

install: $(READY)  ## .venv with the package (editable), what tests and checks need, and the C++ kernels

# An existing .venv is kept, and so is a torch that is already in it.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: run make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e '.[dev]' $(TORCH)
	$(BIN)/fractrain build || echo 'Without C++ kernels everything works, more slowly.'
	touch $@

demo: $(READY)  ## train a ResNet on the digits as float, static FW-8/BW-8 and FracTrain, and compare them
	$(BIN)/python examples/demo.py

test: $(READY)  ## all tests but the long ones and the documentation's
	$(PYTEST) --ignore=tests/test_readme.py

long: $(READY)  ## tests that start processes or torch's compiler, each for many seconds
	$(PYTEST) -m 'long and not slow'

slow: $(READY)  ## sweeps of minutes: all sample models, devices and formats, training killed twenty times
	$(PYTEST) -m slow

# In one run, because each starts with half a minute of imports.
full: $(READY)  ## test, long and readme together
	$(PYTEST) -m 'not slow'

oldest:  ## the tests and the long tests with the oldest torch that pyproject.toml allows, in .venv-oldest
	$(MAKE) VENV=.venv-oldest TORCH='torch==2.11.*' test long

readme: $(READY)  ## run the code blocks of README.md and docs/
	$(PYTEST) tests/test_readme.py

# Hours on a small machine; it goes on where it stopped, and SAMPLE= runs every architecture of timm.
SAMPLE ?= --sample
coverage: $(READY)  ## put timm, Hugging Face and torchvision through every check, and write docs/measured/coverage.md
	for suite in timm hf torchvision; do \
		$(BIN)/python -m benchmarks.coverage --suite $$suite $(SAMPLE) --out docs/results/coverage.json.gz \
			--table docs/measured/coverage.md || exit 1; \
	done

# Other people's libraries, in an environment that sees this one's packages: none of them may bring another torch, so
# none brings what it depends on, and requirements.txt names that as well.
LIBRARIES := .venv-libraries
FOREIGN := benchmarks/coverage/libraries/requirements.txt
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

$(LIBRARIES)/.installed: $(READY) $(FOREIGN)
	test -x $(LIBRARIES)/bin/python || $(BIN)/python -m venv $(LIBRARIES)
	$(BIN)/python $(SITE) > $$($(LIBRARIES)/bin/python $(SITE))/project.pth
	$(LIBRARIES)/bin/python -m pip install --no-deps -r $(FOREIGN)
	touch $@

coverage-libraries: $(LIBRARIES)/.installed  ## put models of third-party libraries through every check
	$(LIBRARIES)/bin/python -m benchmarks.coverage --suite libraries --seconds 300 \
		--out docs/results/coverage.json.gz --table docs/measured/coverage.md

# Minutes, so only two models and the main methods; docs/results/performance/README.md has the command of every table.
bench: $(READY)  ## time and saved memory of a training step against float32 (short form)
	$(BIN)/python -W ignore -m benchmarks.step --models resnet38 transformer-base --methods float pfq dfq --rounds 5

gpu: $(READY)  ## check and measure on an NVIDIA GPU in under 9 minutes, and write docs/measured/gpu.md
	$(BIN)/python -W ignore -m benchmarks.gpu --minutes 9

paper: $(READY)  ## compute the tables of docs/measured/paper.md anew
	for table in 1 2 3 4 5 supplement-1 figure-3 figure-5 ablation; do \
		$(BIN)/fractrain zoo table $$table --into docs/measured/paper.md || exit 1; \
	done

docs: $(READY)  ## the site of docs/ and README.md in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(READY)  ## mypy --strict on the package, the benchmarks and the tests
	$(BIN)/mypy

check: full lint typecheck docs  ## everything that must pass

clean:  ## remove caches and build leftovers, keep .venv and runs
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
