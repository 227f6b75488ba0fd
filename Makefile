# One word per habit; `make` alone lists them.
#
# PYTHON=python3.12 make setup     another interpreter
# make setup TORCH=torch==2.13.0   that build of torch, as pip finds it (default: a CPU build if there is one)
# make setup TORCH_INDEX=URL       also look for the CPU build in that package index, such as PyTorch's own
# make fuzz SECONDS=600            as long for each parser (default: 60)
# make test WORKERS=8              as many processes (default: 2; 0: none but pytest itself)
# make test ROOM=convert           the tests under tests/convert alone; also of test-slow
# make test-slow ROWS=all          all pairs of families, options and faults, hours (default: each value of each once)

PYTHON ?= python3
TORCH ?=
WORKERS ?= 2
SECONDS ?= 60
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow clients check fix bench families versions mutants other-exporters docs site pictures fuzz wheel size

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "make %-15s %s\n", $$1, $$2 }'

setup: $(READY) ## create .venv from constraints.txt; quick when there is nothing to do
	@echo "ready: $(BIN)/llmconv; \`. $(BIN)/activate\` makes it llmconv, \`make demo\` shows it at work"

$(READY): pyproject.toml setup.py constraints.txt tools/set_up.py convert/adapters/low_rank_sum.c \
		export/quantization/block_rounding.c llmconv/compressed/block_codes.c
	@$(PYTHON) tools/set_up.py --torch '$(TORCH)'
	@touch $@

demo: $(READY) ## the main job on a real checkpoint, from examples/ to text
	@$(BIN)/python examples/demo.py

test: $(READY) ## the quick tests, about four minutes; with ROOM=convert those of a room
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not slow' $(ROOM:%=tests/%)

test-slow: $(READY) ## the slow tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ROOM:%=tests/%)

test test-slow: export HF_HUB_OFFLINE = 1
test-slow: export ROWS := $(ROWS)

clients: $(READY) ## environments of genai, optimum, transformers.js, WebGPU, vLLM, azurite and a browser for test-slow, kept in build/
	$(BIN)/python -m tools.clients

check: $(READY) ## look, change nothing: lint, format, spelling, types, layers, generated pages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell README.md CONTRIBUTING.md docs convert export verify llmconv plugins tests tools benchmarks examples
	@if [ -x $(BIN)/hadolint ]; then $(BIN)/hadolint Dockerfile; else echo 'hadolint: no build for this machine'; fi
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.cli_page --check
	$(BIN)/python -m tools.formats_page --check
	$(BIN)/python -m tools.fields_page --check
	$(BIN)/python -m tools.action_page --check
	$(BIN)/python -m tools.touched --check

fix: $(READY) ## what a machine can put right
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY) ## time and peak memory of every job, kept in docs/benchmarks.md
	@status=0; for module in $$(grep -l '__main__' benchmarks/*.py | tr / . | sed 's/\.py$$//'); do \
		echo "python -m $$module"; $(BIN)/python -m $$module --write docs/benchmarks.md || status=1; \
	done; exit $$status

families: $(READY) ## export and verify a tiny model of every family, also quantized, hours; kept in docs/families.md
	status=0; for bits in int4 int8; do $(BIN)/python -m tools.families --suite quick --quant $$bits || status=1; done; \
	$(BIN)/python -m tools.families --suite full --write docs/families.md || status=1; exit $$status

versions: $(READY) ## the demo and quick tests with other versions of the dependencies and of Python; kept in docs/versions.md
	$(BIN)/python -m tools.versions

mutants: $(READY) ## faulty and clean graphs under verify and other checks, an hour; kept in docs/calibration.md
	$(BIN)/python -m tools.calibrate

other-exporters: $(READY) ## verify their graphs of tiny models; kept in docs/verification-other-exporters.md
	$(BIN)/python -m tools.other_exporters --write

docs: $(READY) ## write the generated pages again
	$(BIN)/python -m tools.cli_page
	$(BIN)/python -m tools.formats_page
	$(BIN)/python -m tools.fields_page
	$(BIN)/python -m tools.action_page

site: $(READY) ## build the documentation as a site, build/site/index.html; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --clean

pictures: $(READY) ## screenshots of the report and of the chat page, by a browser from npm; kept in docs/pictures/
	$(BIN)/python -m tools.screenshots

fuzz: $(READY) ## changed inputs for every parser, SECONDS=60 each; what goes wrong is kept in tests/fuzz/corpus
	@$(BIN)/python -m tests.fuzz.run --seconds $(SECONDS)

wheel: $(READY) ## build it from the sdist, compare it with the tree, use it in a fresh environment
	$(BIN)/python -m tools.wheel

size: $(READY) ## lines per file and the longest functions, with the ceilings
	$(BIN)/python -m tools.size
