.PHONY: test check lint format reference

export OMP_NUM_THREADS ?= 1

test: ## the tests that need no GPU
	uv run pytest tests/cpu

check: ## everything that has to pass, as in CI
	.ci/run

lint:
	uv run ruff check .
	uv run ruff format --check .
	uv run mypy skyrl_async skyrl_gym_http

format:
	uv run ruff format .
	uv run ruff check --fix .

reference: ## the pages that are written from the code
	uv run python -m skyrl_async.config.help > docs/reference/config.md
	uv run python -m skyrl_async.config.coming_from_page > docs/coming_from.md
	uv run python -m skyrl_async.metrics.names > docs/reference/metrics.md
