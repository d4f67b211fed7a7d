.DEFAULT_GOAL := help
.PHONY: help test quick check lint format reference hooks demo

export OMP_NUM_THREADS ?= 1

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: ## run the tests that need no GPU
	uv run pytest tests/cpu

quick: ## run those of them that take less than a second each
	uv run pytest tests/cpu -m "not slow"

check: ## run everything that has to pass, as CI does
	.ci/run

lint: ## check lint, format and types
	uv run ruff check .
	uv run ruff format --check .
	uv run mypy skyrl_async skyrl_gym_http

format: ## format, and fix what can be fixed
	uv run ruff format .
	uv run ruff check --fix .

reference: ## write the pages that are made from the code
	uv run python -m tests.cpu.reference_pages

DEMO := skyrl_async/view/demo

demo: ## record the run that the viewer shows with --demo
	rm -rf $(DEMO) outputs/demo
	uv run python -m skyrl_async.main trainer.output_dir=outputs/demo trainer.num_steps=40 trainer.max_staleness_steps=4 trainer.samples.keep=2
	mkdir $(DEMO)
	cd outputs/demo && cp -r config.yaml metrics.jsonl samples trace tokenizer.json ../../$(DEMO)
	chmod 644 $(DEMO)/config.yaml
	uv run python -c "from pathlib import Path; from skyrl_async.record.files import *; join(files_in(Path('$(DEMO)/samples')))"

hooks: ## install the pre-commit hooks
	uvx pre-commit install
