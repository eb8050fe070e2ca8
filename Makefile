# One command each; what needs .venv first makes it, and installs what is missing or has changed.
#
#   make setup       .venv alone; then .venv/bin/workbench --help
#   make figures     run the memory study here and draw it       PROFILE=quick|default|full|thesis
#                    and the notebooks' parameters               llm=FOLDER total_memory=40GiB seeds=[0]
#   make test        the tests                                   TESTS=tests/kvcache  WORKERS=1
#   make lab         JupyterLab on the notebooks
#   make bench       the benchmarks, into build/bench            BENCH="engine search identity memory"
#   make bench-peers vLLM and llama.cpp, to bench against        PEERS="vllm llama.cpp search-and-learn"
#   make clean       deletes .venv, build (peers, benchmark records, figures of other profiles) and
#                    reports/notebooks; measured runs (reports/runs) stay
#
# TORCH_INDEX=URL chooses where torch comes from, PYTHON=python3.12 the interpreter, NO_BROWSER=1 leaves apt alone.
# ARGS= goes to the command as it is:                             make figures ARGS=--dry-run

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory
export PYTHONDONTWRITEBYTECODE :=  # or each of a hundred processes would compile what it imports

VENV ?= .venv
BIN := $(VENV)/bin
PROFILE ?= default
BENCH ?= engine search identity memory
PEERS ?= vllm llama.cpp
TESTS ?= tests
WORKERS ?= 2
ARGS ?=

# Parameters of the notebooks that were given on make's command line, as options of `workbench figures`.
PARAMETERS := llm prm total_memory shares problems num_problems seeds n max_depth
GIVEN = $(foreach name,$(PARAMETERS),$(if $(filter command,$(origin $(name))),-p '$(name)=$($(name))')) \
	$(if $(filter command,$(origin runs_dir)),--runs '$(runs_dir)')

# The stamp's name holds what was installed: a change of these files installs again, nothing else does.
CONTENTS := $(shell cat pyproject.toml constraints.txt .ci/setup | cksum | tr -d ' ')
READY := $(VENV)/.installed-$(CONTENTS)

.PHONY: help setup figures test lab bench bench-peers clean
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(READY)
$(READY):
	@.ci/setup $(VENV)
	@rm -f $(VENV)/.installed-*
	@touch $@

figures: $(READY)
	$(BIN)/workbench figures --profile $(PROFILE) $(strip $(GIVEN) $(ARGS))

test: $(READY)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

lab: $(READY)
	$(BIN)/jupyter lab --notebook-dir notebooks

bench: $(READY)
	@mkdir -p build/bench
	for name in $(BENCH); do $(BIN)/workbench bench $$name --json build/bench/$$name.json $(ARGS); done

bench-peers:
	@PYTHON=$${PYTHON:-python3} .ci/peers $(PEERS)

clean:
	rm -rf $(VENV) build dist reports/notebooks *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
