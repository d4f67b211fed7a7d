"""Settings that nothing would read are named, with what would have them read."""

import pytest

from skyrl_async.config.load import from_overrides
from skyrl_async.config.rules.notices import idle_settings
from tests.cpu.quick_config import config_of

HARBOR = [
    "task.name=harbor",
    "task.harbor.path=tasks",
    "generator.kind=agent",
    "generator.harness=terminus-2",
    "policy.path=DIR",
]
LOSS = "trainer.algorithm.policy_loss_type"


@pytest.mark.parametrize(
    ("is_read", "others"),
    [
        ("trainer.algorithm.kl_loss_coef=0.1", ["trainer.algorithm.use_kl_loss=true"]),
        ("trainer.algorithm.kl_estimator_type=k1", ["trainer.algorithm.use_kl_in_reward=true"]),
        ("trainer.algorithm.ref_logp=inline", ["trainer.algorithm.use_kl_loss=true"]),
        (
            "trainer.algorithm.kl_ctrl.kl_target=0.2",
            ["trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.kl_ctrl.type=adaptive"],
        ),
        ("trainer.algorithm.entropy_loss_coef=0.1", ["trainer.algorithm.use_entropy_loss=true"]),
        (
            "trainer.algorithm.overlong_buffer_penalty_factor=2.0",
            ["trainer.algorithm.overlong_buffer_len=8", "generator.max_turns=1"],
        ),
        ("trainer.algorithm.zero_variance_filter_tol=0.1", ["trainer.fully_async.sample_full_batch=true"]),
        ("trainer.fully_async.max_filtered_in_a_row=9", ["trainer.fully_async.sample_full_batch=true"]),
        ("trainer.algorithm.tis_cap=3.0", [f"{LOSS}=decoupled_ppo"]),
        ("trainer.algorithm.clip_ratio_c=4.0", [f"{LOSS}=dual_clip"]),
        ("trainer.algorithm.cispo.cispo_eps_clip_high=3.0", [f"{LOSS}=cispo"]),
        ("trainer.algorithm.dppo.delta_low=0.1", [f"{LOSS}=dppo"]),
        ("trainer.algorithm.sapo.tau_neg=2.0", [f"{LOSS}=sapo"]),
        ("policy.warm_start.terse_share=0.5", []),
        ("policy.lora.alpha=64.0", ["policy.lora.rank=8"]),
        ("policy.lora.target_modules=[q_proj]", ["policy.lora.rank=8"]),
        ("engine.extra_args={swap_space: 1}", ["engine.backend=vllm"]),
        ("generator.agent_timeout_s=20.0", ["generator.kind=agent", "generator.command=true"]),
        ("server.model_name=other", ["server.enabled=true"]),
        ("engine.max_engines=4", ["engine.autoscale=plan"]),
        ("engine.autoscale_interval_s=9.0", ["engine.autoscale=plan"]),
        ("placement.min_generation_slice_s=9.0", ["placement.groups=[[policy,generate]]", "placement.devices=[1]"]),
        ("task.harbor.path=tasks", HARBOR),
        ("generator.harbor.environment=docker", HARBOR),
        ("task.num_eval_prompts=4", ["task.name=relay"]),
        ("trainer.critic.optimizer_config.lr=1e-5", ["trainer.algorithm.advantage_estimator=gae"]),
        ("training.num_teacher_workers=2", ["trainer.algorithm.distillation.teachers={t: /x}"]),
        ("trainer.algorithm.distillation.divergence=forward_kl", ["trainer.algorithm.distillation.teachers={t: /x}"]),
    ],
)
def test_a_setting_that_nothing_reads_is_named_with_what_would(is_read: str, others: list[str]) -> None:
    key = is_read.partition("=")[0]
    assert idle_settings(config_of(is_read, *others)) == []
    elsewhere = {
        "engine.extra_args": ["engine.backend=deterministic", "engine.device=cpu"],
        "policy.warm_start.terse_share": ["policy.warm_start.enabled=false"],
    }
    if key != "task.num_eval_prompts":
        (idle,) = idle_settings(config_of(is_read, *elsewhere.get(key, [])))
        assert idle.startswith(f"{key}=") and " does nothing without " in idle


def test_settings_of_rewards_are_said_to_do_nothing_beside_teachers_alone() -> None:
    alone, name = "trainer.algorithm.distillation.teachers={t: /x}", "trainer.algorithm.advantage_estimator"
    of_turns, of_critic = ["trainer.algorithm.turn_discount=0.5"], ["trainer.critic.warmup_steps=3"]
    for read, estimator in ((of_turns, f"{name}=turn_rloo"), (of_critic, f"{name}=gae")):
        expected = [f"{key} does nothing without trainer.algorithm.distillation.use_rewards=true" for key in read]
        found = idle_settings(config_of(alone, estimator, *read))
        beside = idle_settings(config_of(alone, estimator, *read, "trainer.algorithm.distillation.use_rewards=true"))
        assert sorted(found) == sorted([*expected, expected[0].replace(read[0], estimator)]) and beside == []


def test_settings_of_the_policy_loss_are_said_to_do_nothing_where_a_divergence_from_teachers_takes_its_place() -> None:
    top = ("trainer.algorithm.distillation.teachers={t: /x}", "trainer.algorithm.distillation.top_k=8")
    correction = "trainer.algorithm.off_policy_correction"
    for settings in (
        [f"{LOSS}=rollout_is", f"{correction}.tis_ratio_type=token"],
        ["trainer.algorithm.eps_clip_low=0.1", f"{correction}.sequence_mask_metric=geometric"],
        ["trainer.algorithm.kl_cov.ppo_kl_coef=2.0", f"{correction}.opsm_delta=0.1"],
    ):
        without = "does nothing without trainer.algorithm.distillation.use_rewards=true or top_k=null"
        assert idle_settings(config_of(*top, *settings)) == [f"{setting} {without}" for setting in settings]
        beside = idle_settings(config_of(*top, "trainer.algorithm.distillation.use_rewards=true", *settings))
        assert without not in " ".join([*beside, *idle_settings(config_of(top[0], *settings))])


def test_settings_of_a_local_teacher_and_of_v_trace_are_said_to_do_nothing_without_one_and_without_staleness() -> None:
    gae, at_zero = "trainer.algorithm.advantage_estimator=gae", "trainer.max_staleness_steps=0"
    served = "trainer.algorithm.distillation.teachers={t: 'http://host:8000/v1'}"
    (idle,) = idle_settings(config_of("training.num_teacher_workers=2", served))
    assert idle.endswith("=2 does nothing without a directory in trainer.algorithm.distillation.teachers")
    clipped = "trainer.algorithm.distillation.ratio_clip=5.0"
    _, idle = idle_settings(config_of(clipped, "trainer.algorithm.distillation.divergence=forward_kl"))
    assert idle == f"{clipped} does nothing without teachers, divergence=forward_kl and top_k=null"
    for clip in ("2.0", "null"):
        (idle,) = idle_settings(config_of(f"trainer.algorithm.vtrace_clip={clip}", gae, at_zero))
        assert idle == f"trainer.algorithm.vtrace_clip={clip} does nothing without trainer.max_staleness_steps >= 1"
    assert idle_settings(config_of("trainer.algorithm.vtrace_clip=2.0", gae)) == []
    (idle,) = idle_settings(config_of("trainer.algorithm.distillation.api_key=secret"))
    assert idle == "trainer.algorithm.distillation.api_key=... does nothing without teachers"


def test_what_a_setting_does_nothing_without_is_said_in_full() -> None:
    assert idle_settings(from_overrides()) == idle_settings(from_overrides("engine=deterministic")) == []
    (idle,) = idle_settings(from_overrides("trainer.algorithm.kl_loss_coef=0.1"))
    assert idle == (
        "trainer.algorithm.kl_loss_coef=0.1 does nothing without trainer.algorithm.use_kl_loss=true or use_kl_in_reward=true"
    )
    (idle,) = idle_settings(from_overrides("training.cpu_offload=true", "training.device=cpu"))
    assert idle == "training.cpu_offload=true does nothing without policy workers on GPUs (training.device)"
    (idle,) = idle_settings(config_of("trainer.eval_interval_steps=5", "evaluation.num_prompts_while_training=0"))
    assert idle == "trainer.eval_interval_steps=5 does nothing without evaluation.num_prompts_while_training >= 1"
    idle_files = idle_settings(config_of("task.train_files=[train.jsonl]", "task.env_class=gsm8k"))
    assert idle_files == [
        "task.train_files=['train.jsonl'] does nothing without task=dataset",
        "task.env_class=gsm8k does nothing without task=dataset",
    ]
    (idle,) = idle_settings(
        config_of("generator.kind=agent", "generator.command=true", "generator.max_trajectory_tokens=9")
    )
    assert idle == (
        "generator.max_trajectory_tokens=9 does nothing without generator=gym or gym_http; see server.session_max_tokens"
    )
    stopped = ("generator.sampling.stop=[a]", "evaluation.sampling.stop=[b]")
    assert idle_settings(config_of("generator.kind=agent", "generator.command=true", *stopped)) == [
        f"{section}.sampling.stop=['{stop}'] does nothing without generator=gym or gym_http; an agent sends stop strings of its own"
        for section, stop in (("generator", "a"), ("evaluation", "b"))
    ]
    assert idle_settings(config_of("generator.kind=agent", "generator.entrypoint=a:b", *stopped)) == []
    bound = "trainer.algorithm.eps_clip_high=0.3"
    (idle,) = idle_settings(config_of(bound, f"{LOSS}=cispo"))
    assert idle.endswith(
        "does nothing without policy_loss_type=ppo_clip or regular or clip_higher or dual_clip or decoupled_ppo or gspo or clip_cov"
    )
    assert idle_settings(config_of(bound, f"{LOSS}=tests.cpu.own_algorithms:half_importance")) == []
    assert idle_settings(config_of(f"{LOSS}=decoupled_ppo")) == []
    (idle,) = idle_settings(from_overrides(f"{LOSS}=decoupled_ppo", "trainer.max_staleness_steps=0"))
    assert "never clips with trainer.max_staleness_steps=0" in idle
