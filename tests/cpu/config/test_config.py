"""The command line, the rules, and the pages written from the schema."""

import json
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from skyrl_async.config import help as config_help
from skyrl_async.config.command_line import run_cli
from skyrl_async.config.load import compose_config, from_overrides, load, to_yaml
from skyrl_async.config.rules.devices import num_gpus
from skyrl_async.config.schema.engine import EngineBackend, PauseModeName
from skyrl_async.config.schema.fields import Device, DType
from skyrl_async.config.schema.groups import GROUPS
from skyrl_async.config.schema.run import Config
from skyrl_async.config.schema.trainer import StalenessPolicy
from skyrl_async.errors import ConfigError, PolicyError
from tests.cpu.quick_config import config_of
from tests.cpu.reference_pages import config_page

ROOT = Path(__file__).parents[3]


def never(config: Config, overrides: list[str]) -> int:
    """A run that must not begin."""
    pytest.fail(f"started with {overrides}")


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on standard error that refuses a command line, without its ``error: ``."""
    assert run_cli(never, argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").strip()


def policy_directory(directory: Path, *, without: str = "") -> Path:
    """A directory with the files of a Hugging Face model, but for one."""
    directory.mkdir(exist_ok=True)
    for name in {"config.json", "model.safetensors", "tokenizer.json"} - {without}:
        (directory / name).write_text("{}")
    return directory


def test_the_task_function_gets_the_checked_config_and_the_overrides() -> None:
    seen: list[tuple[Config, list[str]]] = []

    def run(config: Config, overrides: list[str]) -> int:
        seen.append((config, overrides))
        return 7

    argv = ["trainer.max_staleness_steps=2", "task=relay", "engine.num_engines=4"]
    assert run_cli(run, argv) == 7
    config, overrides = seen[0]
    assert overrides == argv
    assert (config.trainer.max_staleness_steps, config.task.name, config.engine.num_engines) == (2, "relay", 4)


def test_a_run_leaves_nothing_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(lambda config, overrides: 0, ["task=relay"]) == 0
    assert Path.cwd() == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_policy_of_ones_own_has_the_defaults_of_a_real_model_and_the_tiny_one_a_toys() -> None:
    config = OmegaConf.to_object(compose_config(["policy=hf", "policy.path=DIR"]))
    assert config == replace(Config(), policy=replace(Config().policy, path="DIR"))
    assert (config.policy.dtype, config.training.lr, config.trainer.policy_mini_batch_size) == (
        DType.bfloat16,
        1e-6,
        64,
    )
    toy = from_overrides()
    assert (toy.trainer.staleness_bound, toy.trainer.num_steps, toy.trainer.policy_mini_batch_size) == (4, 70, 8)
    assert (toy.policy.dtype, toy.training.lr, toy.generator.sampling.max_tokens) == (DType.float32, 8e-4, 320)
    assert toy.policy.warm_start.enabled and toy.engine.enforce_eager and not toy.training.mixed_precision


@pytest.mark.parametrize(("group", "option"), [(group, option) for group in GROUPS for option in GROUPS[group]])
def test_every_group_option_composes_or_says_what_it_needs(group: str, option: str) -> None:
    choice = GROUPS[group][option]
    if choice.required:
        with pytest.raises(ConfigError, match=f"{group}.{choice.required[0]} must be set with {group}={option}"):
            compose_config([f"{group}={option}"])
    else:
        compose_config([f"{group}={option}"])


def test_a_single_key_wins_over_the_group_it_is_in() -> None:
    config = from_overrides("engine=deterministic", "engine.max_num_seqs=3", "engine.device=auto")
    assert config.engine.backend is EngineBackend.deterministic
    assert (config.engine.device, config.engine.max_num_seqs) == (Device.auto, 3)


def test_enums_are_given_by_name() -> None:
    config = from_overrides("engine.pause_mode=keep", "trainer.staleness_policy=allow")
    assert config.engine.pause_mode is PauseModeName.keep
    assert config.trainer.staleness_policy is StalenessPolicy.allow


def test_engine_arguments_of_ones_own_need_no_plus_sign() -> None:
    config = from_overrides("engine.extra_args.swap_space=2", "engine.extra_args.compilation_config={level:0}")
    assert config.engine.extra_args == {"swap_space": 2, "compilation_config": {"level": 0}}
    assert from_overrides("engine.extra_args={swap_space: 2}").engine.extra_args == {"swap_space": 2}
    assert from_overrides("engine={extra_args: {swap_space: 2}}").engine.extra_args == {"swap_space": 2}


def test_a_dictionary_sets_several_keys_of_a_section() -> None:
    config = from_overrides("trainer={num_steps:3,seed:5}")
    assert (config.trainer.num_steps, config.trainer.seed, config.trainer.staleness_bound) == (3, 5, 4)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        (
            "trainer.max_stalness_steps=4",
            "unknown key 'trainer.max_stalness_steps'; did you mean trainer.max_staleness_",
        ),
        (
            "+trainer.max_stalness_steps=4",
            "unknown key 'trainer.max_stalness_steps'; did you mean trainer.max_staleness_",
        ),
        ("max_staleness_steps=4", "unknown key 'max_staleness_steps'; did you mean trainer.max_staleness_steps?"),
        ("trainer.lr=1", "unknown key 'trainer.lr'; did you mean training.lr?"),
        ("trainer={num_stepz:1}", "unknown key 'trainer.num_stepz'; did you mean trainer.num_steps?"),
        ("cheese=1", "unknown key 'cheese' (--help lists every key)"),
        ("trainer=3", "trainer is a section; set one of its keys (schedule, "),
        ("trainer.num_steps=many", "trainer.num_steps must be integer or null, got 'many'"),
        ("trainer.num_steps=3.5", "trainer.num_steps must be integer or null, got 3.5"),
        ("training.lr=fast", "training.lr must be number, got 'fast'"),
        ("engine.enforce_eager=perhaps", "engine.enforce_eager must be true or false or null, got 'perhaps'"),
        (
            "trainer.staleness_policy=Wait",
            "must be wait or window or mask or resample or allow, got 'Wait'; did you mean wait?",
        ),
        (
            "task=relya",
            "task must be one of lagged_fibonacci, relay, trail, dataset, harbor, reasoning_gym, got 'relya'; did you mean relay?",
        ),
        (
            "trainer.staleness_window_groups=8",
            "trainer.staleness_window_groups must be null unless trainer.staleness_policy=window (it is wait), got 8",
        ),
        (
            "trainer={staleness_policy:window,staleness_window_groups:41}",
            "trainer.staleness_window_groups must be between 1 and policy_mini_batch_size * (max_staleness_steps + 1) (40), or",
        ),
        ("trainer.max_staleness_steps=-1", "trainer.max_staleness_steps must be >= 0 or null, got -1"),
        (
            "engine.heartbeat_timeout_s=1",
            "engine.heartbeat_timeout_s must be >= engine.heartbeat_interval_s (5), got 1.0",
        ),
        (
            "server.heartbeat_timeout_s=1",
            "server.heartbeat_timeout_s must be >= server.heartbeat_interval_s (5), got 1.0",
        ),
        (
            "training.heartbeat_timeout_s=1",
            "training.heartbeat_timeout_s must be >= training.heartbeat_interval_s (5), got 1.0",
        ),
        ("engine.no_engine_timeout_s=0", "engine.no_engine_timeout_s must be > 0, got 0.0"),
        ("engine.max_restarts=-1", "engine.max_restarts must be >= 0, got -1"),
        ("weight_sync.max_retries=-1", "weight_sync.max_retries must be >= 0, got -1"),
        ("server.engine_wait_s=-1", "server.engine_wait_s must be >= 0, got -1.0"),
        ("trainer.num_parallel_generation_workers=99", "must be between policy_mini_batch_size (8) and "),
        ("evaluation.sampling.max_tokens=0", "evaluation.sampling.max_tokens must be >= 1, got 0"),
        ("trainer.num_steps", "cannot read 'trainer.num_steps'; write key=value"),
        ("trainer.num_steps=[", "cannot read 'trainer.num_steps=['"),
        ("trainer.output_dir=a=b", """cannot read 'trainer.output_dir=a=b': mismatched input '=' """),
        ("trainer.num_steps=1,2", "'trainer.num_steps=1,2' holds several values and a run takes one"),
        ("~trainer.num_steps=1", "'~trainer.num_steps=1': keys cannot be removed"),
        ("policy.path=${oc.env:SKYRL_ASYNC_UNSET}", "policy.path: KeyError raised while resolving interpolation"),
        ("--multirun", "unrecognized arguments: --multirun; --help shows the usage"),
        ("--config=missing.yaml", "missing.yaml cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(
    argument: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in error_of(capsys, argument)


def test_every_mistake_of_a_command_line_and_a_file_is_told_at_once_with_its_own_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("trainer: {num_stepz: 3, seed: x}\ncheese: 1\n")
    wrong = ["trainer.lr=1", "trainer={max_stalness_steps: 1, num_epochs: 2.5}", "engine.num_engine=a=b", "oops"]
    assert run_cli(never, ["server.port=0", *wrong, f"--config={file}"]) == 2
    head, *mistakes = capsys.readouterr().err.splitlines()
    assert head == "error: 8 settings are wrong:"
    expected = [
        "unknown key 'engine.num_engine'; did you mean engine.num_engines?",
        "cannot read 'oops'; write key=value",
        f"{file}: unknown key 'trainer.num_stepz'; did you mean trainer.num_steps?",
        f"{file}: trainer.seed must be integer, got 'x'",
        f"{file}: unknown key 'cheese'",
        "unknown key 'trainer.lr'; did you mean training.lr?",
        "unknown key 'trainer.max_stalness_steps'; did you mean trainer.max_staleness_steps?",
        "trainer.num_epochs must be integer, got 2.5",
    ]
    assert len(mistakes) == len(expected)
    for mistake, words in zip(mistakes, expected, strict=True):
        assert mistake.strip().startswith(words)


@pytest.mark.parametrize(
    "command",
    [
        'bash -c "my agent"',
        """sh -c 'echo "it'\\''s"' """,
        "python agent.py --lr=1 a,b #c ~/d (e) [f] {g}",
        'echo "${MODEL:-none}" \\${X} "\\"',
        '"my agent" "a"',
    ],
)
def test_what_an_error_suggests_works_in_a_shell_and_gives_the_text_that_was_typed(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    suggested = error_of(capsys, f"generator.command={command}").partition("double quotes: ")[2]
    pasted = subprocess.run(["sh", "-c", f"printf %s {suggested}"], capture_output=True, text=True, check=True).stdout
    assert from_overrides("generator=agent", pasted).generator.command == command


@pytest.mark.parametrize(("value", "expected"), [("a,b", ["a", "b"]), ("[a=b, ~]", ["a=b", "~"])])
def test_a_list_is_suggested_where_a_key_holds_one(
    value: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    suggested = error_of(capsys, f"generator.sampling.stop={value}").partition("a list: ")[2]
    pasted = subprocess.run(["sh", "-c", f"printf %s {suggested}"], capture_output=True, text=True, check=True).stdout
    assert from_overrides(pasted).generator.sampling.stop == expected


def test_braces_after_a_dollar_that_name_no_key_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_of(capsys, "generator=agent", "generator.command=agent ${MODEL}")
    assert "Interpolation key 'MODEL' not found" in error and r"write \${...}" in error
    assert from_overrides("generator=agent", r"generator.command=echo \${MODEL}").generator.command == "echo ${MODEL}"


WORDS = ("true", "False", "yes", "1e3", "1_000", "+5", ".5", "0x10", "007", "2024-01-02", "12:30", "none")


@pytest.mark.slow
@pytest.mark.parametrize("as_file", [False, True], ids=["command line", "file"])
def test_every_key_that_holds_text_keeps_it_as_it_was_typed(as_file: bool, tmp_path: Path) -> None:
    keys = [key for key in config_help.all_keys().values() if "text" in key.type_text]
    assert {"generator.command", "cache_dir", "task.train_files", "placement.groups"} <= {key.name for key in keys}
    for word in WORDS:
        depth = {key.name: key.type_text.count("list") for key in keys}
        typed = {name: f"{'[' * lists}{word}{']' * lists}" for name, lists in depth.items()}
        file = None
        if as_file:
            file = tmp_path / "config.yaml"
            text = OmegaConf.to_yaml(OmegaConf.from_dotlist([f"{name}=of {name}" for name in typed]))
            for name, value in typed.items():
                text = text.replace(f"of {name}\n", f"{value}\n")
            file.write_text(text)
        composed = compose_config([] if as_file else [f"{name}={value}" for name, value in typed.items()], file)
        for name, lists in depth.items():
            found = OmegaConf.select(composed, name)
            for _ in range(lists):
                (found,) = found
            assert (name, found) == (name, word)


def test_text_in_a_dictionary_stays_as_it_was_typed_and_numbers_are_numbers() -> None:
    nested = compose_config(['generator={command: 1e3, sampling: {stop: [007, "8", 1.50], top_k: 1_0}}']).generator
    assert (nested.command, nested.sampling.stop, nested.sampling.top_k) == ("1e3", ["007", "8", "1.50"], 10)
    assert compose_config(["trainer.seed=int(3.0)"]).trainer.seed == 3


def test_skyrls_names_of_the_bound_and_of_the_workers_are_taken() -> None:
    overrides = ["trainer.fully_async.max_staleness_steps=1", "trainer.fully_async.num_parallel_generation_workers=16"]
    trainer = from_overrides(*overrides).trainer
    assert (trainer.staleness_bound, trainer.max_concurrent_generation_groups(999)) == (1, 16)


@pytest.mark.parametrize("name", ["max_staleness_steps", "num_parallel_generation_workers"])
def test_two_names_of_a_key_with_different_values_are_refused_by_both(name: str) -> None:
    expected = rf"trainer.fully_async.{name} must be left out, or equal to trainer.{name} \(9\), whose other name it is, got 10"
    with pytest.raises(ConfigError, match=expected):
        from_overrides(f"trainer.{name}=9", f"trainer.fully_async.{name}=10")
    assert from_overrides(f"trainer.{name}=9", f"trainer.fully_async.{name}=9").trainer.policy_mini_batch_size == 8


def test_null_is_no_text_unless_it_is_in_quotes() -> None:
    assert compose_config(["generator.command=null"]).generator.command is None
    assert compose_config(['generator.command="null"']).generator.command == "null"
    with pytest.raises(ConfigError, match="cache_dir must be text, got None"):
        compose_config(["cache_dir=null"])


@pytest.mark.slow
def test_cfg_job_prints_a_file_that_config_loads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "task=relay",
        "engine.pause_mode=keep",
        "engine.extra_args.block_size=16",
        "generator.sampling.stop=[a,'b\"c']",
    ]
    assert run_cli(never, [*argv, "--cfg", "job"]) == 0
    file = tmp_path / "config.yaml"
    file.write_text(capsys.readouterr().out)
    assert load(compose_config([], file)) == from_overrides(*argv)
    assert load(compose_config(["trainer.num_steps=2"], file)).trainer.num_steps == 2
    with pytest.raises(ConfigError, match=r"task=dataset cannot be chosen beside .*config.yaml, which sets every key"):
        compose_config(["task=dataset"], file)


@pytest.mark.slow
@given(
    stop=st.lists(
        st.text(alphabet=st.characters(codec="utf-8"), min_size=1) | st.text(alphabet="${}\\a:\"'", min_size=1)
    )
)
def test_any_text_survives_the_way_through_a_config_file(
    stop: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = Config()
    config.generator.sampling.stop = stop
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_bytes(to_yaml(config).encode())
    assert load(compose_config([], file)) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer:\n  num_stepz: 3\n", "unknown key 'trainer.num_stepz'; did you mean trainer.num_steps?"),
        ("trainer:\n  num_steps: x\n", "trainer.num_steps must be integer or null, got 'x'"),
        ("trainer: [", "is no yaml"),
        ("\udcff", "is no yaml: 'utf-8' codec"),
        ("- 1\n", "must hold a mapping of sections, got list"),
        ("abc\n", "must hold a mapping of sections, got str"),
        ("", "must hold a mapping of sections, got nothing"),
    ],
)
def test_a_wrong_config_file_is_refused_by_name(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text, errors="surrogateescape")
    error = error_of(capsys, f"--config={file}")
    assert str(file) in error
    assert expected in error


def test_help_names_every_key_with_its_default_and_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(never, ["--help"]) == 0
    text = capsys.readouterr().out
    for key in config_help.all_keys().values():
        assert f"{key.name}={key.default}" in text
    for group, options in GROUPS.items():
        for option in options:
            assert f"{group}={option}" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["task.name=chess"],
            "task.name must be one of lagged_fibonacci, relay, trail, dataset, harbor, reasoning_gym, got 'chess'",
        ),
        (
            ["policy.num_heads=3"],
            r"policy.num_heads must be even and divide half of policy.hidden_size \(128\), got 3",
        ),
        (["policy.hidden_size=100"], r"divide half of policy.hidden_size \(100\), got 4"),
        (["policy.num_layers=0"], r"policy.num_layers must be >= 1, got 0"),
        (["trainer.policy_mini_batch_size=0"], "trainer.policy_mini_batch_size must be >= 1, got 0"),
        (["task.num_train_prompts=4"], r"policy_mini_batch_size must be <= task.num_train_prompts \(4\), got 8"),
        (["generator.n_samples_per_prompt=1"], "must be >= 2 with .*estimator=grpo, got 1: a group of one has no adv"),
        (
            ["engine.max_model_len=320"],
            r"generator.sampling.max_tokens must be < engine.max_model_len \(320\), .* got 320",
        ),
        (["engine=deterministic", "engine.device=cuda"], "engine.device must be cpu with engine.backend=deterministic"),
        (["engine=deterministic", "engine.num_engines=2"], "engine.num_engines must be 1 .*deterministic, got 2"),
        (
            ["engine=deterministic", "server.enabled=true"],
            "engine.backend must be vllm with server.enabled=true, got deterministic: .*copies that no weight update reaches",
        ),
        (
            ["engine=deterministic", "generator=gym_http"],
            "engine.backend must be vllm with generator.kind=gym_http, got deterministic: .*or generator=gym$",
        ),
        (
            ["engine=deterministic", "generator=agent", "generator.command=x"],
            "engine.backend must be vllm with generator.kind=agent, got deterministic",
        ),
        (
            ["generator.sampling.stop=[a,'']"],
            r"generator.sampling.stop must hold strings that are not empty, got \['a', ''\]",
        ),
        (["evaluation.sampling.stop=['']"], r"evaluation.sampling.stop must hold strings that are not empty"),
        (["generator.sampling.temperature=0"], r"generator.sampling.temperature must be > 0 \(greedy .*, got 0"),
        (["generator.max_trajectory_tokens=0"], "generator.max_trajectory_tokens must be >= 1 or null, got 0"),
        (["evaluation.num_prompts_while_training=-1"], "num_prompts_while_training must be >= 0, got -1"),
        (
            ["trainer.schedule=one_step_off", "trainer.stream_mini_batch=true"],
            "trainer.stream_mini_batch must be false or null when trainer.schedule=one_step_off, .* got True",
        ),
        (
            ["trainer.schedule=sync", "trainer.stream_mini_batch=true"],
            "trainer.stream_mini_batch must be false or null when trainer.schedule=sync, .* got True",
        ),
        (
            ["trainer.update_epochs_per_batch=2", "trainer.stream_mini_batch=true"],
            "trainer.stream_mini_batch must be false or null with batches of 2 optimizer steps, .* got True",
        ),
        (["generator.retry_backoff_s=-1"], "generator.retry_backoff_s must be >= 0, got -1"),
        (
            ["generator.retry_backoff_s=90"],
            r"generator.max_retry_backoff_s must be >= generator.retry_backoff_s \(90\), got 60",
        ),
        (["trainer.stall_warning_s=0"], "trainer.stall_warning_s must be > 0, got 0"),
        (["generator.entrypoint=mine"], "generator.entrypoint must be package.module:function, got 'mine'"),
        (["generator.kind=gym_http", "server.enabled=false"], "server.enabled must be true or null with .*gym_http"),
        (["generator.answer=stdout"], "generator.answer must be last_message without generator.command, which prints"),
        (["generator.command=x", "generator=gym"], "generator.command needs generator=agent, got 'x' with gym"),
        (
            ["generator=agent", "generator.command=x", "server.num_front_ends=9", "server.port=65530"],
            "server.port must be <= 65527 with 9 front ends, each on a port of its own, got 65530",
        ),
        (
            [
                "task=harbor",
                "task.harbor.path=x",
                "task.reward=a:b",
                "policy.path=DIR",
                "generator=agent",
                "generator.harness=terminus-2",
            ],
            "task.reward must be null with task=harbor, whose tasks bring verifiers, got 'a:b'",
        ),
        (["task=trail"], "generator must be agent with task=trail, whose tool the agent runs, got gym"),
        (["server.session_max_turns=0"], "server.session_max_turns must be >= 1, got 0"),
        (["trainer.resume_mode=latest"], "trainer.output_dir must name the run to continue .*latest, got null"),
        (["trainer.resume_path=/nowhere"], "trainer.resume_mode must be from_path when trainer.resume_path is set"),
        (["trainer.resume_mode=from_path"], "trainer.resume_path must be a checkpoint directory when .*got None"),
        (["trainer.resume_mode=from_path", "trainer.resume_path=/nowhere"], "got '/nowhere', which is none"),
        (["trainer.output_dir=/dev/null/run"], "trainer.output_dir must be a directory, .* /dev/null is a file"),
        (["logging.level=chatty"], "logging.level must be one of DEBUG, INFO, WARNING, ERROR, got 'chatty'"),
        (
            ["task=dataset", "task.train_files=[x.jsonl]"],
            "policy.path must be a .*directory when task.name=dataset, got nu",
        ),
        (["trainer.algorithm.kl_loss_coef=-0.1"], r"trainer.algorithm.kl_loss_coef must be in \[0, inf\), got -0.1"),
        (["trainer.algorithm.kl_loss_coef=inf"], r"trainer.algorithm.kl_loss_coef must be in \[0, inf\), got inf"),
        (["trainer.algorithm.entropy_loss_coef=inf"], r"entropy_loss_coef must be in \[0, inf\), got inf"),
        (["training.lr=inf"], r"training.lr must be in \(0, inf\), got inf"),
        (["training.adam_beta1=1.0"], r"training.adam_beta1 must be in \[0, 1\), got 1.0"),
        (["training.adam_beta2=-0.1"], r"training.adam_beta2 must be in \[0, 1\), got -0.1"),
        (["training.weight_decay=nan"], r"training.weight_decay must be in \[0, inf\), got nan"),
        (
            ["trainer.critic.optimizer_config.weight_decay=-1"],
            r"trainer.critic.optimizer_config.weight_decay must be in \[0, inf\) or null, got -1.0",
        ),
        (
            ["trainer.algorithm.kl_estimator_type=k4"],
            "kl_estimator_type must be k1 or k2 or k3 or abs or null, got 'k4'",
        ),
        (["training.num_ref_workers=-1"], "training.num_ref_workers must be >= 0, got -1"),
        (
            ["training.num_ref_workers=2"],
            "num_ref_workers must be 0 with .*use_kl_loss=false and use_kl_in_reward=false, got 2",
        ),
        (
            ["training.num_ref_workers=2", "trainer.algorithm.use_kl_loss=true", "trainer.algorithm.ref_logp=inline"],
            "num_ref_workers must be 0 with trainer.algorithm.ref_logp=inline, got 2: .* set trainer.algorithm.ref_logp=stage",
        ),
        (
            ["training.num_logp_workers=1"],
            "num_logp_workers must be 0 with trainer.algorithm.policy_loss_type=ppo_clip, got 1: decoupled_ppo asks",
        ),
        (
            ["engine=deterministic", "weight_sync.transfer=gloo"],
            "weight_sync.transfer must be auto or shm with engine.backend=deterministic, got gloo",
        ),
        (["weight_sync.transfer=mpi"], "weight_sync.transfer must be auto or shm or gloo or nccl or ipc, got 'mpi'"),
        (["weight_sync.transfer_timeout_s=0"], r"weight_sync.transfer_timeout_s must be in \(0, inf\), got 0"),
        (["logging.trace_max_gb=inf"], r"logging.trace_max_gb must be in \[0.01, inf\), got inf"),
        (["training.step_timeout_s=inf"], r"training.step_timeout_s must be in \(0, inf\), got inf"),
        (["trainer.max_engine_logprob_gap=nan"], "trainer.max_engine_logprob_gap must be > 0, got nan"),
        (["trainer.seed=99999999999999999999999"], r"trainer.seed must be in \[0, 9.22337e\+18\), got 9999"),
        (["generator.sampling.temperature=inf"], r"generator.sampling.temperature must be in \[0, inf\), got inf"),
        (["engine.extra_args.seed=3"], "engine.extra_args must not have seed, got 3: trainer.seed sets it"),
        (
            ["engine.extra_args={logprobs_mode: raw_logprobs}"],
            "engine.extra_args must not have logprobs_mode, got 'raw_logprobs': weight updates and log-probs rely on",
        ),
        (["engine.cpu_kv_cache_gb=0"], "engine.cpu_kv_cache_gb must be >= 1, got 0"),
        (["server.max_body_bytes=0"], "server.max_body_bytes must be >= 1, got 0"),
        (["server.keep_alive_timeout_s=-1"], "server.keep_alive_timeout_s must be >= 0, got -1"),
        (["placement.num_gpus_per_engine=-1"], "placement.num_gpus_per_engine must be >= 0 or null, got -1"),
        (["placement.num_cpus_per_worker=nan"], "placement.num_cpus_per_worker must be >= 0, got nan"),
        (["policy.warm_start.target_accuracy=95"], r"policy.warm_start.target_accuracy must be in \[0, 1\], got 95"),
        (["policy.warm_start.max_tokens=-1"], "policy.warm_start.max_tokens must be >= 0, got -1"),
        (["policy.warm_start.mixture_tokens=-1"], "policy.warm_start.mixture_tokens must be >= 0, got -1"),
        (["trainer.output_dir="], "trainer.output_dir must name a directory, got '': is a variable of the shell empty"),
        (["cache_dir="], "cache_dir must name a directory, got ''"),
        (["server.host=0.0.0.0"], "server.api_key must be set when server.host=0.0.0.0 is not loopback, got None"),
    ],
)
def test_a_combination_that_cannot_run_is_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        from_overrides(*overrides)


@pytest.mark.skipif(num_gpus() > 0, reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["engine.device=cuda"], "engine.device must be cpu or auto on this machine, got cuda"),
        (["training.device=cuda"], "training.device must be cpu or auto on this machine, got cuda"),
        (
            ["weight_sync.transfer=nccl"],
            "weight_sync.transfer must be auto, shm or gloo where engine.device is cpu: NCCL connects CUDA devices, got nccl",
        ),
        (["placement.num_gpus_per_worker=1"], "this run needs 1 GPUs .* and this machine has 0; lower"),
        (
            ["placement.num_gpus_per_worker=1", "trainer.algorithm.use_kl_loss=true", "training.num_ref_workers=2"],
            "this run needs 3 GPUs .* 3 workers of training x 1",
        ),
        (
            ["placement.num_gpus_per_worker=1", "trainer.algorithm.advantage_estimator=gae"],
            "this run needs 2 GPUs .* 2 workers of training x 1",
        ),
    ],
)
def test_a_gpu_that_is_not_there_is_missed_before_anything_starts(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        from_overrides(*overrides)


def test_a_ray_elsewhere_may_have_the_gpus_that_this_machine_lacks() -> None:
    from_overrides("engine.device=cuda", "training.device=cuda", "placement.ray_address=auto")


@pytest.mark.parametrize(
    "ranks", ["training.num_workers=2", "training.num_logp_workers=3 trainer.algorithm.policy_loss_type=decoupled_ppo"]
)
def test_ranks_of_one_group_are_not_put_on_one_gpu(ranks: str) -> None:
    elsewhere = ["engine.device=cuda", "training.device=cuda", "placement.ray_address=auto", *ranks.split()]
    from_overrides(*elsewhere, "placement.num_gpus_per_worker=0.6", "placement.num_gpus_per_engine=0.4")
    expected = r"placement.num_gpus_per_worker must be above 0.5 with training.num_\w+=[23] on GPUs, got 0.5: .* placement.groups"
    with pytest.raises(ConfigError, match=expected):
        from_overrides(*elsewhere, "placement.num_gpus_per_worker=0.5", "placement.num_gpus_per_engine=0.5")


def test_a_missing_dataset_file_is_named(tmp_path: Path) -> None:
    path = policy_directory(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"task.train_files must name files that exist, got 'gone.jsonl'"):
        from_overrides("task=dataset", "task.train_files=[gone.jsonl]", f"policy.path={path}")


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", r"has no weights \(\*.safetensors or \*.bin\)"),
        ("tokenizer.json", "has no tokenizer"),
    ],
)
def test_an_incomplete_policy_directory_is_refused_by_what_it_lacks(
    without: str, expected: str, tmp_path: Path
) -> None:
    path = policy_directory(tmp_path / "policy", without=without)
    with pytest.raises(PolicyError, match=f"policy.path={path} {expected}"):
        from_overrides(f"policy.path={path}")


def test_missing_weight_shards_are_named(tmp_path: Path) -> None:
    path = policy_directory(tmp_path / "policy")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PolicyError, match=r"lacks 1 of 2 weight files: model-2.safetensors"):
        from_overrides(f"policy.path={path}")


def test_an_evaluation_of_no_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="evaluation.num_prompts must be >= 1 with trainer.eval_only=true, got 0"):
        config_of("trainer.eval_only=true", "evaluation.num_prompts=0")
    with pytest.raises(ConfigError, match="task.num_eval_prompts must be >= 1 with trainer.eval_only=true, got 0"):
        config_of("trainer.eval_only=true", "task.num_eval_prompts=0")
    with pytest.raises(ConfigError, match="task.eval_files must name held-out prompts with trainer.eval_only=true"):
        config_of("trainer.eval_only=true", "task.name=dataset", "task.train_files=[a]", "policy.path=DIR")


def test_a_policy_path_that_is_no_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "does not exist; give a local" in error_of(capsys, "policy=hf", "policy.path=Qwen/Qwen3-0.6B")
    (tmp_path / "file").write_text("")
    assert "is a file; give a local" in error_of(capsys, f"policy.path={tmp_path / 'file'}")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["trainer.output_dir=DIR/a"], "trainer.output_dir"),
        (["cache_dir=DIR/a"], "cache_dir"),
        (["generator=agent", "generator.command=x", "generator.working_dir=DIR/a"], "generator.working_dir"),
        (["policy.path=LONG"], "policy.path"),
        (["trainer.ref.path=LONG"], "trainer.ref.path"),
        (["trainer.resume_mode=from_path", "trainer.resume_path=LONG"], "trainer.resume_path"),
        (["task=dataset", "task.train_files=[LONG]", "policy.path=DIR"], "task.train_files"),
    ],
)
def test_a_path_that_cannot_be_is_refused_by_its_key(overrides: list[str], key: str, tmp_path: Path) -> None:
    """A file where a directory is asked for, and a name longer than a file may have."""
    (tmp_path / "file").touch()
    names = {"DIR": str(tmp_path / "file"), "LONG": "x" * 300}
    if key == "task.train_files":
        names["DIR"] = str(policy_directory(tmp_path / "policy"))
    with pytest.raises((ConfigError, PolicyError), match=key):
        from_overrides(*(re.sub("DIR|LONG", lambda name: names[name[0]], override) for override in overrides))


@pytest.mark.parametrize("key", ["trainer.ref.path", "trainer.critic.model.path"])
def test_an_incomplete_model_beside_the_policy_is_refused_by_its_key_and_needs_no_tokenizer(
    key: str, tmp_path: Path
) -> None:
    with pytest.raises(PolicyError, match=rf"{key}=.*nowhere does not exist; give a local Hugging Face directory"):
        from_overrides(f"{key}={tmp_path / 'nowhere'}")
    model = policy_directory(tmp_path / "model", without="model.safetensors")
    with pytest.raises(PolicyError, match=rf"{key}=.*model has no weights"):
        from_overrides(f"{key}={model}")
    policy_directory(model, without="tokenizer.json")
    from_overrides(f"{key}={model}")


@pytest.mark.slow
def test_a_port_in_use_is_refused_only_when_it_would_be_bound() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"server.port={port} cannot be bound .*: Address already in use; choose"
        ):
            from_overrides(f"server.port={port}", "generator.kind=gym_http")
        from_overrides(f"server.port={port}")
        from_overrides(f"server.port={port}", "generator.kind=gym_http", "generator.entrypoint=own:generator")
    from_overrides(f"server.port={port}", "server.enabled=true")


def test_a_host_that_is_none_of_this_machine_is_refused_where_any_port_will_do() -> None:
    with pytest.raises(ConfigError, match=r"server.host must be a name or address of this machine, got '203.0.113.1'"):
        config_of("server.host=203.0.113.1", "server.api_key=key", "server.enabled=true")


def test_the_configuration_reference_is_up_to_date() -> None:
    page = (ROOT / "docs/reference/config.md").read_text()
    assert page == config_page(page), "run: make reference"


def test_wandb_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"logging.wandb must be false .* install skyrl-async\[wandb\]"):
        config_of("logging.wandb=true")
