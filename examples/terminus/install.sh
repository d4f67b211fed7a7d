#!/usr/bin/env bash
# Terminus-2 in an environment of its own: bash examples/terminus/install.sh DIR [PYTHON]
#
# harbor, which brings it, asks for Python 3.12 and is installed with --ignore-requires-python, so that 3.11 does as well: the part
# of it that Terminus-2 needs runs there unmodified (harness.py lends it two names of typing). Its other dependencies are left out.
set -euo pipefail
directory="$1"
python="${2:-python3}"

uv venv -q --python "$python" "$directory"
uv pip install -q --python "$directory" --exclude-newer 2026-11-20T00:00:00Z pip \
  dirhash fastapi filelock httpx jinja2 jsonschema litellm packaging pathspec platformdirs pydantic pyjwt python-dotenv pyyaml \
  requests rich semver shortuuid supabase tenacity toml typer typing-extensions uvicorn
"$directory/bin/python" -m pip install -q --no-deps --ignore-requires-python harbor==0.24.0
