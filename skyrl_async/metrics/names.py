"""The metrics of a run: every name with its unit and meaning.

``python -m skyrl_async.metrics.names`` writes the table behind ``docs/reference/metrics.md``; curves take their labels from it. Generators
may log names of their own.
"""

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """What one name means."""

    unit: str
    """Of its values; ``fraction`` is in [0, 1]."""
    text: str


METRICS: dict[str, Metric] = {
    "reward/mean": Metric(
        "reward", "Mean of the environment's rewards over the step's trajectories, those masked as overlong included."
    ),
    "reward/shaped_mean": Metric(
        "reward", "The same of the trajectories trained, with what shapes rewards: what advantages are computed of."
    ),
    "reward/zero_variance_frac": Metric(
        "fraction", "Groups whose trajectories all have the same reward, hence no advantage."
    ),
    "reward/eval": Metric("reward", "Mean reward on held-out prompts, at the step's policy version."),
    "reward/eval_standard_error": Metric("reward", "Of reward/eval, over prompts."),
    "eval/response_tokens_mean": Metric("tokens", "Mean response length on held-out prompts."),
    "eval/truncated_frac": Metric("fraction", "Of those responses, ended by the token budget."),
    "eval/failed_prompts": Metric("prompts", "Left out of reward/eval because their rollouts failed, after retries."),
    "eval/version_min": Metric("steps", "Policy version that the oldest token of the evaluation was sampled under."),
    "eval/version_max": Metric("steps", "The newest; the same where evaluation.pin_version holds it."),
    "async/staleness_mean": Metric("steps", "Policy version trained at minus version scheduled at, mean over groups."),
    "async/staleness_max": Metric("steps", "The same, largest of the step."),
    "async/over_bound_frac": Metric(
        "fraction",
        "Groups trained past trainer.max_staleness_steps (with mask: without their tokens that are past it).",
    ),
    "async/masked_frac": Metric("fraction", "Tokens of the step's groups that the policy mask left out of the loss."),
    "async/token_lag_mean": Metric("steps", "Policy version trained at minus version sampled under, mean over tokens."),
    "async/token_lag_max": Metric("steps", "The same, largest of the step."),
    "async/requeued_groups": Metric(
        "groups", "Given up by the policy resample since the run began, their prompts drawn again."
    ),
    "async/buffer_groups": Metric("groups", "Finished and waiting to be trained, at the step's end."),
    "async/running_groups": Metric("groups", "Being generated, at the step's end."),
    "async/stuck_rollouts": Metric(
        "groups", "In flight with a sample that has done the same thing for longer than trainer.stall_warning_s."
    ),
    "async/engine_logprob_gap": Metric(
        "nats", "Largest difference per token between the engine's log-probs and the trainer's."
    ),
    "async/num_aborts": Metric("times", "Continuations across weight updates, over the step's trajectories."),
    "async/length_ratio": Metric(
        "ratio", "Mean length trained over mean length generated, so far; below 1 long answers are lost on the way."
    ),
    "async/wasted_tokens": Metric(
        "tokens",
        "Sampled and thrown away since the run began: finished groups never trained, groups given up, generations cut off.",
    ),
    "timing/step": Metric(
        "s",
        "The whole step, from the end of the one before until its weights are copied, with all that it waited for but checkpoints; sending "
        "and loading them overlap the next step.",
    ),
    "timing/wait_for_groups": Metric("s", "Trainer waiting for generation."),
    "timing/wait_for_publish": Metric(
        "s",
        "Trainer waiting, gradients in hand, until the copy of the step before is sent (where a probe is due, until engines have it), and "
        "before the step begins, published or not, while two before it have yet to reach the engines; one before a checkpoint.",
    ),
    "timing/wait_for_devices": Metric(
        "s",
        "Trainer waiting for its turn on devices that others share, or for log-probs that policy workers compute for a stage; absent "
        "without.",
    ),
    "timing/forward_backward": Metric("s", "Forward and backward passes."),
    "timing/optimizer_step": Metric("s", "Clipping and optimizer."),
    "timing/publish": Metric("s", "From the trainer's weights to every engine serving them."),
    "timing/gather": Metric("s", "Of publish: collecting full parameters; engines go on generating."),
    "timing/send": Metric(
        "s", "Of publish: writing them, and broadcasting them where engines cannot map them; engines go on generating."
    ),
    "timing/stage": Metric("s", "Of publish: engines preparing to load; they go on generating."),
    "timing/acknowledge": Metric(
        "s", "Of publish: until the first engine has ended the step it is in, whose tokens count, and has paused."
    ),
    "timing/load": Metric("s", "Of publish: replacing the engines' weights, inside the pause."),
    "timing/pause": Metric(
        "s", "Of publish: engines sampling nothing, from when the first has paused until the last has resumed."
    ),
    "timing/checkpoint": Metric("s", "Writing a checkpoint; in a record of its own, once it is written."),
    "timing/eval": Metric("s", "Evaluation on held-out prompts."),
    "timing/wait_for_staleness": Metric(
        "s", "Waited in the step for groups that the next version would push past the bound."
    ),
    "timing/generate_group_max": Metric("s", "Longest generation of a trained group."),
    "timing/oldest_rollout": Metric("s", "Since the oldest group in flight began, its earlier tries included."),
    "timing/agent": Metric("s", "Mean duration of a harness's run."),
    "timing/weight_sync_lag_max": Metric(
        "s", "Since the first step that an engine does not serve yet: the largest of any engine since the last line."
    ),
    "timing/devices/<stage>/held": Metric("s", "Leases of a stage on devices that it shares, held so far."),
    "timing/devices/<stage>/waited": Metric("s", "Waited so far for those leases."),
    "policy/loss": Metric("loss", "Policy loss, as trainer.algorithm.loss_reduction makes one of the tokens' losses."),
    "policy/reward_kl": Metric(
        "nats",
        "Divergence of who sampled from the reference (trainer.algorithm.kl_estimator_type), mean over samples of the mean over tokens.",
    ),
    "policy/reward_kl_coef": Metric("1", "Of that divergence in the reward, in this step."),
    "policy/grad_norm": Metric("norm", "Of the gradient, before clipping."),
    "policy/lr": Metric("1", "Learning rate."),
    "policy/is_ratio_mean": Metric("ratio", "New over behavior probability, mean over trained tokens."),
    "policy/is_ratio_max": Metric("ratio", "The same, largest of the step."),
    "policy/clip_frac": Metric("fraction", "Tokens whose ratio was clipped or capped."),
    "policy/behavior_kl": Metric("nats", "Behavior against new policy, per token."),
    "policy/ref_kl": Metric(
        "nats",
        "Divergence of the policy from the reference, as trainer.algorithm.kl_estimator_type says, mean over tokens.",
    ),
    "policy/entropy": Metric(
        "nats", "Of the policy where it sampled, at the sampling temperature, mean over trained tokens."
    ),
    "policy/logprob_gap_max": Metric("nats", "Largest difference between new and behavior log-prob of a token."),
    "policy/lag0_logprob_gap_max": Metric(
        "nats",
        "The same of tokens sampled under the very version that is trained: above rounding, engines hold other weights.",
    ),
    "policy/token_lag": Metric("steps", "Versions between sampling and training, mean over trained tokens."),
    "policy/token_lag_max": Metric("steps", "The same, largest of the step."),
    "policy/lag<n>_tokens": Metric("fraction", "Trained tokens that were sampled n versions before."),
    "policy/lag<n>_clip_frac": Metric(
        "fraction",
        "policy/clip_frac of the tokens that were sampled n versions before, among themselves; absent where there are none.",
    ),
    "policy/lag<n>_behavior_kl": Metric("nats", "policy/behavior_kl of these tokens, per token of them."),
    "policy/ess": Metric(
        "fraction",
        "Effective sample size of the trained tokens, over their number: (sum w)^2 / (n sum w^2) with w = policy / behavior probability.",
    ),
    "policy/sequence_ess": Metric("fraction", "The same of whole rows, each with the product of its tokens' w."),
    "policy/lag<n>_ess": Metric(
        "fraction", "policy/ess of the tokens that were sampled n versions before, among themselves."
    ),
    "policy/correction_weight": Metric(
        "ratio", "Factor of a token's policy loss by trainer.algorithm.off_policy_correction, weight times mask, mean."
    ),
    "policy/correction_clip_frac": Metric(
        "fraction", "Tokens whose importance weight (token or sequence TIS) was cut."
    ),
    "policy/correction_masked": Metric("fraction", "Tokens that off-policy corrections left out of the policy loss."),
    "policy/correction_masked_<kind>": Metric(
        "fraction",
        "Tokens that one of the masks would leave out alone: token, product, geometric, outlier, opsm or m2.",
    ),
    "policy/lag<n>_correction_clip_frac": Metric(
        "fraction", "policy/correction_clip_frac of the tokens that were sampled n versions before, among themselves."
    ),
    "policy/lag<n>_correction_masked": Metric(
        "fraction", "policy/correction_masked of these tokens, among themselves."
    ),
    "policy/all_masked_steps": Metric(
        "steps",
        "Without a policy gradient: off-policy corrections, length limits or age left no token of them; since the run began.",
    ),
    "policy/num_tokens": Metric("tokens", "Trained in the step."),
    "generate/tokens_per_second": Metric("tokens/s", "In groups finished since the last step."),
    "generate/tokens": Metric("tokens", "Sampled in groups finished since the last step."),
    "generate/response_tokens_mean": Metric("tokens", "Mean response length of the trajectories trained."),
    "generate/response_tokens_max": Metric("tokens", "The longest of them."),
    "generate/turns_mean": Metric("turns", "Mean turns of them."),
    "generate/abandoned_frac": Metric(
        "fraction", "Of the step's samples, abandoned by their harness: masked, without a reward."
    ),
    "generate/rows_mean": Metric(
        "rows", "Training rows per sample; more than 1 where harnesses rewrote their history."
    ),
    "generate/truncated_frac": Metric("fraction", "Of the step's trajectories, ended by the token budget."),
    "generate/overlong_frac": Metric(
        "fraction",
        "Of the step's samples, cut at a length limit and masked for it (generator.apply_overlong_filtering).",
    ),
    "generate/failed_groups": Metric("groups", "Failed since the run began, after retries."),
    "generate/filtered_groups": Metric(
        "groups",
        "Left out by trainer.fully_async.sample_full_batch since the run began: their rewards did not differ. Others took their places.",
    ),
    "generate/filtered_frac": Metric("fraction", "Of the groups finished since the last step, so left out."),
    "generate/filtered_all_zero": Metric("groups", "Of generate/filtered_groups, those whose rewards were all 0."),
    "generate/filtered_all_one": Metric("groups", "The same, all 1."),
    "generate/filtered_constant": Metric("groups", "The same, all equal to something else."),
    "generate/filtered_too_few": Metric("groups", "The same, with fewer than two trained samples."),
    "generate/failed_samples": Metric("samples", "That other groups were trained without, since the run began."),
    "generate/retries": Metric(
        "times", "Groups tried again since the run began, for all of their samples or for lost ones."
    ),
    "env/<name>": Metric(
        "the environment's", "A figure of the environment's or the reward function's own, mean over samples."
    ),
    "agent/failed": Metric(
        "fraction", "Of the step's samples, those whose harness failed, timed out or sampled nothing."
    ),
    "agent/timeouts": Metric("fraction", "Of them, those whose harness took longer than generator.agent_timeout_s."),
    "agent/cut_short": Metric(
        "fraction",
        "Of the step's samples, those whose harness failed when a cap of its session, the model's context or a cut answer let it go no "
        "further: rewarded for what it did, and truncated.",
    ),
    "agent/side_requests": Metric(
        "requests", "Of a sample, asked beside its task and left out of training (server.train_side_requests), mean."
    ),
    "agent/side_tokens": Metric("tokens", "Sampled in them, mean over samples."),
    "checkpoint/failures": Metric(
        "checkpoints", "Not written because of the disk, since this process began the run or took it up."
    ),
    "engines/serving": Metric("engines", "That take requests."),
    "engines/restarts": Metric(
        "engines", "Started in the place of dead ones, since this process began the run or took it up."
    ),
    "engines/heartbeats_missed": Metric(
        "heartbeats",
        "Intervals in which an engine left a heartbeat unanswered, since this process began the run or took it up.",
    ),
    "stage/<name>/state": Metric(
        "1",
        "Where a stage is: 0 idle, 1 waiting for input, 2 processing, 3 waiting for output, 4 done, 5 error. With its item and seconds in "
        "words under `stages` of `metrics.jsonl`, on the console, and a row each in the trace.",
    ),
    "stage/<name>/seconds": Metric("s", "Since it is there, with the same item."),
    "stage/<name>/items": Metric(
        "items",
        "Gone through it since the last step, each counted once: prompts drawn for `dataloader`; for `generate` to `train` groups, without "
        "those that failed, `train` having added their gradients; versions for `param_update` and `validation`.",
    ),
    "stage/<name>/processing_frac": Metric("fraction", "Of the time since the last step, spent processing."),
    "stage/<name>/waiting_for_input_frac": Metric(
        "fraction", "The same, waiting for an item, or with one for devices that others use."
    ),
    "stage/<name>/waiting_for_output_frac": Metric(
        "fraction", "The same, waiting for the next stage: back-pressure; for `dataloader`, the staleness credits."
    ),
    "devices/<stage>/leases": Metric(
        "turns", "On devices that it shares with others, since this process began the run or took it up."
    ),
    "weight_sync/lag_steps_max": Metric(
        "steps", "Completed by the trainer and not yet served by an engine: the largest lag of any since the last line."
    ),
    "trainer/step": Metric("steps", "Optimizer steps completed."),
    "trainer/epoch": Metric("epochs", "Passes over the training prompts completed."),
    "trainer/restarts": Metric(
        "times",
        "Policy and log-prob workers replaced since this process began the run or took it up, attempts that failed included.",
    ),
    "trainer/idle_frac": Metric("fraction", "Of the step, spent waiting for generation."),
}


def markdown() -> str:
    """The metrics reference as a page."""
    lines = [
        "# Metrics",
        "",
        "One line per step in a run's `metrics.jsonl` (with `step`, and `time_s` since the run began), and one more for what is",
        "known of it later (an evaluation, a checkpoint); the same in TensorBoard and W&B. Written by",
        "`python -m skyrl_async.metrics.names > docs/reference/metrics.md`.",
        "",
        "A line of `metrics.jsonl` also has `stages` (where each stage is), `engines` (by name, `lag_steps` and `lag_seconds` behind",
        "the trainer) and, while something takes longer than `trainer.stall_warning_s`, `stuck` (a text each: sample, turn, phase, engine,",
        "seconds).",
        "",
        "| name | unit | meaning |",
        "|---|---|---|",
        *(f"| `{name}` | {metric.unit} | {metric.text} |" for name, metric in METRICS.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
