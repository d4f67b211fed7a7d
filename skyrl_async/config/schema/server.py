"""The ``server`` section: the endpoint and its sessions."""

from dataclasses import dataclass
from enum import StrEnum

from skyrl_async.config.schema.fields import bounded, check_heartbeat, require

MAX_PORT = 65535


ReasoningPolicy = StrEnum("ReasoningPolicy", ["keep", "template"])
BranchPolicyName = StrEnum("BranchPolicyName", ["all", "longest", "last"])


@dataclass
class ServerConfig:
    enabled: bool | None = None
    """Serve the OpenAI-compatible endpoint while training; null: when the generator needs it."""
    host: str = "127.0.0.1"
    """Address to bind; one that is not loopback needs server.api_key."""
    port: int = bounded(0, ge=0, le=MAX_PORT)
    """Port of the first front end, the others take those after it; 0 takes free ones."""
    api_key: str | None = None
    """Bearer key; null makes one and writes it to the run directory (mode 600)."""
    model_name: str = "policy"
    """Name in /v1/models and in replies."""
    max_body_bytes: int = bounded(16 * 2**20, ge=1)
    """Larger requests get 413."""
    request_timeout_s: float = bounded(60.0, gt=0)
    """Seconds a client has for sending the header of a request, and again for its body; then it gets 408."""
    keep_alive_timeout_s: int = bounded(75, ge=0)
    """Seconds that idle connections stay open; clients break below 75."""
    shutdown_timeout_s: int = bounded(30, ge=0)
    """What open requests and streams get to finish when the endpoint stops, seconds."""
    num_front_ends: int = bounded(1, ge=1)
    """Processes that serve, each on a port of its own; a session belongs to one of them. generator=gym_http has no sessions and uses the
    first.
    """
    max_concurrent_requests: int = bounded(4096, ge=1)
    """Requests sampled at once per front end; more wait in line."""
    max_concurrent_requests_per_session: int = bounded(16, ge=1)
    """The same for one session."""
    engine_wait_s: float = bounded(120.0, ge=0)
    """With no engine left, requests are held for so long; then they get 503, with a Retry-After."""
    heartbeat_interval_s: float = bounded(5.0, gt=0)
    """Seconds between the heartbeats asked of a front end."""
    heartbeat_timeout_s: float = 60.0
    """A front end that leaves a heartbeat unanswered for so long is replaced, on the same port. Its sessions are lost with it: their
    samples are played again.
    """
    max_restarts: int = bounded(10, ge=0)
    """Times each front end is replaced, because it died or did not answer. The next time the run ends, with a checkpoint."""
    tool_call_parser: str = "auto"
    """vLLM's parser of tool calls by name; auto takes what the chat template calls for, none parses nothing."""
    reasoning_parser: str = "auto"
    """vLLM's parser of reasoning by name; auto and none as above."""
    reasoning_policy: ReasoningPolicy = ReasoningPolicy.keep
    """What a later turn of a session sees of earlier reasoning: keep (the tokens as sampled) or template (what the chat template leaves of
    it; turns whose prompt thereby changes begin a branch).
    """
    branch_policy: BranchPolicyName = BranchPolicyName.all
    """Which branches of a session whose history was rewritten are trained: all, the longest, or that of the last turn."""
    train_side_requests: bool = False
    """Train also what a harness asked beside its task, such as a title: what was answered once, without tools, under another system prompt
    than the agent's, quoting no reply and quoted by no other request. Set it where a program acts on such answers, or where agents pass on
    answers of fewer than 8 characters: they look the same. false leaves it out: agent/side_requests and agent/side_tokens count it.
    """
    session_idle_timeout_s: float = bounded(600.0, gt=0)
    """A session without a request for so long has expired. Not of generator=agent, whose sessions last as long as their agents."""
    session_lifetime_s: float = bounded(7200.0, gt=0)
    """A session older than this has expired. Not of generator=agent either."""
    session_max_turns: int = bounded(1000, ge=1)
    """Turns sampled in one session; the next is refused with 401."""
    session_max_tokens: int = bounded(1_000_000, ge=1)
    """Tokens sampled in one session; the next turn is refused with 401."""

    def __post_init__(self) -> None:
        check_heartbeat("server", self.heartbeat_interval_s, self.heartbeat_timeout_s)
        is_loopback = self.host in ("127.0.0.1", "localhost", "::1")
        expected = f"set when server.host={self.host} is not loopback"
        require(is_loopback or bool(self.api_key), "server.api_key", expected, self.api_key)
