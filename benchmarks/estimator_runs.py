"""What each advantage estimator and each policy loss trains: a real run of ``relay``, whose turns are rewarded one by one, for each, and
some variants.

``reward_before`` and ``reward_after`` are of held-out prompts; ``rows_per_sample``, and a critic's ``explained_variance``, are means over
steps; null: there is none, or it was not kept. A run is short, and has one seed: the rows show that an algorithm works from the command
line to the policy, not which one is best. ``--only`` runs some, and keeps the other rows of the file.
"""

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from openai import AsyncOpenAI

from benchmarks.report import arguments, conditions, kept_rows, report
from examples.own_agent.tool_agent import MAX_TURNS, look
from skyrl_async.config.load import from_overrides
from skyrl_async.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyrl_async.tasks.lagged_fibonacci import score, worked_answer

_EXPLAINED = "critic/explained_variance"
SINGLE = ("gae", "turn_gae", "running_mean")
"""Those that need no group: they get one sample per prompt, of 32 prompts a step."""
_REWRITTEN = ["task=trail", "generator=agent", "generator.entrypoint=benchmarks.estimator_runs:forgetful"]
VARIANTS = {
    "grpo, update_epochs_per_batch=2": ["trainer.update_epochs_per_batch=2", "trainer.train_batch_size=16"],
    "grpo, rewritten histories": _REWRITTEN,
    "grpo, rewritten histories, split_sample_weight=true": [*_REWRITTEN, "trainer.algorithm.split_sample_weight=true"],
    "gae, update_epochs_per_batch=2": ["trainer.update_epochs_per_batch=2"],
    "gae, advantage_batch_normalize=true": ["trainer.algorithm.advantage_batch_normalize=true"],
    "gae, partial_credit": ["task=lagged_fibonacci", "task.reward=benchmarks.estimator_runs:partial_credit"],
}
"""Name of a row -> its other words. With grpo two epochs are four optimizer steps per batch, over two mini-batches. The agent of
rewritten histories asks about ``trail`` and forgets, so that samples are split into rows. ``partial_credit`` rewards tokens of the default
task, an answer of which is one turn."""
_SEQUENCE_MEAN = "trainer.algorithm.loss_reduction=sequence_mean"
_OF_LOSS = {
    "gspo": [_SEQUENCE_MEAN, "trainer.algorithm.eps_clip_low=3e-4", "trainer.algorithm.eps_clip_high=4e-4"],
    "sapo": [_SEQUENCE_MEAN],
}
"""What a loss is meant to go with."""
LOSSES = {
    f"grpo, {name}": [f"trainer.algorithm.policy_loss_type={name}", *_OF_LOSS.get(name, ())]
    for name, entry in POLICY_LOSSES.entries.items()
    if POLICY_LOSSES.is_builtin(name) and entry != POLICY_LOSSES.entry("ppo_clip")
}
"""The loss of the other rows is ``ppo_clip``, the default, which has other names."""
RUNS = (*filter(ADVANTAGE_ESTIMATORS.is_builtin, ADVANTAGE_ESTIMATORS.entries), *VARIANTS, *LOSSES)
"""Names of the rows."""


async def forgetful(task: Any) -> str | None:
    """Play ``trail`` with no history but the question and the newest turn: from the third call on, each begins a row of its own."""
    newest: list[Any] = []
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        for _ in range(MAX_TURNS):
            asked = client.chat.completions.create(
                model=task.model, messages=[*task.messages, *newest], tools=task.extras["tools"]
            )
            message = (await asked).choices[0].message
            if not message.tool_calls:
                return message.content
            newest = [message.model_dump(exclude_none=True)]
            for call in message.tool_calls:
                content = look(task.extras["signs"], call.function.arguments)
                newest.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return None


def partial_credit(answer: str, columns: Mapping[str, Any]) -> list[float]:
    """Reward tokens of the default task: in all half a point for sums, each at its digit while all are right, and half for the answer."""
    rewards = [0.0] * len(columns["response_token_ids"])
    seed_digits = columns["prompt"][-1]["content"].split()[1]
    right = worked_answer(seed_digits, 0.0, random.Random())
    ends = range(5, right.index("#"), 6)  # of 3+4=7 and a newline, whose characters are tokens
    for end in ends:
        if answer.startswith(right[:end]):
            rewards[end - 1] = 0.5 / len(ends)
    rewards[-1] += score(answer, columns["reward_spec"]["ground_truth"]) / 2
    return rewards


def overrides(name: str, num_steps: int) -> list[str]:
    """The words of a run, but for its seed; its steps are rounded up to whole batches."""
    estimator, variant = name.partition(", ")[0], (VARIANTS | LOSSES).get(name, [])
    words = [f"trainer.algorithm.advantage_estimator={estimator}", *variant]
    if not any(word.startswith("task=") for word in variant):
        words.append("task=relay")
    if estimator in SINGLE:
        words += ["generator.n_samples_per_prompt=1", "trainer.policy_mini_batch_size=32"]
    if estimator == "running_mean":
        words.append("task.num_train_prompts=128")  # or no prompt would come a second time
    of_batch = 4 if "trainer.train_batch_size=16" in words else 1
    return [*words, f"trainer.num_steps={num_steps + -num_steps % of_batch}"]


def run(name: str, num_steps: int, seed: int, output_dir: Path) -> dict[str, Any]:
    """Train with one estimator."""
    words = [
        *overrides(name, num_steps),
        f"trainer.seed={seed}",
        f"trainer.output_dir={output_dir}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_async.main", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    logged = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [values["reward/eval"] for values in logged if "reward/eval" in values]
    num_taken = from_overrides(*overrides(name, num_steps)).trainer.num_steps
    num_rows = fmean(values["generate/rows_mean"] for values in logged if "generate/rows_mean" in values)
    ends = {"reward_before": rewards[0], "reward_after": rewards[-1]}
    explained = [values[_EXPLAINED] for values in logged if _EXPLAINED in values]
    means = {"rows_per_sample": num_rows, "explained_variance": fmean(explained) if explained else None}
    row = {"estimator": name, **ends, **means, "steps": num_taken}
    print(row, flush=True)
    return row


def main() -> int:
    """Run it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=RUNS, help="run these, and keep the other rows of --json")
    given = parser.parse_args()
    before = conditions(seed=given.seed)
    names = given.only or (("grpo", "gae") if given.quick else RUNS)
    rows = kept_rows(given.json, given.seed, lambda row: row["estimator"] in names) if given.only else []
    with tempfile.TemporaryDirectory() as work:
        for number, name in enumerate(names):
            row = run(name, given.steps, given.seed, Path(work) / str(number))
            rows.append({"commit": before["commit"]} | row)
    rows.sort(key=lambda row: RUNS.index(row["estimator"]))
    report("Estimators", {"conditions": before}, rows, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
