"""skyrl_async: a fully asynchronous RL trainer for language-model agents, with in-flight weight updates.

Importing the package is light: torch, ray and vllm are imported by the modules that are about them.
"""

import os

# Ray's uv hook re-creates the environment for every worker (first actor 32 s instead of 5), and Ray starts workers at
# nice 15, at which an engine needs minutes to boot on a busy machine. Both are read when ray is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
