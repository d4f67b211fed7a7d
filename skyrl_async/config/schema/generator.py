"""The ``generator`` section: how prompts become trajectories, and what to do when one fails."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any

from skyrl_async.config.schema.fields import bounded, require

OnFailedSamples = StrEnum("OnFailedSamples", ["fill", "train_rest", "drop"])
GeneratorKind = StrEnum("GeneratorKind", ["gym", "gym_http", "agent"])
AgentAnswer = StrEnum("AgentAnswer", ["last_message", "stdout"])


@dataclass
class SamplingConfig:
    max_tokens: int = bounded(1024, ge=1)
    """Most new tokens per generation call. Default: SkyRL's and verl's for GSM8K."""
    temperature: float = bounded(1.0, ge=0, lt=inf)
    """Softmax temperature, > 0; that of held-out prompts may be 0, which is greedy."""
    top_p: float = bounded(1.0, gt=0, le=1)
    """Nucleus mass, in (0, 1]."""
    top_k: int = bounded(0, ge=0)
    """0 keeps all."""
    min_p: float = bounded(0.0, ge=0, le=1)
    """Least probability relative to the likeliest token, in [0, 1]."""
    stop: list[str] = field(default_factory=list)
    """Strings that end an answer."""


@dataclass
class HarborConfig:
    environment: str = "local"
    """What tasks are played in: local (a sandbox on this machine, without a network but the endpoint), or one of Harbor's by name: docker,
    podman, apptainer, daytona, e2b, modal, runloop, ...
    """
    environment_kwargs: dict[str, Any] = field(default_factory=dict)
    """Its settings. Of local: root_dir (a root file system in place of the host's programs), memory_mb, disk_mb and max_processes, for
    tasks that name none.
    """
    agent_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of Harbor's agent, such as {max_turns: 8, parser_name: xml} for terminus-2."""
    max_environments: int | None = bounded(None, ge=1)
    """Environments at once, those being set up included; null: as many as groups and samples ask for. With more than
    generator.max_concurrent_agents, environments are set up while other samples' agents run.
    """
    python: str | None = None
    """Python of an environment that Harbor is installed in; null: one is made at the first use, and kept."""


@dataclass
class GeneratorConfig:
    kind: GeneratorKind = GeneratorKind.gym
    """gym plays environments over generate(); gym_http over the endpoint with the openai client; agent runs any harness against the
    endpoint: generator.harness, generator.command or generator.entrypoint.
    """
    entrypoint: str | None = None
    """module:function. With kind=agent the harness, an async function called with an AgentTask; else what makes a generator of your own,
    called with (client, renderer, config).
    """
    harness: str | None = None
    """An agent by name, for kind=agent: claude-code, codex, ... (`uv run -m skyrl_async.harnesses` lists them); installed at the first use.
    With task=harbor: Harbor's agents, such as terminus-2.
    """
    harness_args: list[str] = field(default_factory=list)
    """Arguments added to the command line of generator.harness, such as ['--append-system-prompt', 'Be brief.']. Not with task=harbor."""
    harbor: HarborConfig = field(default_factory=HarborConfig)
    """How trials of task=harbor are played."""
    command: str | None = None
    """Command line of the harness, for kind=agent; gets OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL and the task in its environment."""
    answer: AgentAnswer = AgentAnswer.last_message
    """What is judged where generator.command writes no SKYRL_RESULT_FILE. last_message: the policy's last message, whatever the program
    prints. stdout: all that the program prints, without the white space around it; for programs that print their answer and nothing else.
    """
    reward: str | None = None
    """module:function that rewards an agent's episode, for kind=agent; null asks the prompt's environment."""
    agent_timeout_s: float = bounded(1800.0, gt=0)
    """An agent that takes longer is ended, with all its processes, and fails. It stands still while there is no engine, or no endpoint to
    reach one.
    """
    max_concurrent_agents: int | None = bounded(None, ge=1)
    """Agents running at once; null: as many as groups and samples ask for."""
    working_dir: str | None = None
    """Where agents' working directories are made, one each; null: temporary ones, deleted after use."""
    n_samples_per_prompt: int = bounded(8, ge=1)
    """Group size. SkyRL's and verl's GSM8K scripts take 5, verl's DAPO scripts 16."""
    apply_overlong_filtering: bool = False
    """Answers that a length limit cut are masked from the loss and left out of their group's baseline (DAPO, section 3.4): what they would
    have earned counts for nothing.
    """
    max_turns: int = bounded(8, ge=1)
    """Most turns of an episode, whatever the environment says."""
    max_trajectory_tokens: int | None = bounded(None, ge=1)
    """Most response tokens of an episode, the environment's included; null is bounded by the model's context only. Not of agents, see
    server.session_max_tokens.
    """
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How training rollouts are sampled."""
    max_retries: int = bounded(2, ge=0)
    """Times a failed rollout is tried again before its group counts as failed. One that fails while there is no engine or no endpoint is
    tried again without being counted.
    """
    retry_backoff_s: float = bounded(1.0, ge=0)
    """Wait before the first retry, doubled for each further one, less up to half of it at random; 0 never waits."""
    max_retry_backoff_s: float = 60.0
    """Longest wait before a retry."""
    on_failed_samples: OnFailedSamples = OnFailedSamples.train_rest
    """What to do with a group when samples of it failed, hung or were abandoned by their agent. fill: retry these, up to max_retries times;
    a group that stays incomplete fails. train_rest: the same, then train the others if at least two are left; samples that an agent
    abandoned are retried only while fewer than two finished. drop: fail the group at once.
    """
    max_failed_fraction: float = bounded(0.1, ge=0, le=1)
    """Share of failed groups (of the last 100) past which the run stops with the last error. A group trained without some of its samples
    counts by their share.
    """
    rollout_timeout_s: float = bounded(3600.0, gt=0)
    """Deadline of one try of a group: samples that are not finished by then are lost, by name; the others are kept. It stands still while
    there is no engine, or no endpoint to reach one. Default: AReaL's request_timeout.
    """

    def __post_init__(self) -> None:
        temperature = self.sampling.temperature
        expected = "> 0 (greedy samples carry no log-probs to train against; evaluation.sampling.temperature may be 0)"
        require(temperature > 0, "generator.sampling.temperature", expected, temperature)
        least_s, most_s = self.retry_backoff_s, self.max_retry_backoff_s
        expected = f">= generator.retry_backoff_s ({least_s:g})"
        require(most_s >= least_s, "generator.max_retry_backoff_s", expected, most_s)

    @property
    def needs_endpoint(self) -> bool:
        """Whether it samples over HTTP; a user's own generator gets the client instead."""
        own = self.kind is not GeneratorKind.agent and self.entrypoint is not None
        return self.kind is not GeneratorKind.gym and not own

    @property
    def longest_response(self) -> int:
        """Most tokens of a response: the limit of an episode, or that of one turn where episodes have none."""
        return self.max_trajectory_tokens or self.sampling.max_tokens
