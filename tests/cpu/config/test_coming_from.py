"""Keys and scripts of other trainers: what an error says of them, and our command for a script."""

import re
import subprocess
from importlib import resources
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from skyrl_async.config.bash_words import commands_of
from skyrl_async.config.coming_from import OUR_OLD_NAMES, find, foreign_keys, hint_for, sources, yaml_value
from skyrl_async.config.command_line import run_cli
from skyrl_async.config.from_skyrl import override_text, translated
from skyrl_async.config.help import all_keys
from skyrl_async.config.load import compose_config
from skyrl_async.config.schema.run import Config
from tests.cpu.reference_pages import coming_from_page

ROOT = Path(__file__).parents[3]

# The lines of SkyRL's examples/train/fully_async/fully_async_run_gsm8k.sh (a956457) that a shell acts on.
GSM8K = r"""
set -x
: "${DATA_DIR:="$HOME/data/gsm8k"}"
: "${NUM_INFERENCE_GPUS:=2}"
: "${NUM_POLICY_GPUS:=2}"
: "${LOGGER:=wandb}" # change to "console" to print to stdout / or use wandb
: "${INFERENCE_BACKEND:=vllm}"
: "${MINI_BATCH_SIZE:=256}"
: "${MAX_STALENESS_STEPS:=4}"
: "${NUM_PARALLEL_GENERATION_WORKERS:=$(( MINI_BATCH_SIZE * (MAX_STALENESS_STEPS + 1) ))}"

SEQUENCE_MASK_METRIC=geometric
GEO_MASK_HIGH=1.01
GEO_MASK_LOW=0.99
ENFORCE_EAGER=false

RUN_NAME=gsm8k-fully-async-qwen2.5_1.5B-geoMask${GEO_MASK_LOW}_${GEO_MASK_HIGH}-maxStale${MAX_STALENESS_STEPS}-numCon${NUM_PARALLEL_GENERATION_WORKERS}-${NUM_POLICY_GPUS}train${NUM_INFERENCE_GPUS}gen

uv run --isolated --extra fsdp -m examples.train.fully_async.main_fully_async \
  data.train_data="['$DATA_DIR/train.parquet']" \
  data.val_data="['$DATA_DIR/validation.parquet']" \
  trainer.fully_async.enabled=true \
  trainer.fully_async.max_staleness_steps=${MAX_STALENESS_STEPS} \
  trainer.fully_async.num_parallel_generation_workers=${NUM_PARALLEL_GENERATION_WORKERS} \
  trainer.algorithm.policy_loss_type="rollout_is" \
  trainer.algorithm.advantage_estimator="grpo" \
  trainer.algorithm.off_policy_correction.sequence_mask_metric=$SEQUENCE_MASK_METRIC \
  trainer.algorithm.off_policy_correction.geo_mask_high=$GEO_MASK_HIGH \
  trainer.algorithm.off_policy_correction.geo_mask_low=$GEO_MASK_LOW \
  trainer.policy.model.path="Qwen/Qwen2.5-1.5B-Instruct" \
  trainer.placement.colocate_all=false \
  trainer.strategy=fsdp \
  trainer.placement.policy_num_gpus_per_node=$NUM_POLICY_GPUS \
  trainer.placement.critic_num_gpus_per_node=$NUM_POLICY_GPUS \
  trainer.placement.ref_num_gpus_per_node=$NUM_POLICY_GPUS \
  generator.inference_engine.num_engines=$NUM_INFERENCE_GPUS \
  generator.inference_engine.tensor_parallel_size=1 \
  trainer.epochs=20 \
  trainer.eval_batch_size=1024 \
  trainer.eval_before_train=false \
  trainer.eval_interval=4 \
  trainer.update_epochs_per_batch=1 \
  trainer.train_batch_size=${MINI_BATCH_SIZE} \
  trainer.policy_mini_batch_size=${MINI_BATCH_SIZE} \
  trainer.micro_forward_batch_size_per_gpu=8 \
  trainer.micro_train_batch_size_per_gpu=8 \
  trainer.ckpt_interval=10 \
  trainer.max_prompt_length=512 \
  generator.sampling_params.max_generate_length=1024 \
  trainer.policy.optimizer_config.lr=1.0e-6 \
  trainer.algorithm.use_kl_loss=true \
  generator.inference_engine.backend=$INFERENCE_BACKEND \
  generator.inference_engine.run_engines_locally=true \
  generator.inference_engine.weight_sync_backend=nccl \
  generator.batched=false \
  environment.env_class=gsm8k \
  generator.n_samples_per_prompt=5 \
  generator.inference_engine.gpu_memory_utilization=0.8 \
  trainer.logger="$LOGGER" \
  trainer.project_name="gsm8k-async" \
  trainer.run_name=${RUN_NAME} \
  trainer.resume_mode=latest \
  trainer.ckpt_path="$HOME/ckpts/${RUN_NAME}" \
  generator.inference_engine.enforce_eager=$ENFORCE_EAGER \
  $@
"""
START = "python -m skyrl.train.entrypoints.main_base"


def never(config: Config, overrides: list[str]) -> int:
    pytest.fail(f"started with {overrides}")


def command_for(script: Path, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``--from-skyrl`` prints for a script of this text."""
    script.write_text(text)
    assert run_cli(never, ["--from-skyrl", str(script)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def arguments_of(printed: str) -> list[str]:
    """What main gets when bash runs the printed script."""
    script = "uv() { printf '%s\\0' \"${@:4}\"; }\n" + printed
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("system", [*sources(), OUR_OLD_NAMES])
def test_every_answer_names_keys_that_exist_and_values_that_they_take(system: str) -> None:
    tree = OmegaConf.structured(Config)
    for name, row in foreign_keys(system).items():
        assert row.ours or row.note or row.values, name
        assert name not in all_keys() or row.ours == (name,) or "both names are taken" in row.note, name
        settings = [(key, value) for value in row.values.values() if value and "=" not in value for key in row.ours]
        settings += [
            (key, value)
            for text in row.values.values()
            for key, _, value in [s.partition("=") for s in text.split() if "=" in s]
        ]
        defaults = row.default and row.default != "null" and row.value_of(row.default) is None
        settings += [(key, row.default) for key in row.ours if defaults]
        for key, value in settings:
            if len(row.ours) == 1 and not key.startswith("engine.extra_args."):
                parsed = yaml_value(value)
                is_list = "list" in all_keys()[key].type_text and not isinstance(parsed, list)
                OmegaConf.update(tree, key, ([parsed] if parsed else []) if is_list else parsed)
        assert all(key in all_keys() or key.startswith("engine.extra_args.") for key in row.ours), name


def test_no_key_of_another_system_is_in_its_table_twice() -> None:
    table = resources.files("skyrl_async.config").joinpath("coming_from.txt").read_text().replace("\n ", " ")
    systems = dict(part.split("]", 1) for part in table.split("\n[")[1:])
    for system, text in systems.items():
        names = [name.strip() for row in text.splitlines()[1:] if row for name in row.partition("|")[0].split(",")]
        assert names == list(foreign_keys(system))


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("trainer.epochs", "; SkyRL's, here trainer.num_epochs (with trainer.num_steps=null)"),
        ("use_tis", "; SkyRL's, here trainer.algorithm.off_policy_correction.tis_ratio_type (token for true, "),
        ("trainer.use_tis", "; SkyRL's, here trainer.algorithm.off_policy_correction.tis_ratio_type (token for true, "),
        ("gamma", "; did you mean trainer.algorithm.gamma?"),
        ("trainer.project_name", "; SkyRL's and verl's, here logging.wandb_project"),
        ("trainer.logger", "; SkyRL's, here logging.wandb=true for wandb, "),
        ("trainer.critic.lr", "; it is trainer.critic.optimizer_config.lr now"),
        ("trainer.critic.optimizer_config.scheduler", "; SkyRL's, without a counterpart: the rest of the critic's"),
        ("trainer.critic_mini_batch_size", "; SkyRL's, without a counterpart: the critic takes a step with each"),
        ("critic.optim.lr", "; verl's, here trainer.critic.optimizer_config.lr"),
        (
            "trainer.max_prompt_length",
            "; SkyRL's, without a counterpart: prompts that leave no room in engine.max_model_len",
        ),
        ("generator.num_inference_engines", "; SkyRL's, here engine.num_engines"),
        ("generator.engine_init_kwargs.swap_space", "; SkyRL's, here engine.extra_args.swap_space"),
        ("actor_rollout_ref.actor.clip_ratio_high", "; verl's, here trainer.algorithm.eps_clip_high"),
        ("rollout.max_head_offpolicyness", "; AReaL's, here trainer.max_staleness_steps"),
        ("weight_sync.dual_buffer", "; it is weight_sync.double_buffer now"),
        ("max_staleness_steps", "; did you mean trainer.max_staleness_steps?"),
        ("trainer.algorithm.cheese", ""),
        ("trainer.algorithm.use_mis", ""),
    ],
)
def test_a_key_of_another_system_is_answered_and_no_wrong_one_guessed(key: str, hint: str) -> None:
    assert hint_for(key).startswith(hint) and bool(hint) == bool(hint_for(key))


def test_a_value_of_another_system_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(never, ["trainer.resume_mode=auto"]) == 2
    assert "trainer.resume_mode must be latest or none or from_path, got 'auto'; verl's auto is latest here" in (
        capsys.readouterr().err
    )


def test_no_key_of_skyrls_fully_asynchronous_gsm8k_script_is_left_unanswered() -> None:
    (command,) = [each for each in commands_of(GSM8K, {"HOME": "/home/me"}) if each.words[0].text == "uv"]
    keys = [word.text.partition("=")[0] for word in command.words if "=" in word.text]
    result = translated(command)
    assert len(keys) == 45 and all(find("SkyRL", key) or key in all_keys() for key in keys)
    assert (sum(key in all_keys() for key in keys), result.num_set) == (14, 38)
    assert (len(result.needless), len(result.missing), len(result.unresolved), len(result.unknown)) == (6, 1, 0, 0)
    assert result.missing[0].startswith("trainer.max_prompt_length=512: ")


def test_our_command_for_skyrls_gsm8k_script_trains_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HOME": "/home/me", "MAX_STALENESS_STEPS": "2", "LOGGER": "console"}.items():
        monkeypatch.setenv(name, value)
    arguments = arguments_of(command_for(tmp_path / "run.sh", GSM8K, capsys))
    assert run_cli(never, [*arguments, "--cfg", "job"]) == 0
    config = OmegaConf.create(capsys.readouterr().out)
    expected = {
        "task": {"name": "dataset", "train_files": ["/home/me/data/gsm8k/train.parquet"], "env_class": "gsm8k"},
        "policy": {"path": "Qwen/Qwen2.5-1.5B-Instruct", "dtype": "bfloat16"},
        "engine": {"num_engines": 2, "enforce_eager": False, "max_num_seqs": 1024, "gpu_memory_utilization": 0.8},
        "training": {"num_workers": 2, "micro_batch_tokens": 8 * (512 + 1024), "lr": 1e-6, "lr_schedule": "constant"},
        "generator": {"n_samples_per_prompt": 5, "max_turns": 1, "sampling": {"max_tokens": 1024}},
        "evaluation": {"sampling": {"max_tokens": 1024, "temperature": 0.0}},
        "logging": {"wandb": False, "wandb_project": "gsm8k-async"},
        "trainer": {
            "schedule": "fully_async",
            "max_staleness_steps": 2,
            "num_parallel_generation_workers": 256 * 3,
            "policy_mini_batch_size": 256,
            "num_steps": None,
            "num_epochs": 20,
            "resume_mode": "latest",
            "algorithm": {
                "policy_loss_type": "rollout_is",
                "use_kl_loss": True,
                # SkyRL's rollout_is, at its default bounds of the ratio
                "off_policy_correction": {
                    "sequence_mask_metric": "geometric",
                    "token_mask_is_threshold_low": 0.8,
                    "token_mask_is_threshold_high": 1.2,
                },
            },
        },
    }
    assert OmegaConf.merge(config, expected) == config


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("trainer.fully_async.max_staleness_steps=3", "trainer.schedule=sync "),
        (
            "trainer.fully_async.enabled=True trainer.fully_async.max_staleness_steps=3",
            "trainer.max_staleness_steps=3 ",
        ),
        ("trainer.algorithm.policy_loss_type=cispo", "trainer.algorithm.policy_loss_type=cispo_old"),
        (
            "trainer.algorithm.policy_loss_type=cispo trainer.algorithm.cispo.cispo_anchor=rollout",
            "policy_loss_type=cispo ",
        ),
        ("trainer.algorithm.use_tis=true", "trainer.algorithm.policy_loss_type=decoupled_ppo"),
        ("trainer.eval_interval=-1", "trainer.eval_at_end=false"),
        ("trainer.policy.optimizer_config.adam_betas=[0.8,0.9]", "training.adam_beta1=0.8"),
        (
            "trainer.policy.model.lora.rank=8 trainer.policy.model.lora.target_modules=q_proj",
            "target_modules=[q_proj]'",
        ),
        ("generator.backend=vllm trainer.placement.policy_num_nodes=3", "training.num_workers=3 "),
        ('generator.sampling_params.stop=\'["</a>", "a, b"]\'', """'generator.sampling.stop=["</a>","a, b"]'"""),
        (
            "trainer.run_name=r-$(date) trainer.ckpt_path=/c/$(date)",
            "#   trainer.ckpt_path=/c/$(date): $(date) is not run",
        ),
        ("trainer.seed=$1", "#   trainer.seed=$1: $1 is known only when the script runs"),
        (
            "trainer.algorithm.advantage_estimator=gae trainer.critic.model.path=/m trainer.critic.optimizer_config.lr=3e-6",
            "trainer.critic.model.path=/m  # a local directory; null: the policy\n  trainer.critic.optimizer_config.lr=3e-06\n",
        ),
        (
            "trainer.algorithm.advantage_estimator=gae trainer.algorithm.advantage_batch_normalize=false",
            "  trainer.algorithm.advantage_batch_normalize=true  # SkyRL's gae always normalises\n",
        ),
        (
            "trainer.algorithm.advantage_estimator=gae trainer.placement.critic_num_gpus_per_node=2 trainer.placement.critic_num_nodes=3",
            "  training.num_critic_workers=6  # trainer.placement.critic_num_gpus_per_node times critic_num_nodes\n",
        ),
        (
            "trainer.algorithm.advantage_estimator=gae trainer.placement.critic_num_gpus_per_node=2",
            "# Of its 3 keys 3 are set here, 0 need nothing",
        ),
        (
            "trainer.placement.colocate_all=true trainer.algorithm.advantage_estimator=gae",
            "  'placement.groups=[[policy,generate,critic]]'  # trainer.placement.colocate_all\n",
        ),
        ("trainer.critic.optimizer_config.max_grad_norm=0.5", "  trainer.critic.optimizer_config.max_grad_norm=0.5"),
        (
            "trainer.critic.model.lora.rank=8",
            "#   trainer.critic.model.lora.rank=8: all weights of the critic train, without",
        ),
        (
            "trainer.critic_mini_batch_size=64 trainer.critic.fsdp_config.cpu_offload=true",
            "# No counterpart:\n#   trainer.critic_mini_batch_size=64: the critic takes a step with each of the policy's\n"
            "#   trainer.critic.fsdp_config.cpu_offload=true: the critic trains as the policy does, see training.*\n",
        ),
        (
            "trainer.critic_mini_batch_size=64 trainer.policy_mini_batch_size=64 trainer.critic.fsdp_config.cpu_offload=false",
            "# Nothing to set:\n#   trainer.critic_mini_batch_size=64: the critic takes a step with each of the policy's\n"
            "#   trainer.critic.fsdp_config.cpu_offload=false: the critic trains as the policy does, see training.*\n",
        ),
        ("trainer.epoks=3", "#   trainer.epoks=3; did you mean trainer.epochs?"),
        ("trainer.cheese=3", "#   trainer.cheese=3: in neither SkyRL's keys nor ours"),
        (
            "trainer.strategy=megatron",
            "#   trainer.strategy=megatron: training.backend (fsdp for fsdp2; fsdp or deepspeed; no Megatron)",
        ),
        ("trainer.policy_mini_batch_size=many", "#   trainer.policy_mini_batch_size=many: "),
        ("trainer.update_epochs_per_batch=2", "trainer.update_epochs_per_batch=2"),
        (
            "trainer.max_training_steps=5 trainer.train_batch_size=512",
            "  trainer.num_steps=10  # trainer.max_training_steps times 2",
        ),
        ("trainer.ckpt_interval=3", "  trainer.checkpoint_interval_steps=12  # trainer.ckpt_interval times 4"),
        (
            "trainer.fully_async.enabled=true trainer.train_batch_size=256 trainer.update_epochs_per_batch=2 "
            "trainer.fully_async.max_staleness_steps=3",
            "  trainer.max_staleness_steps=7  # 3 batches of 2 optimizer steps",
        ),
        ("trainer.policy.model.path=/nowhere", "# What this machine says of it:"),
    ],
)
def test_a_key_of_a_script_is_set_or_explained(
    keys: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = command_for(tmp_path / "run.sh", f"{START} trainer.epochs=1 {keys}", capsys)
    assert expected in printed
    assert run_cli(never, [*arguments_of(printed), "--cfg", "job"]) == 0


@pytest.mark.parametrize(
    ("module", "schedule"),
    [
        ("-m examples.fully_async.main_fully_async", "fully_async"),
        ("-m examples.train.async.main_async", "one_step_off"),
        ("python /home/me/main_async.py", "one_step_off"),
        ("--directory /home/me/async-rl-book -m skyrl_train.entrypoints.main_base", "sync"),
        ("python /home/me/async-rl-book/main_base.py", "sync"),
    ],
)
def test_the_module_that_a_script_runs_says_which_trainer_it_is(
    module: str, schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = command_for(tmp_path / "run.sh", f"uv run {module} trainer.epochs=1", capsys)
    said = "SkyRL's trainer without" if schedule == "sync" else re.split("[ /]", module)[-1]
    assert f"  trainer.schedule={schedule}  # {said}" in printed
    assert run_cli(never, [*arguments_of(printed), "--cfg", "job"]) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "cannot be read: No such file or directory; give a launch script of SkyRL's"),
        ("echo trainer.epochs=1\n", "holds no command that runs a Python module with key=value arguments; give "),
        (f"{START} trainer.epochs=1\n{START} trainer.epochs=2\n", "starts training 2 times (lines 1, 2)"),
        (
            "python -m verl.trainer.main_ppo trainer.total_epochs=1",
            "is a script of verl's, whose keys are in docs/coming",
        ),
    ],
)
def test_a_script_that_cannot_be_translated_is_refused(
    text: str | None, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "run.sh"
    if text is not None:
        script.write_text(text)
    assert run_cli(never, ["--from-skyrl", str(script)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and f"error: --from-skyrl {script} {expected}" in captured.err
    assert run_cli(never, ["--from-skyrl", str(script), "trainer.seed=1"]) == 2
    assert "takes a script alone, got 'trainer.seed=1' too" in capsys.readouterr().err


def test_a_script_is_read_as_bash_reads_it() -> None:
    script = r"""
A="x y" B='$A' C=$A; D=${A}z; E="${NONE:-d $A}"; F=${NONE:="set"}; unused() { echo $1; }
N=6 M=$(( (N + 1) * -7 / 2 % 5 + 2 ** 3 )); LIST=(one "two words" $A # comment
  three); N=7 true $N; N=8 M=9 show2; P=1 && export Q=2 && Q=${Q}3; ((N > 9)); source bin/activate
LIST+=(four); function named { G=0; }; K={a,b}; G=${SET+yes}${NONE2+no}; export H=~/dir I=a\ b; J=j; J+=k
cat <<EOF > /dev/null
not a command  key.a=$A "
EOF
show \
  -m key.a=$A key.b="$A" 'key.c=$A' key.d=$B key.e="$D" "$E" $F$NONE \
  n=$N p=$P$Q m=$M "${LIST[@]}" pre"${LIST[@]}"post $G "$H" $I "$J" $K $'l m' ${#} \$A "\$A\"" "a\
b" 'it'"'"s "$(( N ))" "${ENVIRONMENT}" "" end 2>&1 | cat # key.z=1
"""
    stub = "show() { printf '%s\\0' \"$@\"; }; show2() { :; }; source() { :; }\n"
    environment = {"HOME": "/home/me", "SET": "1", "ENVIRONMENT": "from outside"}
    done = subprocess.run(["bash", "-c", stub + script], capture_output=True, text=True, check=True, env=environment)
    (command,) = [each for each in commands_of(script, environment) if each.words[0].text == "show"]
    words = command.words[1:]
    assert [word.text for word in words if word.text != "$#"] == [w for w in done.stdout.split("\0")[:-1] if w != "0"]
    assert [word.text for word in words if word.unknown] == ["$#"]
    assert command.line == 9


@pytest.mark.parametrize(
    ("script", "text", "reason"),
    [
        ("show $X", "$X", "X is set neither in the script nor in the environment"),
        ("show a-`date`", "a-`date`", "`date` is not run"),
        ("if true; then X=1; fi; show $X", "1", "X is set in a branch, a loop or a function (line 1)"),
        ("X=8\ntest $A &&\n X=2\nshow $X", "2", "X is set in a branch, a loop or a function (line 3)"),
        ("X=8; [ $A ] || export X=2; show $X", "2", "X is set in a branch, a loop or a function (line 1)"),
        ("X=8; ( X=2 ); show $X", "2", "X is set in a subshell (line 1)"),
        ("X=8\nunset X\nshow $X", "$X", "X may be changed by unset (line 2)"),
        ("X=8; read -r X <<< 7; show $X", "$X", "X may be changed by read (line 1)"),
        ("X=8; printf -v X 9; show $X", "$X", "X may be changed by printf (line 1)"),
        ("X=8; let X=X+1; show $X", "$X", "X may be changed by let (line 1)"),
        ("X=8; ((X++)); show $X", "$X", "X may be changed by ((...)) (line 1)"),
        ("X=8; . ./env.sh; show $X", "$X", "X may be changed by . (line 1)"),
        ("for X in a b; do show $X; done", "$X", "X is the variable of a loop"),
        ("X=a.b; show ${X%.b}", "${X%.b}", "${X%.b} is known only when the script runs"),
        ("show $(( 1 / 0 ))", "$(( 1 / 0 ))", "$(( 1 / 0 )) is known only when the script runs"),
        ("show $(( 9**9**9 ))", "$(( 9**9**9 ))", "$(( 9**9**9 )) is known only when the script runs"),
        ("show ${X:?must}", "${X:?must}", "X must be set in the environment"),
        (r"show $'a\n'", r"$'a\n'", r"$'a\n' is not decoded"),
        ("show a={1,2}", "a={1,2}", "a={1,2} is not expanded"),
        ("function f { X=1; }; show $X", "1", "X is set in a branch, a loop or a function (line 1)"),
        ('show "unclosed $(oops', "unclosed $(oops", "$(oops is not run"),
    ],
)
def test_what_only_a_run_would_tell_is_said(script: str, text: str, reason: str) -> None:
    (command,) = [each for each in commands_of(script, {}) if each.words[0].text == "show"]
    assert (command.words[1].text, command.words[1].unknown) == (text, (reason,))


@pytest.mark.parametrize("value", ['a"b\\', "${x}", "1e3", "null", "a,b=c d", "it's", "", "~/x", "#", "[", 'x\\\\"y'])
def test_any_text_survives_the_printed_command(value: str) -> None:
    overrides = [f"policy.path={override_text(value)}", f"generator.sampling.stop={override_text([value, 'z'])}"]
    config = OmegaConf.to_object(compose_config(overrides))
    assert isinstance(config, Config)
    assert (config.policy.path, config.generator.sampling.stop) == (value, [value, "z"])


def test_the_page_about_other_systems_is_up_to_date() -> None:
    page = (ROOT / "docs/coming_from.md").read_text()
    assert page == coming_from_page(page), "run: make reference"
