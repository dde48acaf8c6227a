# Every target but help and clean first brings .venv up to date (a few milliseconds if it is).
.DEFAULT_GOAL := help
.PHONY: help install demo demo-multiturn serve test test-fast chaos check bench docs clean

BIN := .venv/bin
ARGS ?=
N ?= 20

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## create .venv from requirements/cpu.lock and install the project in it
	@.ci/setup.sh

demo: install ## train, be killed in mid-rollout, restore, go on (about five minutes)
	@$(BIN)/midflight demo $(ARGS)

demo-multiturn: install ## the same with a game of several turns: running episodes keep their finished turns
	@$(BIN)/midflight demo --multi-turn $(ARGS)

serve: install ## Prefect server, worker, Ray and the deployments, and the page to open (Ctrl-C ends them)
	@$(BIN)/midflight serve $(ARGS)

test: install ## the whole test suite: the fast tests, then those with real Ray, vLLM and Prefect
	@.ci/test.sh $(ARGS)

test-fast: install ## without the tests that start Ray, vLLM or Prefect (ARGS="-k word" picks some)
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not system and not benchmark" $(ARGS)

chaos: install ## N seeded faults (20) on real runs, each resumed and audited (N=200 at night; ARGS="--seed 40")
	@$(BIN)/midflight chaos --count $(N) $(ARGS)

check: install ## ruff, ruff format, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install ## the benchmarks, as tables (about an hour; SHORT=1: about 25 minutes)
	@$(BIN)/python -m pytest benchmarks -m benchmark -s $(ARGS)
	@$(BIN)/python -m benchmarks.engine_start
	@$(BIN)/python -m benchmarks.generation_throughput
	@$(BIN)/python -m benchmarks.restore_to_dispatch $(if $(SHORT),--short)
	@$(BIN)/python -m benchmarks.recovery_levels $(if $(SHORT),--kills 3)
	@$(BIN)/python -m benchmarks.length_bias $(if $(SHORT),--calls 24000)
	@$(BIN)/python -m benchmarks.peek_cost $(if $(SHORT),--rounds 4)
	@$(BIN)/python -m benchmarks.partial_call_bytes
	@$(BIN)/python -m benchmarks.snapshot_interval $(if $(SHORT),--short)
	@$(BIN)/python -m benchmarks.snapshot_interval --level prefix --interval-s 5 $(if $(SHORT),--short)
	@$(BIN)/python -m benchmarks.orchestration_cost $(if $(SHORT),--short)
	@$(BIN)/python -m benchmarks.trace_cost $(if $(SHORT),--rounds 3)
	@$(BIN)/python -m benchmarks.trace_analytics $(if $(SHORT),--events 1000000)

docs: install ## write docs/configuration.md and the tables of keys in other pages from the code
	@$(BIN)/midflight config-reference > docs/configuration.md.new
	@mv docs/configuration.md.new docs/configuration.md
	@$(BIN)/midflight config-reference $(patsubst %,--fill %,$(wildcard docs/*.md))

clean: ## remove .venv, caches and what the demo wrote; runs under .midflight/ stay
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f demo-report.json demo-reward.svg docs/configuration.md.new
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
