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

demo: ## record the run that the viewer shows with --demo
	uv run python -m tests.cpu.demo_run

hooks: ## install the pre-commit hooks
	uvx pre-commit install
