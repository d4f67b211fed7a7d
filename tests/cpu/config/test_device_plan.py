"""Which stages share which devices: what the placement section resolves to, and what of it is refused."""

from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from skyrl_async.config.help import all_keys
from skyrl_async.config.load import compose_config, from_overrides, load, to_yaml
from skyrl_async.config.rules.device_plan import STAGES, DevicePlan, StageSize, Unit, resolve
from skyrl_async.config.rules.devices import num_gpus
from skyrl_async.config.rules.placement import device_plan
from skyrl_async.config.schema.run import PlacementConfig
from skyrl_async.errors import ConfigError
from tests.cpu.quick_config import config_of

SEPARATE = "placement.groups=[[policy,logp],[ref],[generate]]"


def plan(
    placement: PlacementConfig,
    *,
    num_workers: int,
    num_engines: int,
    tensor_parallel_size: int = 1,
    unit: Unit = Unit.gpu,
    num_available: int = 8,
) -> DevicePlan:
    sizes = {
        "policy": StageSize(num_actors=num_workers, num_key="training.num_workers"),
        "generate": StageSize(
            num_actors=num_engines,
            num_key="engine.num_engines",
            devices_per_actor=tensor_parallel_size,
            per_actor_key="engine.tensor_parallel_size",
        ),
    }
    return resolve(placement, sizes=sizes, needed={"policy", "generate"}, unit=unit, num_available=num_available)


def separate(**numbers: list[float] | list[int]) -> PlacementConfig:
    return PlacementConfig(groups=[["policy", "logp"], ["ref"], ["generate"]], **numbers)


def test_the_groups_of_the_command_line_reach_the_plan_and_the_config_file(tmp_path: Path) -> None:
    config = from_overrides(
        SEPARATE,
        "placement.devices=[4,2,2]",
        "placement.num_cpu_slots=8",
        "training.num_workers=2",
        "training.device=cpu",
        "engine=deterministic",
    )
    found = device_plan(config, 8)
    assert found is not None
    assert found.table().splitlines()[-1] == "  [generate]     2"
    assert [group.stages for group in found.groups] == [("policy", "logp"), ("ref",), ("generate",)]
    assert [group.num_devices for group in found.groups] == [4, 2, 2]
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load(compose_config([], tmp_path / "config.yaml")) == config


def test_a_critic_is_placed_and_never_with_the_engines_alone() -> None:
    gae = ("engine=deterministic", "trainer.algorithm.advantage_estimator=gae", "placement.num_cpu_slots=4")
    groups = "placement.groups=[[policy,critic],[generate]]"
    found = device_plan(from_overrides(*gae, groups, "placement.devices=[2,2]", "training.num_critic_workers=2"), 4)
    assert found is not None
    assert (
        found.table().splitlines()[1]
        == "  [policy,critic]  2  policy: training.num_workers=1; critic: training.num_critic_workers=2"
    )
    with pytest.raises(ConfigError, match="must place critic, which this run needs, got .*: add .critic., or name it"):
        from_overrides(*gae, "placement.groups=[[policy],[generate]]", "placement.devices=[2,2]")
    with pytest.raises(ConfigError, match="must put critic beside policy, .* got .*'critic', 'generate'"):
        from_overrides(*gae, "placement.groups=[[policy],[critic,generate]]", "placement.devices=[2,2]")


def test_without_groups_there_is_no_plan() -> None:
    assert device_plan(from_overrides(), 8) is None


@pytest.mark.parametrize(
    ("ratios", "num_available", "expected"),
    [
        ([0.5, 0.25, 0.25], 8, [4, 2, 2]),
        ([0.5, 0.25, 0.25], 64, [32, 16, 16]),
        ([0.333333, 0.333333, 0.333334], 6, [2, 2, 2]),
        ([0.5, 0.25, 0.25], 6, [3, 2, 1]),
    ],
)
def test_ratios_become_whole_devices(ratios: list[float], num_available: int, expected: list[int]) -> None:
    found = plan(separate(ratios=ratios), num_workers=expected[0], num_engines=expected[2], num_available=num_available)
    assert [group.num_devices for group in found.groups] == expected


@given(
    parts=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    num_available=st.integers(4, 1024),
)
def test_ratios_hand_out_every_device_and_miss_none_by_more_than_one(parts: list[int], num_available: int) -> None:
    stages = [["generate"], ["policy"], ["ref"], ["logp"]][: len(parts)]
    ratios = [part / sum(parts) for part in parts]
    # A share of more than a device is at least one when rounded down; below that it depends on the others.
    assume(min(ratios) * num_available >= 1)
    placement = PlacementConfig(groups=stages, ratios=ratios)
    found = resolve(placement, sizes={}, needed=(), unit=Unit.cpu_slot, num_available=num_available)
    numbers = [group.num_devices for group in found.groups]
    assert sum(numbers) == num_available
    assert all(abs(n - ratio * num_available) < 1.001 for n, ratio in zip(numbers, ratios, strict=True))


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({"ratios": [1.0]}, "placement.ratios must be null without placement.groups"),
        ({"groups": [], "ratios": []}, "placement.groups must be lists of one stage or more"),
        ({"groups": [["policy"], []], "devices": [1, 1]}, r"lists of one stage or more, got '\[\[policy\],\[\]\]'"),
        ({"groups": [["actor-train"], ["generate"]], "devices": [1, 1]}, "got 'actor-train'; did you mean policy?"),
        ({"groups": [["policy"], ["generat"]], "devices": [1, 1]}, "got 'generat'; did you mean generate?"),
        (
            {"groups": [["policy", "logp"], ["logp", "generate"]], "devices": [1, 1]},
            r"must name each stage once, got logp in \[policy,logp\] and \[logp,generate\]",
        ),
        ({"groups": [["policy", "policy"], ["generate"]], "devices": [1, 1]}, "must name each stage once, got policy"),
        (
            {"groups": [["policy", "logp"]], "devices": [1]},
            r"must place generate, which this run needs, got \[\[policy,logp\]\]: add \[generate\]",
        ),
        ({"groups": [["policy"], ["generate"]]}, "placement.ratios or placement.devices must be set .* got neither"),
        (
            {"groups": [["policy"], ["generate"]], "ratios": [0.5, 0.5], "devices": [1, 1]},
            "placement.ratios or placement.devices must be set .* got both",
        ),
        (
            {"groups": [["policy"], ["generate"]], "ratios": [1.0]},
            r"placement.ratios must have one entry for each of the 2 groups of placement.groups, got \[1\]",
        ),
        (
            {"groups": [["policy"], ["generate"]], "devices": [4, 2, 2]},
            r"placement.devices must have one entry for each of the 2 groups .* got \[4,2,2\]",
        ),
        (
            {"groups": [["policy"], ["generate"]], "ratios": [0.5, 0.4]},
            r"placement.ratios must sum to 1, got \[0.5,0.4\], which sum to 0.9",
        ),
        ({"groups": [["policy"], ["generate"]], "ratios": [1.5, -0.5]}, "placement.ratios must be > 0 each"),
        ({"groups": [["policy"], ["generate"]], "ratios": [float("nan"), 0.5]}, "placement.ratios must be > 0 each"),
        ({"groups": [["policy"], ["generate"]], "devices": [4, 0]}, "placement.devices must be > 0 each"),
        (
            {"groups": [["policy"], ["generate"]], "devices": [8, 1]},
            r"must sum to at most the 8 GPUs of the cluster, got \[8,1\], which sum to 9: give groups less$",
        ),
        (
            {"groups": [["policy"], ["generate"]], "ratios": [0.95, 0.05]},
            r"must leave each group a device, got \[0.95,0.05\] of 8 GPUs, which is none for \[generate\]: have groups share",
        ),
    ],
)
def test_a_section_that_cannot_be_is_refused_with_what_to_change(placement: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        plan(PlacementConfig(**placement), num_workers=1, num_engines=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("devices", "sizes", "unit", "expected"),
    [
        (
            [4, 2, 2],
            (2, 2, 1),
            Unit.gpu,
            r"training.num_workers must be 4 for the 4 GPUs of \[policy,logp\], 1 GPU each, got 2",
        ),
        (
            [4, 2, 2],
            (4, 1, 1),
            Unit.gpu,
            "engine.num_engines must be 2 for the 2 GPUs .* got 1: set engine.num_engines=2, or give",
        ),
        ([4, 2, 2], (4, 2, 2), Unit.gpu, "engine.num_engines must be 1 for the 2 GPUs .*, 2 GPUs each, got 2"),
        (
            [4, 1, 3],
            (4, 1, 2),
            Unit.gpu,
            "engine.tensor_parallel_size must divide the 3 GPUs .* got 2: .*give the group 2",
        ),
        (
            [4, 2, 2],
            (3, 1, 1),
            Unit.cpu_slot,
            r"training.num_workers must divide the 4 CPU slots of \[policy,logp\], got 3",
        ),
        (
            [4, 2, 2],
            (1, 3, 1),
            Unit.cpu_slot,
            "engine.num_engines must divide the 2 CPU slots .* set engine.num_engines=1",
        ),
    ],
)
def test_parallel_sizes_have_to_divide_the_devices(
    devices: list[int], sizes: tuple[int, int, int], unit: Unit, expected: str
) -> None:
    num_workers, num_engines, tensor_parallel_size = sizes
    with pytest.raises(ConfigError, match=expected):
        plan(
            separate(devices=devices),
            num_workers=num_workers,
            num_engines=num_engines,
            tensor_parallel_size=tensor_parallel_size,
            unit=unit,
        )


def test_engines_that_span_gpus_do_not_share_them() -> None:
    shared = PlacementConfig(groups=[["policy", "generate"]], devices=[8])
    with pytest.raises(
        ConfigError, match="engine.tensor_parallel_size must be 1 where generate shares its GPUs with policy"
    ):
        plan(shared, num_workers=8, num_engines=4, tensor_parallel_size=2)


def test_each_actor_of_separate_groups_has_its_devices_for_itself() -> None:
    found = plan(separate(devices=[4, 1, 3]), num_workers=4, num_engines=1, tensor_parallel_size=3)
    policy, ref, generate = found.groups
    assert [(group.num_bundles, group.bundle_size) for group in found.groups] == [(4, 1), (1, 1), (1, 3)]
    assert [policy.bundle_of_actor("policy", rank) for rank in range(4)] == [0, 1, 2, 3]
    assert (policy.reservation("policy"), generate.reservation("generate")) == (1.0, 3.0)
    assert ref.sizes == {}


def test_actors_that_share_a_gpu_reserve_a_part_each_in_one_bundle_per_gpu() -> None:
    shared = PlacementConfig(groups=[["policy", "logp", "ref", "generate"]], ratios=[1.0])
    group = plan(shared, num_workers=8, num_engines=8).group_of("generate")
    assert (group.num_bundles, group.bundle_size) == (8, 1)
    assert group.reservation("policy") == group.reservation("generate") == 0.5
    assert [group.bundle_of_actor("generate", i) for i in range(8)] == list(range(8))


@given(
    actors=st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 12])] * 3),
    multiple=st.integers(1, 3),
)
def test_whatever_shares_cpu_slots_fits_into_its_bundles(actors: tuple[int, ...], multiple: int) -> None:
    stages = ["policy", "ref", "generate"]
    found = resolve(
        PlacementConfig(groups=[stages], devices=[12 * multiple]),
        sizes={s: StageSize(num_actors=n, num_key="n") for s, n in zip(stages, actors, strict=True)},
        needed=stages,
        unit=Unit.cpu_slot,
        num_available=100,
    )
    (group,) = found.groups
    assert group.num_bundles * group.bundle_size == 12 * multiple
    reserved = [0.0] * group.num_bundles
    for stage, num_actors in zip(stages, actors, strict=True):
        for index in range(num_actors):
            reserved[group.bundle_of_actor(stage, index)] += group.reservation(stage)
    assert all(group.bundle_size - 0.01 < part <= group.bundle_size for part in reserved)


def test_the_table_says_what_has_how_many_devices_and_what_is_reserved_for_nothing() -> None:
    found = plan(separate(devices=[4, 1, 2]), num_workers=4, num_engines=2)
    assert found.table().splitlines() == [
        "placement: 7 of 8 GPUs",
        "  [policy,logp]  4  policy: training.num_workers=4; logp: not used by this run",
        "  [ref]          1  ref: not used by this run",
        "  [generate]     2  generate: engine.num_engines=2, engine.tensor_parallel_size=1",
    ]
    assert found.unused == {"logp", "ref"} and found.group_of("logp") is found.groups[0]


@pytest.mark.parametrize(
    ("groups", "asked", "expected"),
    [
        (
            "[[policy,logp],[ref],[generate]]",
            "policy_loss_type=decoupled_ppo",
            ["policy: training.num_workers=1; logp: on the policy's workers", "ref: not used by this run"],
        ),
        (
            "[[policy,ref],[logp],[generate]]",
            "use_kl_loss=true",
            ["policy: training.num_workers=1; ref: on the policy's workers", "logp: not used by this run"],
        ),
    ],
)
def test_the_table_says_what_the_policy_s_workers_compute(groups: str, asked: str, expected: list[str]) -> None:
    words = [f"placement.groups={groups}", "placement.devices=[1,1,1]", "placement.num_cpu_slots=3"]
    found = device_plan(
        from_overrides(*words, f"trainer.algorithm.{asked}", "training.device=cpu", "engine.device=cpu"), 3
    )
    assert found is not None
    assert [line.split("  1  ")[1] for line in found.table().splitlines()[1:3]] == expected


@pytest.mark.skipif(num_gpus() > 0, reason="about machines without a GPU")
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [SEPARATE, "placement.devices=[4,2,2]", "placement.num_cpu_slots=7"],
            r"sum to at most the 7 CPU slots.* or raise pl",
        ),
        (
            [SEPARATE, "placement.ratios=[0.5,0.25,0.25]", "placement.num_cpu_slots=2"],
            r"of 2 CPU slots, which is none for \[generate\]: have groups share devices, or raise placement.num_cpu_slots",
        ),
        (
            [SEPARATE, "placement.devices=[1,1,1]", "placement.num_cpu_slots=0"],
            "placement.num_cpu_slots must be >= 1 or null",
        ),
        (
            ["placement.num_cpu_slots=4", "placement.ray_address=auto"],
            "placement.num_cpu_slots must be null with .*=auto",
        ),
        (
            [SEPARATE, "placement.devices=[1,1,1]", "placement.ray_address=auto", "placement.num_cpus_per_engine=1"],
            "placement.num_cpus_per_engine must be left out with placement.groups, .* got 1",
        ),
        (
            [SEPARATE, "placement.devices=[1,1,1]", "placement.ray_address=auto", "engine.device=cuda"],
            "engine.device and training.device must be the same with placement.groups.* got cuda and cpu",
        ),
        (
            [SEPARATE, "placement.devices=[3,1,1]", "placement.ray_address=auto", "training.num_workers=2"],
            "training.num_workers must divide the 3 CPU slots",
        ),
        (["placement.groups=[policy,generate]"], "placement.groups must be list of list of text or null, got"),
        (
            ["placement.groups=[[policy],[generate]]", "placement.devices=[a,b]"],
            "placement.devices must be list of integer",
        ),
    ],
)
def test_what_does_not_go_with_the_rest_is_refused_before_anything_starts(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        from_overrides(*overrides)


def test_a_cluster_elsewhere_has_what_ratios_ask_for_or_says_so_when_it_is_joined() -> None:
    config = from_overrides(SEPARATE, "placement.ratios=[0.5,0.25,0.25]", "placement.ray_address=auto")
    with pytest.raises(ConfigError, match="must leave each group a device"):
        device_plan(config, 1)


def test_the_stages_that_can_be_placed_are_documented() -> None:
    assert all(f"{stage} (" in all_keys()["placement.groups"].text for stage in STAGES)


def test_log_probs_with_workers_of_their_own_need_a_place_for_them() -> None:
    words = ["placement.groups=[[policy],[generate]]", "placement.devices=[1,1]", "placement.num_cpu_slots=3"]
    own = ["trainer.algorithm.use_kl_loss=true", "training.num_ref_workers=1"]
    with pytest.raises(ConfigError, match=r"placement.groups .*ref"):
        from_overrides(*words, *own)
    words = ["placement.groups=[[policy],[ref],[generate]]", "placement.devices=[1,1,1]", "placement.num_cpu_slots=3"]
    config = from_overrides(*words, *own)
    plan = device_plan(config, 3)
    assert plan is not None and "training.num_ref_workers=1" in plan.table()


def test_devices_of_their_own_without_workers_are_refused() -> None:
    words = ["placement.groups=[[policy],[ref],[generate]]", "placement.devices=[1,1,1]", "placement.num_cpu_slots=3"]
    with pytest.raises(
        ConfigError, match="training.num_ref_workers must be >= 1 when placement.groups gives ref devices"
    ):
        from_overrides(*words, "trainer.algorithm.use_kl_loss=true")


@pytest.mark.parametrize("num_slots", [2, 3, 4])
def test_the_devices_that_a_refused_group_is_advised_to_have_suit_all_its_stages(num_slots: int) -> None:
    sharing = ("placement.groups=[[policy,ref],[generate]]", "training.num_workers=3", "training.num_ref_workers=2")
    others = ("placement.num_cpu_slots=8", "engine.num_engines=2", "trainer.algorithm.use_kl_loss=true")

    def place(devices: int) -> None:
        config_of(*sharing, *others, f"placement.devices=[{devices},2]")

    with pytest.raises(ConfigError, match=r"must divide .*, or give the group 6 with placement.devices"):
        place(num_slots)
    place(6)


def test_no_number_of_gpus_is_advised_where_none_suits_all_stages() -> None:
    shared = PlacementConfig(groups=[["policy", "generate"]], devices=[2])
    with pytest.raises(ConfigError, match=r"training.num_workers must be 2 .* got 3: set training.num_workers=2$"):
        plan(shared, num_workers=3, num_engines=2)
