# /// script
# requires-python = ">=3.11"
# dependencies = ["mini-swe-agent==2.4.6", "litellm[mcp]"]
# [tool.uv]
# exclude-newer = "2026-11-20T00:00:00Z"
# ///
"""mini-swe-agent, unmodified, in a git repository of its own: what ``generator.command`` runs.

Flows in: the task file, and the address, key and model of a session, all by the environment. Flows out: the repaired
repository in ``repo``, and its diff as the answer. Needs nothing of skyrl_async.

``AGENT_FORMAT`` chooses how commands are written: ``tools`` (tool calls, mini-swe-agent's default) or ``text`` (a fenced block, for
models without tools).
"""

import json
import os
import subprocess
from pathlib import Path

STEP_LIMIT = 20
FORMATS = {"tools": ("mini.yaml", "litellm"), "text": ("mini_textbased.yaml", "litellm_textbased")}
"""mini-swe-agent's own configuration and model class for each format."""
SETTINGS = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks the internet for prices first
    "MSWEA_GLOBAL_CONFIG_DIR": str(Path(".mini").absolute()),
    "MSWEA_SILENT_STARTUP": "1",
}


def git(repo: Path, *arguments: str) -> str:
    """Run git in ``repo`` and return what it prints."""
    author = ("-c", "user.name=agent", "-c", "user.email=agent@localhost")
    return subprocess.run(["git", *author, *arguments], cwd=repo, check=True, capture_output=True, text=True).stdout


def make_repository(repo: Path, files: dict[str, str]) -> None:
    """A git repository with ``files`` (path to text) in its one commit."""
    for name, text in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text)
    git(repo, "init", "-q")
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "Start")


def run_agent(repo: Path, instruction: str) -> None:
    """Let the agent work in ``repo`` until it submits or has taken ``STEP_LIMIT`` steps."""
    os.environ.update(SETTINGS)  # read when the packages are imported
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_from_spec
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models import get_model

    config_name, model_class = FORMATS[os.environ.get("AGENT_FORMAT", "tools")]
    config = get_config_from_spec(config_name)
    model = get_model(
        f"openai/{os.environ['OPENAI_MODEL']}",
        {**config["model"], "model_class": model_class, "cost_tracking": "ignore_errors"},
    )
    environment = LocalEnvironment(cwd=str(repo), **config["environment"])
    DefaultAgent(model, environment, **{**config["agent"], "step_limit": STEP_LIMIT}).run(instruction)


def main() -> None:
    """Make the repository, let the agent work on it, and hand in the diff."""
    task = json.loads(Path(os.environ["SKYRL_TASK_FILE"]).read_text())
    repo = Path("repo").absolute()
    make_repository(repo, task["extras"]["files"])
    run_agent(repo, task["messages"][-1]["content"])
    Path(os.environ["SKYRL_RESULT_FILE"]).write_text(json.dumps({"output": git(repo, "diff")}))


if __name__ == "__main__":
    main()
