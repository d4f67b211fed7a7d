"""The built-in tasks: prompts, answers to imitate, rewards; environments by name and by path; the tokenizer."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_async.chat import ChatRenderer
from skyrl_async.endpoint.parsing.answer_parser import AnswerParser
from skyrl_async.errors import ConfigError
from skyrl_async.tasks.lagged_fibonacci import (
    LaggedFibonacciEnv,
    all_seed_digits,
    extend,
    score,
    worked_answer,
)
from skyrl_async.tasks.registry import (
    BuiltInTask,
    get_task,
    known_environments,
    make_environment,
    register_environments,
    tools_of,
)
from skyrl_async.tasks.relay import MAX_TURNS, MIN_TURNS, RelayEnv
from skyrl_async.tasks.tiny_policy import task_tokenizer
from skyrl_async.tasks.tokenizer import encode_conversation, train_tokenizer
from skyrl_async.tasks.trail import LOOK_TOOL, MAX_SIGNS, MIN_SIGNS, TrailEnv, look, worked_conversation
from skyrl_async.types import Message, Prompt
from tests.cpu.tiny_chat import parsed

TASK_NAMES = ("lagged_fibonacci", "relay", "trail")


def play(prompt: Prompt, conversation: list[Message]) -> tuple[float, bool]:
    """Give the environment the conversation's assistant turns; return the reward and whether it ended.

    Calls of tools and their results are between the policy and whoever plays: the environment does not see them.
    """
    environment = make_environment(prompt.env_class, prompt.extras)
    messages, _ = environment.init([dict(message) for message in prompt.messages])
    reward, done = 0.0, False
    for message in conversation[len(messages) :]:
        if message["role"] == "tool" or message.get("tool_calls"):
            messages = [*messages, message]
        elif message["role"] == "assistant":
            assert not done
            output = environment.step(message["content"])
            reward, done = reward + output["reward"], output["done"]
            messages = [*messages, message, *output["observations"]]
    assert messages == conversation
    environment.close()
    return reward, done


def test_the_extension_of_a_seed_is_the_one_of_the_rule() -> None:
    assert extend("5396") == "14390"
    digits = "3248" + str(extend("3248"))
    for i in range(4, len(digits)):
        assert int(digits[i]) == (int(digits[i - 1]) + int(digits[i - 4])) % 10
    assert digits.index("0") == len(digits) - 1


def test_a_worked_answer_shows_every_step_and_the_digit_before_the_zero() -> None:
    assert worked_answer("5396", 0.0, random.Random(0)) == "6+5=1\n1+3=4\n4+9=3\n3+6=9\n9+1=0\n#### 9"


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("#### 9", 1.0),
        ("#### 1\n#### 9", 1.0),
        ("#### 9\n#### 1", 0.0),
        ("#### 9 ####", 0.0),
        ("####9.", 1.0),
        ("#### 99", 0.0),
        ("9", 0.0),
        ("", 0.0),
    ],
)
def test_the_number_after_the_last_marker_counts(answer: str, reward: float) -> None:
    assert score(answer, "9") == reward


def test_answers_are_long_tailed() -> None:
    num_steps = sorted(len(str(extend(seed))) for seed in all_seed_digits())
    assert num_steps[len(num_steps) // 2] < 8
    assert num_steps[int(len(num_steps) * 0.99)] > 30


@pytest.mark.parametrize("name", TASK_NAMES)
def test_prompts_are_disjoint_unique_and_the_same_each_time(name: str) -> None:
    task = get_task(name)
    train, held_out = task.make_prompts(2048, 512, seed=0)
    assert (len(train), len(held_out)) == (2048, 512)
    assert len({prompt.uid for prompt in (*train, *held_out)}) == 2560
    assert task.make_prompts(2048, 512, seed=0) == (train, held_out)
    assert task.make_prompts(2048, 512, seed=1) != (train, held_out)
    assert task.make_prompts(16, 512, seed=0)[1] == held_out
    assert {prompt.env_class for prompt in train} == {name}


@pytest.mark.parametrize("name", TASK_NAMES)
def test_more_prompts_than_exist_are_refused_by_the_names_of_the_fields(name: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.num_train_prompts \+ task\.num_eval_prompts must be <= \d+.*6000"):
        get_task(name).make_prompts(1_000_000, 6000, seed=0)


@pytest.mark.parametrize("name", TASK_NAMES)
@given(seed=st.integers(0, 10**9))
def test_a_clean_conversation_earns_the_whole_reward(name: str, seed: int) -> None:
    task, rng = get_task(name), random.Random(seed)
    prompt = task.draw_prompt(rng)
    reward, done = play(prompt, task.conversation(prompt, rng))
    assert done
    assert reward == pytest.approx(1.0)


@pytest.mark.parametrize("name", TASK_NAMES)
@given(seed=st.integers(0, 10**9), terse_share=st.floats(0, 1), slip_rate=st.floats(0, 1))
def test_a_mixture_conversation_is_a_whole_episode(name: str, seed: int, terse_share: float, slip_rate: float) -> None:
    task, rng = get_task(name), random.Random(seed)
    prompt = task.draw_prompt(rng)
    reward, done = play(prompt, task.conversation(prompt, rng, terse_share=terse_share, slip_rate=slip_rate))
    assert done
    assert -1e-9 <= reward <= 1 + 1e-9


@pytest.mark.parametrize("name", TASK_NAMES)
def test_guessing_earns_little_and_careless_work_most(name: str) -> None:
    task, rng = get_task(name), random.Random(0)
    prompts = [task.draw_prompt(rng) for _ in range(400)]
    guessed = [play(p, task.conversation(p, rng, terse_share=1.0, slip_rate=0.0))[0] for p in prompts]
    worked = [play(p, task.conversation(p, rng, terse_share=0.0, slip_rate=0.01))[0] for p in prompts]
    assert sum(guessed) / 400 < 0.2
    assert sum(worked) / 400 > 0.8


def trail_prompt(trail: str) -> Prompt:
    """The prompt whose signs lead along ``trail`` to 0."""
    task, rng = get_task("trail"), random.Random(0)
    return next(prompt for prompt in iter(lambda: task.draw_prompt(rng), None) if prompt.uid == f"trail-{trail}")


def test_a_trail_is_worked_by_asking_the_tool_at_each_sign() -> None:
    conversation = worked_conversation(trail_prompt("37"), 0.0, random.Random(0))
    assert [(m["role"], m["content"]) for m in conversation] == [
        ("user", "Follow 3 to 0."),
        ("assistant", ""),
        ("tool", "7"),
        ("assistant", ""),
        ("tool", "0"),
        ("assistant", "#### 7"),
    ]
    calls = [m["tool_calls"][0] for m in conversation if m.get("tool_calls")]
    assert [call["function"] for call in calls] == [
        {"name": "look", "arguments": '{"at": 3}'},
        {"name": "look", "arguments": '{"at": 7}'},
    ]
    assert [call["id"] for call in calls] == [m["tool_call_id"] for m in conversation if m["role"] == "tool"]


def test_signs_lead_from_the_digit_of_the_prompt_to_zero_and_there_are_no_others() -> None:
    train, _ = get_task("trail").make_prompts(512, 0, seed=0)
    for prompt in train:
        signs, at, num_looks = prompt.extras["signs"], prompt.messages[0]["content"].split()[1], 0
        while look(signs, int(at)) != "0":
            at, num_looks = look(signs, int(at)), num_looks + 1
        assert at == prompt.extras["reward_spec"]["ground_truth"]
        assert num_looks + 1 == len(signs)
    assert look(trail_prompt("37").extras["signs"], 5) == "?"
    assert {len(prompt.extras["signs"]) for prompt in train} == set(range(MIN_SIGNS, MAX_SIGNS + 1))


def test_the_trails_environment_judges_the_last_text_alone() -> None:
    for text, reward in (("#### 7", 1.0), ("#### 3", 0.0), ("", 0.0), ('<tool_call>{"at": 7}</tool_call>', 0.0)):
        outcome = TrailEnv(extras=trail_prompt("37").extras).step(text)
        assert (outcome["reward"], outcome["done"], outcome["observations"]) == (reward, True, [])


def test_relay_ends_at_a_wrong_digit_and_keeps_what_was_earned() -> None:
    environment = RelayEnv(extras={"start": 3, "addends": [4, 7, 1, 1]})
    first = environment.step("3+4=7")
    assert (first["reward"], first["done"]) == (0.25, False)
    assert first["observations"] == [{"role": "user", "content": "+7"}]
    second = environment.step("I do not know")
    assert (second["reward"], second["done"], second["observations"]) == (0.0, True, [])
    assert environment.get_metrics() == {"right_turns": 1.0}


def test_relay_episodes_differ_in_length() -> None:
    train, _ = get_task("relay").make_prompts(512, 0, seed=0)
    assert {prompt.extras["max_turns"] for prompt in train} == set(range(MIN_TURNS, MAX_TURNS + 1))


def test_an_environment_without_what_it_needs_says_so() -> None:
    with pytest.raises(ConfigError, match=r"reward_spec\.ground_truth"):
        LaggedFibonacciEnv(extras={"reward_spec": {}})
    with pytest.raises(ConfigError, match=r"reward_spec\.ground_truth must be the right digit in environment trail"):
        TrailEnv(extras={"signs": {"3": 0}})
    with pytest.raises(ConfigError, match=r"start .* and addends .* found the columns \['uid'\]"):
        RelayEnv(extras={"uid": 1})


def test_registering_twice_is_fine_and_keeps_skyrl_gyms_own() -> None:
    register_environments()
    register_environments()
    assert {"gsm8k", "lagged_fibonacci", "relay", "trail"} <= set(known_environments())


def test_environments_are_made_by_registered_name_or_by_path() -> None:
    extras: dict[str, Any] = {"reward_spec": {"ground_truth": "7"}}
    assert make_environment("gsm8k", extras).step("#### 7")["reward"] == 1.0
    assert make_environment("lagged_fibonacci", extras).step("#### 7")["reward"] == 1.0
    path = "skyrl_async.tasks.lagged_fibonacci:LaggedFibonacciEnv"
    assert make_environment(path, extras).step("#### 7")["reward"] == 1.0


@pytest.mark.parametrize(
    ("env_class", "message"),
    [
        ("gsm9k", r"env_class must be module:Class or one of .*gsm8k.*relay.*'gsm9k'"),
        ("no_such_module:Env", r"env_class='no_such_module:Env' cannot be imported: No module"),
        ("skyrl_async.tasks.relay:Nothing", r"has no attribute 'Nothing'"),
    ],
)
def test_an_unknown_environment_is_refused_by_name(env_class: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_environment(env_class, {})


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"built-in lagged_fibonacci, relay, trail, got 'fibonacci'"):
        get_task("fibonacci")


@pytest.mark.parametrize("name", TASK_NAMES)
def test_the_tokenizer_is_small_deterministic_and_keeps_digits_apart(name: str) -> None:
    tokenizer = task_tokenizer(get_task(name))
    again = task_tokenizer(get_task(name))
    assert tokenizer.get_vocab() == again.get_vocab()
    assert 259 <= len(tokenizer) <= 384
    assert len(tokenizer("0123456789").input_ids) == 10
    assert all(sum(c.isdigit() for c in token) <= 1 for token in tokenizer.get_vocab())
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


@pytest.mark.parametrize("name", TASK_NAMES)
@given(seed=st.integers(0, 10**9))
def test_a_conversations_tokens_are_the_chat_templates(name: str, seed: int) -> None:
    task, rng, tokenizer = get_task(name), random.Random(seed), _tokenizer(name)
    prompt = task.draw_prompt(rng)
    conversation, tools = task.conversation(prompt, rng, terse_share=0.5, slip_rate=0.1), tools_of(prompt)
    renderer = ChatRenderer(tokenizer)
    token_ids, mask = encode_conversation(tokenizer, conversation, tools)
    assert token_ids == renderer.render(conversation, tools=tools, add_generation_prompt=False).tolist()
    rendered = renderer.render(prompt.messages, tools=tools)
    assert token_ids[: len(rendered)] == rendered.tolist()
    assert mask.index(1) == len(rendered)
    said = tokenizer.decode([token for token, is_said in zip(token_ids, mask, strict=True) if is_said])
    answers = [_said(message) for message in conversation if message["role"] == "assistant"]
    assert said == "".join(f"{answer}<|im_end|>" for answer in answers)


def _said(message: Message) -> str:
    calls = [
        f'<tool_call>\n{{"name": "look", "arguments": {call["function"]["arguments"]}}}\n</tool_call>'
        for call in message.get("tool_calls", ())
    ]
    return str(message["content"]) + "".join(calls)


@given(seed=st.integers(0, 10**9))
def test_a_turn_continued_in_token_space_has_the_tokens_of_the_whole_conversation(seed: int) -> None:
    task, rng, tokenizer = get_task("trail"), random.Random(seed), _tokenizer("trail")
    prompt = task.draw_prompt(rng)
    conversation, tools, renderer = task.conversation(prompt, rng), tools_of(prompt), ChatRenderer(tokenizer)
    ids = renderer.render(conversation[:1], tools=tools)
    for num_messages in range(2, len(conversation), 2):  # through a call; its result follows
        sampled = tokenizer.encode(_said(conversation[num_messages - 1]), add_special_tokens=False)
        ids = renderer.render_next(
            conversation[: num_messages + 1], [*ids.tolist(), *sampled, tokenizer.eos_token_id], tools=tools
        )
    assert ids.tolist() == renderer.render(conversation[:-1], tools=tools).tolist()


def test_a_call_is_a_handful_of_tokens_and_a_conversation_without_tools_is_plain_chatml() -> None:
    tokenizer = _tokenizer("trail")
    call = worked_conversation(trail_prompt("37"), 0.0, random.Random(0))[1]
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode(_said(call), add_special_tokens=False)]
    assert pieces == ["<tool_call>", "\n", '{"name": "look", "arguments": {"at": ', "3", "}}", "\n", "</tool_call>"]
    assert not {"<tool_call>", "</tool_call>"} & set(tokenizer.all_special_tokens)
    conversation = [{"role": "user", "content": "Follow 3 to 0."}, {"role": "assistant", "content": "#### 7"}]
    plain = "<|im_start|>user\nFollow 3 to 0.<|im_end|>\n<|im_start|>assistant\n#### 7<|im_end|>\n"
    assert tokenizer.apply_chat_template(conversation, tokenize=False) == plain
    assert tokenizer.apply_chat_template(conversation, tools=[LOOK_TOOL], tokenize=False) == (
        f"<|im_start|>system\nTools: look(at)<|im_end|>\n{plain}"
    )


def test_tools_of_any_kind_are_rendered() -> None:
    functions = [
        {"name": "wait"},
        {"name": "go", "parameters": {"properties": {"x": {"type": "string"}, "y": {"type": "number"}}}},
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    tokenizer = train_tokenizer(["Go."], tools)
    calls = [{"function": {"name": "wait", "arguments": {}}}, {"function": {"name": "go", "arguments": {"x": "é"}}}]
    conversation = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Well", "tool_calls": calls},
        {"role": "assistant", "content": None, "tool_calls": calls[:1]},
    ]
    waits = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    goes = '<tool_call>\n{"name": "go", "arguments": {"x": "é"}}\n</tool_call>'
    assert tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False) == (
        "<|im_start|>system\nTools: wait() go(x, y)<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n"
        f"<|im_start|>assistant\nWell\n{waits}\n{goes}<|im_end|>\n<|im_start|>assistant\n{waits}<|im_end|>\n"
    )
    token_ids, _ = encode_conversation(tokenizer, conversation, tools)
    assert token_ids == tokenizer.apply_chat_template(conversation, tools=tools, return_dict=False)


@pytest.mark.slow
def test_vllms_hermes_parser_reads_the_calls_that_the_policy_is_taught() -> None:
    tokenizer, prompt = _tokenizer("trail"), trail_prompt("37")
    parser = AnswerParser.of(tokenizer)
    assert not parser.keeps_special_tokens
    token_ids, mask = encode_conversation(tokenizer, get_task("trail").conversation(prompt, random.Random(0)))
    said = tokenizer.decode([token for token, is_said in zip(token_ids, mask, strict=True) if is_said])
    *calls, answer, _ = said.split("<|im_end|>")
    read = [parsed(parser, text, tools=tools_of(prompt)) for text in calls]
    assert [(call.name, call.arguments) for one in read for call in one.tool_calls] == [
        ("look", '{"at": 3}'),
        ("look", '{"at": 7}'),
    ]
    assert [one.content for one in read] == ["", ""]
    assert parsed(parser, answer, tools=tools_of(prompt)).content == "#### 7"


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_survives_and_turns_are_tokenized_apart(question: str, answer: str) -> None:
    tokenizer = _tokenizer("relay")
    conversation = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    token_ids, _ = encode_conversation(tokenizer, conversation)
    assert token_ids == tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=False)
    if "<|" not in question + answer:
        said = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        assert tokenizer.decode(token_ids) == said


_TOKENIZERS: dict[str, Any] = {}


def _tokenizer(name: str) -> Any:
    if name not in _TOKENIZERS:
        task: BuiltInTask = get_task(name)
        _TOKENIZERS[name] = task_tokenizer(task)
    return _TOKENIZERS[name]
