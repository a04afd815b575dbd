# One command per stage; `make demo` is the whole pipeline. Every target sets up `.venv` first, which is a no-op afterwards.
#   CONFIG  the experiment            make distill CONFIG=configs/demo.yaml
#   ARGS    passed on as they are     make demo ARGS="evaluation.K=4"
#   RUN     a finished run            make bench-decode RUN=runs/demo
#   DRAFT   of its drafts, TO a format    make export DRAFT=eagle3 TO=vllm

CONFIG ?= configs/demo.yaml
RUN ?= runs/demo
DRAFT ?= eagle3
TO ?= vllm
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAGES := target prepare cache distill train-eagle eval-acceptance tune
# The first Python that is new enough; PYTHON=/path/to/python overrides the search.
FIND_PYTHON = for python in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; done

.PHONY: help setup demo $(STAGES) plan show-mask regenerate report export test test-long lint
.PHONY: format types clean bench-decode bench-tune bench-cache bench-cache-speed bench-scaling study-distill chaos test-serving study-eagle bench-peers smollm2 study-smollm2 bench-few-rows
.DEFAULT_GOAL := help

help:
	@echo "make demo              every stage on the embedded default, then the result table and runs/demo/report.html"
	@echo "make test, test-long   the tests; the long ones are minutes of sampling"
	@echo "make STAGE             one of: $(STAGES); with CONFIG=FILE and ARGS=\"key.sub=value ...\""
	@echo "make plan, show-mask   what would run, and prepared samples with their masks; with CONFIG=FILE"
	@echo "make regenerate        answers of the target itself to the questions of the data; with CONFIG=FILE"
	@echo "make report RUN=DIR    rebuilds the report of a run"
	@echo "make smollm2           a real target without a model hub: SmolLM2-135M-Instruct, for configs/smollm2-135m.yaml"
	@echo "make study-smollm2     EAGLE-3 against EAGLE-1 on that target, the same tokens and tree; an hour and a half, goes on where it stopped"
	@echo "make export            a draft for an engine; with RUN=DIR, DRAFT=eagle3, TO=vllm|sglang|trtllm|speculators|transformers"
	@echo "These read the finished run RUN=DIR (default $(RUN)):"
	@echo "make test-serving      the drafts of a finished run RUN=DIR in vLLM, against our decoder; installs it into the user's cache first"
	@echo "make bench-decode      the decoder against transformers, trees, costs"
	@echo "make bench-tune        the tuner's predictions against decoding, on the target and its heavy twin; ten minutes"
	@echo "make bench-cache       cache codecs: bytes, speed, acceptance of drafts trained on them; half an hour, goes on where it stopped"
	@echo "make study-distill     losses, draft sizes and teachers against each other, under an hour"
	@echo "make study-eagle       the EAGLE papers' claims one by one, under 90 minutes; goes on where it stopped"
	@echo "make bench-cache-speed caching against the bare target forward, and where the time goes"
	@echo "make bench-few-rows    what models/few_rows.py is worth on this machine; two minutes"
	@echo "make bench-peers       our EAGLE-3 recipe against those of speculators and SpecForge, which it installs (3 GB); half an hour"
	@echo "make bench-scaling     the figures of docs/scaling.md, from the functions that plan asks; seconds"
	@echo "make chaos             two hundred injected faults, compared with an undisturbed run; at most 20 minutes a call"
	@echo "make lint, types, format, setup, clean"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(FIND_PYTHON); test -n "$$python" || { echo "Draftsmith needs Python 3.11 or newer: install it, or give PYTHON=/path/to/python"; exit 2; }; \
	test -x $(BIN)/python || $$python -m venv $(VENV)
	@echo "installing into $(VENV): some minutes the first time"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/draftsmith demo $(ARGS)

$(STAGES) plan show-mask regenerate: setup
	$(BIN)/draftsmith $@ $(CONFIG) $(ARGS)

bench-decode: setup
	$(BIN)/python benchmarks/decode.py $(RUN) $(ARGS)

bench-tune: setup
	$(BIN)/python benchmarks/tune.py $(RUN) $(ARGS)

bench-cache: setup
	$(BIN)/python benchmarks/cache.py $(RUN) $(ARGS)

study-distill: setup
	$(BIN)/python benchmarks/distill.py $(RUN) $(ARGS)

test-serving: setup
	$(BIN)/python benchmarks/serving.py $(RUN) $(ARGS)

study-eagle: setup
	$(BIN)/python benchmarks/eagle.py $(RUN) $(ARGS)

bench-cache-speed: setup
	$(BIN)/python benchmarks/cache_speed.py $(RUN) $(ARGS)

bench-peers: setup
	$(BIN)/python benchmarks/peers/compare.py $(RUN) $(ARGS)

bench-few-rows: setup
	$(BIN)/python benchmarks/few_rows.py $(RUN) $(ARGS)

bench-scaling: setup
	$(BIN)/python benchmarks/scaling.py

chaos: setup
	$(BIN)/python benchmarks/chaos.py $(ARGS)

smollm2: setup
	$(BIN)/python benchmarks/smollm2.py

study-smollm2: smollm2
	$(BIN)/draftsmith cache configs/smollm2-135m.yaml
	$(BIN)/python benchmarks/smollm2_study.py $(ARGS)

export: setup
	$(BIN)/draftsmith export $(RUN) --draft $(DRAFT) --to $(TO) $(ARGS)

report: setup
	$(BIN)/draftsmith report $(RUN)

test: setup
	$(BIN)/python -m pytest -n auto $(ARGS)

test-long: setup
	$(BIN)/python -m pytest -n auto -m long $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy sees the names under which the folders are installed.
types: setup
	@rm -rf .typecheck && mkdir -p .typecheck/draftsmith
	@for folder in data models train eval configs; do ln -s ../../$$folder .typecheck/draftsmith/$$folder; done
	@for file in draftsmith/*.py; do ln -s ../../$$file .typecheck/$$file; done
	$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info .typecheck .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
