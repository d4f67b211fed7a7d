"""Warm start: supervised learning of a task's format turns a tiny policy of random weights into one that reinforcement can improve.

The first phase learns flawless conversations until greedy decoding repeats held-out ones. The second phase learns a mixture of guesses and
careless work; it leaves a policy that can solve the task but mostly does not. It runs in a thread, and takes 10 to 25 s of one core.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from skyrl_async.config.schema.policy import WarmStartConfig
from skyrl_async.errors import ConfigError, PolicyError
from skyrl_async.tasks.registry import WarmStartTask, tools_of
from skyrl_async.tasks.tokenizer import encode_conversation
from skyrl_async.types import Message, Prompt

logger = logging.getLogger(__name__)

MUON_LR = 0.02
MUON_MOMENTUM = 0.95
NUM_NEWTON_SCHULZ_STEPS = 5
ADAMW_LR = 3e-3
FINAL_LR_SHARE = 0.05
CLEAN_CYCLE_TOKENS = 120_000
"""Tokens over which the first phase's learning rate falls before it starts anew; most seeds finish within the first cycle."""
MIXTURE_LR_SHARE = 0.25
"""With twice this, some seeds forget, on some machines, how a worked answer begins, and reinforcement does not bring it back."""
LEAST_CLEAN_CHANCE = 0.25
"""Least probability of a flawless answer after the second phase, over the share of such answers in it; below it a warning is logged."""
LONG_SHARE = 0.125
LONGEST_OF = 16
"""A share ``LONG_SHARE`` of the first phase is the longest of so many draws, because long answers are too rare to be learned otherwise."""
CHUNK_CONVERSATIONS = 64
"""Number of conversations that are sorted by length and split into batches together."""
CHECK_INTERVAL_TOKENS = 5_000
NUM_CHECK_PROMPTS = 48
MAX_DRAWS = 100_000

Row = tuple[list[int], list[int]]
"""Token ids of a conversation, and 1 for each learned token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartProgress:
    """The progress of a warm start."""

    phase: str
    """``clean`` or ``mixture``."""
    num_tokens: int
    """Tokens learned so far in both phases."""
    accuracy: float
    """Greedy accuracy at the last check."""


class Muon:
    """Momentum, orthogonalised by Newton-Schulz iterations (K. Jordan, https://kellerjordan.github.io/posts/muon).

    Matrices of one shape are orthogonalised together, which makes it cheap on a small model.
    """

    def __init__(self, matrices: Sequence[torch.nn.Parameter]) -> None:
        by_shape: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
        self._stacks = [(stack, torch.zeros(len(stack), *shape)) for shape, stack in by_shape.items()]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for stack, momentum in self._stacks:
            wide = torch.stack([_wide_gradient(matrix) for matrix in stack])
            momentum.mul_(MUON_MOMENTUM).add_(wide)
            updates = orthogonalised(wide.add(momentum, alpha=MUON_MOMENTUM))
            for matrix, update in zip(stack, updates, strict=True):
                rows, columns = matrix.shape
                scale = max(1.0, rows / columns) ** 0.5
                matrix.sub_(update.mT if rows > columns else update, alpha=lr * scale)


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Return the nearest semi-orthogonal matrices, roughly: all singular values in about [0.7, 1.2].

    Args:
        matrices: (N, rows, columns), rows <= columns.
    """
    x = (matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(_orthogonalisation_dtype())
    for _ in range(NUM_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.to(matrices.dtype)


@cache
def _orthogonalisation_dtype() -> torch.dtype:
    """bfloat16, as in Jordan's own code, where the CPU multiplies it: five times as fast, and enough for directions."""
    of_cpu = torch.cpu.get_capabilities()
    return torch.bfloat16 if of_cpu.get("avx512_bf16") or of_cpu.get("amx_bf16") else torch.float32


def _wide_gradient(matrix: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient with no more rows than columns."""
    assert matrix.grad is not None
    return matrix.grad.mT if matrix.shape[0] > matrix.shape[1] else matrix.grad


class _Learner:
    """A model with its two optimizers, one batch at a time."""

    def __init__(self, model: Qwen3ForCausalLM, batch_tokens: int) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
        others = [p for name, p in named if not (p.ndim == 2 and ".layers." in name)]
        self.model = model
        self.batch_tokens = batch_tokens
        self._muon = Muon(matrices)
        self._adamw = torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0)

    def learn(self, rows: Sequence[Row], lr_share: float) -> None:
        """Take one step on the summed loss of ``rows``, at ``lr_share`` of the full learning rates."""
        logits, targets = self._predict(rows)
        loss = functional.cross_entropy(logits, targets, reduction="sum") / self.batch_tokens
        loss.backward()
        self._muon.step(MUON_LR * lr_share)
        for group in self._adamw.param_groups:
            group["lr"] = ADAMW_LR * lr_share
        self._adamw.step()
        self.model.zero_grad()

    def mean_chance(self, batches: Sequence[Sequence[Row]]) -> float:
        """Return the mean probability that sampling at temperature 1 gives all learned tokens of a conversation."""
        return self._mean(
            batches, lambda logits, targets: (-functional.cross_entropy(logits, targets, reduction="sum")).exp()
        )

    def greedy_accuracy(self, batches: Sequence[Sequence[Row]]) -> float:
        """Return the share of conversations that greedy decoding repeats word for word.

        One forward is enough: greedy decoding repeats a conversation if every token is the likeliest one after those before it.
        """
        return self._mean(batches, lambda logits, targets: (logits.argmax(dim=-1) == targets).all())

    @torch.inference_mode()
    def _mean(
        self, batches: Sequence[Sequence[Row]], score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> float:
        """Return the mean over conversations of ``score``, a scalar of their logits (T, V) and targets (T,)."""
        scores: list[float] = []
        for rows in batches:
            sizes = [sum(mask[1:]) for _, mask in rows]
            logits, targets = (predicted.split(sizes) for predicted in self._predict(rows))
            scores += [float(score(*pair)) for pair in zip(logits, targets, strict=True)]
        return sum(scores) / len(scores)

    def _predict(self, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits (T, V) and targets (T,) of the learned tokens, row after row.

        Rows are padded on the right, where causal attention does not look.
        """
        token_ids = _padded([ids for ids, _ in rows])  # (B, L)
        is_target = _padded([mask for _, mask in rows])[:, 1:].bool()  # (B, L - 1)
        hidden = self.model.model(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
        return self.model.lm_head(hidden[is_target]), token_ids[:, 1:][is_target]


def _padded(lists: Sequence[Sequence[int]]) -> torch.Tensor:
    length = max(len(values) for values in lists)
    return torch.tensor([[*values, *[0] * (length - len(values))] for values in lists])


def _batches_of(rows: Sequence[Row], batch_tokens: int) -> list[list[Row]]:
    """Cut rows, sorted by length, into batches of at most ``batch_tokens`` padded tokens (or one longer row)."""
    batches: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row[0])):
        if not batches or len(row[0]) * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def _batches(
    draw: Callable[[], Row], rng: random.Random, num_tokens: int, batch_tokens: int, should_stop: Callable[[], bool]
) -> Iterator[list[Row]]:
    """Yield batches of fresh rows until ``num_tokens`` are out. Raises ``PolicyError`` if ``should_stop``."""
    while num_tokens > 0:
        batches = _batches_of([draw() for _ in range(CHUNK_CONVERSATIONS)], batch_tokens)
        rng.shuffle(batches)
        for batch in batches:
            if should_stop():
                raise PolicyError("the warm start was stopped before it was done")
            yield batch
            num_tokens -= _num_tokens(batch)
            if num_tokens <= 0:
                return


@dataclass
class _Rows:
    """Draws rows of a task, none of a hidden prompt."""

    task: WarmStartTask
    tokenizer: PreTrainedTokenizerFast
    rng: random.Random
    hidden: frozenset[str]

    def hide_some(self, num_prompts: int) -> list[Row]:
        """Return flawless rows of ``num_prompts`` prompts that are hidden from now on."""
        prompts = [self._draw_prompt() for _ in range(num_prompts)]
        self.hidden |= {prompt.uid for prompt in prompts}
        return [self._row(prompt, self.task.conversation(prompt, self.rng)) for prompt in prompts]

    def clean(self) -> Row:
        """Draw a flawless row; some rows are the longest of several draws."""
        drawn: list[tuple[Prompt, list[Message]]] = []
        for _ in range(LONGEST_OF if self.rng.random() < LONG_SHARE else 1):
            prompt = self._draw_prompt()
            drawn.append((prompt, self.task.conversation(prompt, self.rng)))
        return self._row(*max(drawn, key=lambda pair: sum(len(message["content"]) for message in pair[1])))

    def mixture(self, plan: WarmStartConfig) -> Row:
        """Draw a row of the second phase."""
        prompt = self._draw_prompt()
        shares = {"terse_share": plan.terse_share, "slip_rate": plan.slip_rate}
        return self._row(prompt, self.task.conversation(prompt, self.rng, **shares))

    def _row(self, prompt: Prompt, conversation: list[Message]) -> Row:
        return encode_conversation(self.tokenizer, conversation, tools_of(prompt))

    def _draw_prompt(self) -> Prompt:
        for _ in range(MAX_DRAWS):
            prompt = self.task.draw_prompt(self.rng)
            if prompt.uid not in self.hidden:
                return prompt
        raise ConfigError(
            f"task.num_eval_prompts must leave some prompts of task.name={self.task.name} to learn from, "
            f"but {len(self.hidden)} are held out; ask for fewer"
        )


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: WarmStartTask,
    plan: WarmStartConfig,
    *,
    held_out: frozenset[str],
    seed: int,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[WarmStartProgress], None] = lambda progress: None,
) -> float:
    """Train ``model`` in place and return the greedy accuracy that the first phase reached.

    Args:
        held_out: uids of prompts that must not be learned.
        seed: the same seed gives the same weights on one machine with one thread.
        should_stop: called before each batch; ``PolicyError`` is raised if it returns true.
        on_progress: called about every ``CHECK_INTERVAL_TOKENS`` and at the end, in the calling thread.
    """
    rng = random.Random(seed)
    rows = _Rows(task, tokenizer, rng, held_out)
    check_batches = _batches_of(rows.hide_some(NUM_CHECK_PROMPTS), plan.batch_tokens)
    learner = _Learner(model, plan.batch_tokens)
    accuracy, num_clean_tokens, next_check = 0.0, 0, CHECK_INTERVAL_TOKENS
    for batch in _batches(rows.clean, rng, plan.max_tokens, plan.batch_tokens, should_stop):
        learner.learn(batch, _decayed(num_clean_tokens % CLEAN_CYCLE_TOKENS / CLEAN_CYCLE_TOKENS))
        num_clean_tokens += _num_tokens(batch)
        if num_clean_tokens >= next_check:
            next_check += CHECK_INTERVAL_TOKENS
            accuracy = learner.greedy_accuracy(check_batches)
            on_progress(WarmStartProgress(phase="clean", num_tokens=num_clean_tokens, accuracy=accuracy))
            if accuracy >= plan.target_accuracy and num_clean_tokens >= plan.min_tokens:
                break
    num_mixture_tokens = 0
    mixture = _batches(lambda: rows.mixture(plan), rng, plan.mixture_tokens, plan.batch_tokens, should_stop)
    for batch in mixture:
        learner.learn(batch, MIXTURE_LR_SHARE * _decayed(num_mixture_tokens / plan.mixture_tokens))
        num_mixture_tokens += _num_tokens(batch)
    num_tokens = num_clean_tokens + num_mixture_tokens
    on_progress(WarmStartProgress(phase="mixture", num_tokens=num_tokens, accuracy=accuracy))
    if accuracy < plan.target_accuracy:
        logger.warning(
            "the warm start reached accuracy %.2f, not policy.warm_start.target_accuracy=%.2f, in %d tokens",
            accuracy,
            plan.target_accuracy,
            num_clean_tokens,
        )
    elif (chance := learner.mean_chance(check_batches)) < LEAST_CLEAN_CHANCE * (1 - plan.terse_share):
        logger.warning(
            "the warm start left flawless answers a probability of %.3f, of the %.2f that were learned: reinforcement may not get far from "
            "there; give another trainer.seed, or a larger policy.warm_start.min_tokens",
            chance,
            1 - plan.terse_share,
        )
    return accuracy


def _decayed(progress: float) -> float:
    """Return the share of the learning rate at ``progress`` in [0, 1): linear from 1 to ``FINAL_LR_SHARE``."""
    return 1.0 - (1.0 - FINAL_LR_SHARE) * progress


def _num_tokens(rows: Sequence[Row]) -> int:
    return sum(len(ids) for ids, _ in rows)
