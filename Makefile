# Everything a developer needs; nothing but python3 (3.10 or newer) and make must be there before.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup demo test test-fleet test-aarch64 test-cuda check bench soak timelines clean
.DEFAULT_GOAL := setup

setup: $(READY)

# torch first and alone: whatever build of that version this machine's pip is set up to give is kept.
$(READY): pyproject.toml deploy/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed" if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint deploy/constraints.txt torch==2.13.0
	PIP_CONSTRAINT=$(CURDIR)/deploy/constraints.txt $(PIP) install --quiet --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/flowspec demo

check: $(READY)
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/test_layout.py
	$(BIN)/hadolint Dockerfile.jetson

# In the order of the files, the last of which are short: by their number of tests, those that have few but
# wait long for processes would come last.  Three, because that waiting leaves a core idle where there are two.
test: check
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder \
		-m 'not soak and not fleet and not aarch64'

soak: $(READY)
	$(BIN)/python -m pytest -m 'soak and not fleet and not aarch64'

# Five containers with a systemd each: root's alone.  The image is made once: a few minutes, 1.3 GB.
test-fleet: $(READY)
	$(BIN)/python -m pytest -m fleet tests/e2e

# The boards' instruction set, emulated, with the oldest libraries that are allowed: slow.
test-aarch64: $(READY)
	$(BIN)/python -m pytest -m aarch64 tests/e2e

# On a machine with a GPU: what only that can show, and what stages and D0 take there at a real model's shape.
CUDA_FIGURES ?= build/cuda-figures.json
test-cuda: $(READY)
	$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("PyTorch sees no GPU here")'
	$(BIN)/python -m pytest -m cuda
	mkdir -p $(dir $(CUDA_FIGURES))
	$(BIN)/python -m flowspec_edge.bench.micro_shapes --device cuda --dtype fp16 --json $(CUDA_FIGURES)

bench: $(READY)
	for file in flowspec_edge/bench/micro_*.py; do \
		$(BIN)/python -m flowspec_edge.bench.$$(basename $$file .py) || exit 1; done

# The pictures in the documents, drawn anew from real runs.
timelines: $(READY)
	$(BIN)/python -m flowspec_edge.bench.document docs/strategies.md docs/benchmarks.md

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
