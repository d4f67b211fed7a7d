"""The ``generator`` section: how prompts become trajectories, and what to do when one fails."""

from dataclasses import dataclass
from enum import Enum

from skyrl_async.config.schema.fields import doc, require


class OnFailedSamples(Enum):
    fill = "fill"
    train_rest = "train_rest"
    drop = "drop"


class GeneratorKind(Enum):
    gym = "gym"
    gym_http = "gym_http"
    agent = "agent"


@dataclass
class SamplingConfig:
    max_tokens: int = doc(1024, "Most new tokens per generation call. Default: SkyRL's and verl's for GSM8K.")
    temperature: float = doc(1.0, "Softmax temperature, > 0; that of held-out prompts may be 0, which is greedy.")
    top_p: float = doc(1.0, "Nucleus mass, in (0, 1].")
    top_k: int = doc(0, "0 keeps all.")
    min_p: float = doc(0.0, "Least probability relative to the likeliest token, in [0, 1].")
    stop: list[str] = doc(list, "Strings that end an answer.")

    def __post_init__(self) -> None:
        require(self.max_tokens >= 1, "sampling max_tokens", ">= 1", self.max_tokens)
        require(self.temperature >= 0, "sampling temperature", ">= 0", self.temperature)
        require(0 < self.top_p <= 1, "sampling top_p", "in (0, 1]", self.top_p)
        require(self.top_k >= 0, "sampling top_k", ">= 0", self.top_k)
        require(0 <= self.min_p <= 1, "sampling min_p", "in [0, 1]", self.min_p)


@dataclass
class GeneratorConfig:
    kind: GeneratorKind = doc(
        GeneratorKind.gym,
        "gym plays environments over generate(); gym_http over the endpoint with the openai client; agent runs any harness "
        "against the endpoint: generator.command or generator.entrypoint.",
    )
    entrypoint: str | None = doc(
        None,
        "module:function. With kind=agent the harness, an async function called with an AgentTask; else what makes a generator of "
        "your own, called with (client, renderer, config).",
    )
    command: str | None = doc(
        None,
        "Command line of the harness, for kind=agent; gets OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and the task in its environment.",
    )
    reward: str | None = doc(
        None, "module:function that rewards an agent's episode, for kind=agent; null asks the prompt's environment."
    )
    agent_timeout_s: float = doc(
        1800.0,
        "An agent that takes longer is ended, with all its processes, and fails. It stands still while there is no engine, or no "
        "endpoint to reach one.",
    )
    max_concurrent_agents: int | None = doc(
        None, "Agents running at once; null: as many as groups and samples ask for."
    )
    working_dir: str | None = doc(
        None, "Where agents' working directories are made, one each; null: temporary ones, deleted after use."
    )
    n_samples_per_prompt: int = doc(8, "Group size. SkyRL's and verl's GSM8K scripts take 5, verl's DAPO scripts 16.")
    apply_overlong_filtering: bool = doc(
        False,
        "Answers that a length limit cut are masked from the loss and left out of their group's baseline (DAPO, section 3.4): what they "
        "would have earned counts for nothing.",
    )
    max_turns: int = doc(8, "Most turns of an episode, whatever the environment says.")
    max_trajectory_tokens: int | None = doc(
        None,
        "Most response tokens of an episode, the environment's included; null is bounded by the model's context only. Not of agents, "
        "see server.session_max_tokens.",
    )
    sampling: SamplingConfig = doc(SamplingConfig, "How training rollouts are sampled.")
    max_retries: int = doc(
        2,
        "Times a failed rollout is tried again before its group counts as failed. One that fails while there is no engine or no endpoint "
        "is tried again without being counted.",
    )
    retry_backoff_s: float = doc(
        1.0,
        "Wait before the first retry, doubled for each further one, less up to half of it at random; 0 never waits.",
    )
    max_retry_backoff_s: float = doc(60.0, "Longest wait before a retry.")
    on_failed_samples: OnFailedSamples = doc(
        OnFailedSamples.train_rest,
        "What to do with a group when samples of it failed, hung or were abandoned by their agent. fill: retry these, up to "
        "max_retries times; a group that stays incomplete fails. train_rest: the same, then train the others if at least two are left; "
        "samples that an agent abandoned are retried only while fewer than two finished. drop: fail the group at once.",
    )
    max_failed_fraction: float = doc(
        0.1,
        "Share of failed groups (of the last 100) past which the run stops with the last error. A group trained without some of its "
        "samples counts by their share.",
    )
    rollout_timeout_s: float = doc(
        3600.0,
        "Deadline of one try of a group: samples that are not finished by then are lost, by name; the others are kept. It stands "
        "still while there is no engine, or no endpoint to reach one. Default: AReaL's request_timeout.",
    )

    def __post_init__(self) -> None:
        require(self.n_samples_per_prompt >= 1, "generator.n_samples_per_prompt", ">= 1", self.n_samples_per_prompt)
        require(self.max_turns >= 1, "generator.max_turns", ">= 1", self.max_turns)
        require(
            self.sampling.temperature > 0,
            "generator.sampling.temperature",
            "> 0 (greedy samples carry no log-probs to train against; evaluation.sampling.temperature may be 0)",
            self.sampling.temperature,
        )
        budget = self.max_trajectory_tokens
        require(budget is None or budget >= 1, "generator.max_trajectory_tokens", ">= 1 or null", budget)
        require(self.max_retries >= 0, "generator.max_retries", ">= 0", self.max_retries)
        require(
            0 <= self.max_failed_fraction <= 1, "generator.max_failed_fraction", "in [0, 1]", self.max_failed_fraction
        )
        require(self.retry_backoff_s >= 0, "generator.retry_backoff_s", ">= 0", self.retry_backoff_s)
        require(
            self.max_retry_backoff_s >= self.retry_backoff_s,
            "generator.max_retry_backoff_s",
            f">= generator.retry_backoff_s ({self.retry_backoff_s:g})",
            self.max_retry_backoff_s,
        )
        require(self.rollout_timeout_s > 0, "generator.rollout_timeout_s", "> 0", self.rollout_timeout_s)
        require(self.agent_timeout_s > 0, "generator.agent_timeout_s", "> 0", self.agent_timeout_s)
        limit = self.max_concurrent_agents
        require(limit is None or limit >= 1, "generator.max_concurrent_agents", ">= 1 or null", limit)

    @property
    def needs_endpoint(self) -> bool:
        """Whether it samples over HTTP; a user's own generator gets the client instead."""
        own = self.kind is not GeneratorKind.agent and self.entrypoint is not None
        return self.kind is not GeneratorKind.gym and not own

    @property
    def longest_response(self) -> int:
        """Most tokens of a response: the limit of an episode, or that of one turn where episodes have none."""
        return self.max_trajectory_tokens or self.sampling.max_tokens
