# The verbs people type. Everything runs from .venv, which the first of them makes.
PYTHON ?= python3
BIN := .venv/bin
SET_UP := .venv/set-up
DEMO := demo

.PHONY: help demo test test-slow faults soak bench-stopped-peer sim test-upstream golden pages docs forecast lint format clean

help:
	@echo "make demo           one question to a real model over prefill and decode, from nothing"
	@echo "make test           all tests that a change must pass"
	@echo "make test-slow      what takes too long for every change"
	@echo "make faults         the known failures on our connector and on stock's; writes docs/faults.md"
	@echo "make soak           requests under faults, aborts and restarts for half an hour"
	@echo "make bench-stopped-peer  decode's steps beside a prefill engine that is stopped"
	@echo "make sim            a million random histories of the push protocol, with faults"
	@echo "make test-upstream  vLLM's own tests, on the stock and on the patched build"
	@echo "make golden         rendered output that tests compare, written anew"
	@echo "make pages          pages of docs/ that are made from tables and schemas, written anew"
	@echo "make docs           the site of docs/, into build/site; a warning is an error"
	@echo "make forecast       which patches fail on the newest vLLM that is published, and where"
	@echo "make lint           ruff and mypy"
	@echo "make format         let ruff format the code"
	@echo "make clean          remove .venv and caches of tools; engines and models stay cached"

$(SET_UP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# The question is one short chunk of prefill; the second prompt has several, so that most of its KV
# moves while prefill runs.
# Whatever happens in between, all is taken down at the end: the name belongs to this target.
demo: $(SET_UP)
	@trap '$(BIN)/pdlaunch down $(DEMO)' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; \
	$(BIN)/pdlaunch up smollm2-135m-cpu --name $(DEMO) --detach && \
	$(BIN)/pdlaunch ask $(DEMO) "What is the capital of France?" && \
	$(BIN)/pdlaunch ask $(DEMO) "$$(head -c 3000 README.md)" --max-tokens 24 && \
	$(BIN)/pdlaunch status $(DEMO)

# Tests without engines wait for half of their time; those with engines need all cores.
test: $(SET_UP)
	$(BIN)/python -m pytest -m "not slow and not soak and not e2e" -n 3 --dist loadfile
	$(BIN)/python -m pytest -m "not slow and not soak and e2e"

test-slow: $(SET_UP)
	$(BIN)/python -m pytest -m slow

faults: $(SET_UP)
	$(BIN)/python tests/proofs/run_faults.py

soak: $(SET_UP)
	$(BIN)/python -m pytest -m soak -s

bench-stopped-peer: $(SET_UP)
	$(BIN)/python tests/benchmarks/stopped_peer.py

sim: $(SET_UP)
	$(BIN)/python tests/simulation/run.py

test-upstream: $(SET_UP)
	$(BIN)/python tests/upstream/run.py

golden: $(SET_UP)
	$(BIN)/python tests/launcher/golden_files.py

pages: $(SET_UP)
	$(BIN)/python tests/launcher/recipe_page.py
	$(BIN)/python tests/proofs/combinations.py

docs: $(SET_UP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

forecast: $(SET_UP)
	$(BIN)/pdlaunch patch check --against newest

lint: $(SET_UP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(SET_UP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
