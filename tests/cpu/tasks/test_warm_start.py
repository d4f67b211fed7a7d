"""The tiny policy and its warm start: directories that load anywhere, made once, trained on nothing that is held out."""

import math
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast, Qwen3ForCausalLM

from skyrl_async.config.schema.policy import WarmStartConfig
from skyrl_async.errors import ConfigError, PolicyError
from skyrl_async.tasks.registry import BuiltInTask, get_task, make_environment, tools_of
from skyrl_async.tasks.tiny_policy import (
    PolicySizes,
    created_directory,
    make_tiny_model,
    prepare_initial_policy,
    prepare_tiny_policy,
    task_tokenizer,
)
from skyrl_async.tasks.tokenizer import encode_conversation
from skyrl_async.tasks.warm_start import WarmStartProgress, orthogonalised, warm_start
from skyrl_async.types import Message, Prompt

SMALL = PolicySizes(hidden_size=32, num_layers=1, num_heads=4, intermediate_size=64)


class EchoTask:
    """Say the digit back: what a small model learns in a second."""

    name = "echo"

    def __init__(self) -> None:
        self.learned: Counter[str] = Counter()

    def draw_prompt(self, rng: random.Random) -> Prompt:
        number = f"{rng.randrange(1000):03d}"
        return Prompt(uid=number, messages=({"role": "user", "content": f"Say {number}"},), env_class="echo")

    def conversation(
        self, prompt: Prompt, rng: random.Random, *, terse_share: float = 0.0, slip_rate: float = 0.0
    ) -> list[Message]:
        self.learned[prompt.uid] += 1
        return [*prompt.messages, {"role": "assistant", "content": f"{prompt.uid[0]}"}]


SHORT_PLAN = WarmStartConfig(target_accuracy=1.0, max_tokens=2000, mixture_tokens=500)


def trained(
    task: EchoTask, plan: WarmStartConfig, *, seed: int, held_out: frozenset[str] = frozenset()
) -> Qwen3ForCausalLM:
    tokenizer = task_tokenizer(task)
    task.learned.clear()
    model = make_tiny_model(SMALL, tokenizer, seed)
    warm_start(model, tokenizer, task, plan, held_out=held_out, seed=seed)
    return model


def same_weights(first: Qwen3ForCausalLM, second: Qwen3ForCausalLM) -> bool:
    other = second.state_dict()
    return all(torch.equal(weight, other[name]) for name, weight in first.state_dict().items())


def test_a_warm_start_reaches_its_target_and_reports_how_far_it_is() -> None:
    task, seen = EchoTask(), list[WarmStartProgress]()
    tokenizer = task_tokenizer(task)
    model = make_tiny_model(SMALL, tokenizer, 0)
    plan = WarmStartConfig(target_accuracy=0.95, min_tokens=0, max_tokens=60_000, mixture_tokens=1000)
    accuracy = warm_start(model, tokenizer, task, plan, held_out=frozenset(), seed=0, on_progress=seen.append)
    assert accuracy >= 0.95
    assert [progress.phase for progress in seen] == ["clean"] * (len(seen) - 1) + ["mixture"]
    assert [progress.num_tokens for progress in seen] == sorted(progress.num_tokens for progress in seen)
    assert seen[-1].num_tokens < 61_500
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say 742"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    answer = model.generate(prompt, do_sample=False, max_new_tokens=4)[0, prompt.shape[1] :]
    assert tokenizer.decode(answer) == "7<|im_end|>"


def test_a_policy_that_reaches_its_target_early_learns_on_until_the_least_tokens() -> None:
    task, seen = EchoTask(), list[WarmStartProgress]()
    tokenizer = task_tokenizer(task)
    plan = WarmStartConfig(target_accuracy=0.0, min_tokens=6_000, max_tokens=60_000, mixture_tokens=0)
    model = make_tiny_model(SMALL, tokenizer, 0)
    warm_start(model, tokenizer, task, plan, held_out=frozenset(), seed=0, on_progress=seen.append)
    assert 6_000 <= seen[-1].num_tokens < 11_000


def test_the_same_seed_gives_the_same_weights_and_another_does_not() -> None:
    first = trained(EchoTask(), SHORT_PLAN, seed=3)
    torch.manual_seed(99)
    assert same_weights(first, trained(EchoTask(), SHORT_PLAN, seed=3))
    assert not same_weights(first, trained(EchoTask(), SHORT_PLAN, seed=4))


def test_held_out_prompts_are_never_learned() -> None:
    task = EchoTask()
    held_out = frozenset(f"{number:03d}" for number in range(0, 1000, 2))
    trained(task, SHORT_PLAN, seed=0, held_out=held_out)
    assert task.learned
    assert held_out.isdisjoint(task.learned)


def test_holding_out_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.num_eval_prompts must leave some prompts .*1000 are held out"):
        trained(EchoTask(), SHORT_PLAN, seed=0, held_out=frozenset(f"{number:03d}" for number in range(1000)))


def test_a_target_that_is_not_reached_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    trained(EchoTask(), SHORT_PLAN, seed=0)
    assert "not policy.warm_start.target_accuracy=1.00, in 20" in caplog.text


def test_a_policy_that_lost_what_it_had_learned_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    trained(EchoTask(), replace(SHORT_PLAN, target_accuracy=0.0, min_tokens=0), seed=0)
    assert "left flawless answers a probability of 0.000, of the 0.30 that were learned" in caplog.text


def test_a_policy_is_trained_once_and_then_found(tmp_path: Path) -> None:
    def prepare(seed: int = 0, plan: WarmStartConfig = SHORT_PLAN, must_not_train: bool = False) -> Path:
        return prepare_tiny_policy(
            tmp_path,
            EchoTask(),
            SMALL,
            plan,
            held_out=frozenset({"001"}),
            seed=seed,
            should_stop=lambda: must_not_train,
        )

    first = prepare()
    assert prepare(must_not_train=True) == first
    assert prepare(seed=1) != first
    assert prepare(plan=WarmStartConfig(max_tokens=500, mixture_tokens=0)) != first


def test_a_stopped_warm_start_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="stopped"):
        prepare_tiny_policy(
            tmp_path, EchoTask(), SMALL, SHORT_PLAN, held_out=frozenset(), seed=0, should_stop=lambda: True
        )
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_runs_that_prepare_the_same_policy_at_once_share_one_directory(tmp_path: Path) -> None:
    def prepare(_: int) -> Path:
        return prepare_initial_policy(tmp_path, EchoTask(), SMALL, seed=0)

    with ThreadPoolExecutor(4) as pool:
        (directory,) = set(pool.map(prepare, range(4)))
    assert list(directory.parent.iterdir()) == [directory]


def test_a_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fail_half_way() -> None:
        with created_directory(tmp_path / "policy") as temporary:
            (temporary / "config.json").write_text("{}")
            raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space left"):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_initial_policy_loads_with_transformers_as_it_was_made(tmp_path: Path, is_tied: bool) -> None:
    sizes = PolicySizes(hidden_size=32, num_layers=1, num_heads=4, intermediate_size=64, tie_word_embeddings=is_tied)
    directory = prepare_initial_policy(tmp_path, EchoTask(), sizes, seed=5)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    made = task_tokenizer(EchoTask())
    assert model.dtype == torch.float32
    assert same_weights(make_tiny_model(sizes, made, 5), model)
    assert model.config.tie_word_embeddings is is_tied
    assert model.generation_config.eos_token_id == made.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    conversation = [{"role": "user", "content": "Say 123\n\n!"}, {"role": "assistant", "content": "1"}]
    assert tokenizer.apply_chat_template(conversation) == made.apply_chat_template(conversation)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(3, 16, 48, generator=torch.Generator().manual_seed(0))
    singular_values = torch.linalg.svdvals(orthogonalised(matrices))
    assert singular_values.min() > 0.5
    assert singular_values.max() < 1.3


@torch.inference_mode()
def sampled_answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompts: list[list[int]], max_tokens: int
) -> list[str]:
    """Sample one answer for each of ``prompts``, which are of equal length."""
    generator = torch.Generator().manual_seed(0)
    answers: list[list[int]] = [[] for _ in prompts]
    alive, token_ids, cache = list(range(len(prompts))), torch.tensor(prompts), DynamicCache()
    for _ in range(max_tokens):
        logits = model(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        sampled = torch.multinomial(logits.softmax(-1), 1, generator=generator)  # (B, 1)
        keep = (sampled[:, 0] != tokenizer.eos_token_id).nonzero()[:, 0]
        if not len(keep):
            break
        cache.batch_select_indices(keep)
        token_ids = sampled[keep]
        alive = [alive[i] for i in keep.tolist()]
        for i, token in zip(alive, token_ids[:, 0].tolist(), strict=True):
            answers[i].append(token)
    return [tokenizer.decode(answer) for answer in answers]


def first_line(task: BuiltInTask, prompt: Prompt) -> str:
    """Of the prompt's worked answer."""
    return task.conversation(prompt, random.Random(0))[-1]["content"].partition("\n")[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_default_warm_start_leaves_a_policy_that_can_but_mostly_does_not(tmp_path: Path) -> None:
    task = get_task("lagged_fibonacci")
    _, held_out = task.make_prompts(2048, 512, seed=0)
    accuracies: list[float] = []
    directory = prepare_tiny_policy(
        tmp_path,
        task,
        PolicySizes(),
        WarmStartConfig(),
        held_out=frozenset(prompt.uid for prompt in held_out),
        seed=0,
        on_progress=lambda progress: accuracies.append(progress.accuracy),
    )
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    prompts = [
        tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, return_dict=False)
        for prompt in held_out[:128]
    ]
    answers = sampled_answers(model, tokenizer, prompts, 320)
    rewards = [
        make_environment(prompt.env_class, prompt.extras).step(answer)["reward"]
        for prompt, answer in zip(held_out, answers, strict=False)
    ]
    assert accuracies[-1] >= 0.95
    assert 0.1 < sum(rewards) / len(rewards) < 0.58
    works = [answer for answer in answers if not answer.startswith("####")]
    right = [
        prompt for prompt, answer in zip(held_out, answers, strict=False) if answer.startswith(first_line(task, prompt))
    ]
    assert len(works) > 0.15 * len(answers) and len(right) > 0.5 * len(works), "reinforcement would not learn it"


@torch.inference_mode()
def chances_to_work(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: Prompt) -> tuple[float, float]:
    """Probability that the policy begins with a call, and that it then says every turn of the clean conversation."""
    conversation = get_task("trail").conversation(prompt, random.Random(0))
    token_ids, mask = encode_conversation(tokenizer, conversation, tools_of(prompt))
    logprobs = model(input_ids=torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    said = [float(logprobs[i - 1, token_ids[i]]) for i in range(1, len(token_ids)) if mask[i]]
    return math.exp(said[0]), math.exp(sum(said[1:]))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_warm_start_of_the_trail_leaves_a_policy_that_can_call_the_tool_but_mostly_guesses(tmp_path: Path) -> None:
    task = get_task("trail")
    _, held_out = task.make_prompts(2048, 512, seed=0)
    uids = frozenset(prompt.uid for prompt in held_out)
    plan = WarmStartConfig(min_tokens=20_000, mixture_tokens=30_000)  # the task is learned by then
    directory = prepare_tiny_policy(tmp_path, task, PolicySizes(), plan, held_out=uids, seed=0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    chances = [chances_to_work(model, tokenizer, prompt) for prompt in held_out[:64]]
    assert 0.15 < sum(begins for begins, _ in chances) / len(chances) < 0.45
    assert sum(goes_on for _, goes_on in chances) / len(chances) > 0.8
