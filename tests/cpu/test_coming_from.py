"""Keys of other trainers: what an error says of them."""

from collections import Counter

import pytest
from omegaconf import OmegaConf

from skyrl_async.config.coming_from import SYSTEMS, foreign_keys, yaml_value
from skyrl_async.config.help import all_keys
from skyrl_async.config.key_hints import hint_for
from skyrl_async.config.load import run_cli
from skyrl_async.config.schema import Config


def never(config: Config, overrides: list[str]) -> int:
    pytest.fail(f"started with {overrides}")


@pytest.mark.parametrize("system", [system.name for system in SYSTEMS])
def test_every_answer_names_keys_that_exist_and_values_that_they_take(system: str) -> None:
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
                OmegaConf.update(OmegaConf.structured(Config), key, ([parsed] if parsed else []) if is_list else parsed)
        assert all(key in all_keys() or key.startswith("engine.extra_args.") for key in row.ours), name


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_no_key_of_another_system_is_in_its_table_twice(system: object) -> None:
    table = next(each.table for each in SYSTEMS if each is system)
    rows = table.strip().replace("\n ", " ").splitlines()
    names = Counter(name.strip() for row in rows for name in row.partition("|")[0].split(","))
    assert names.most_common(1)[0][1] == 1
    assert list(names) == list(foreign_keys(next(each.name for each in SYSTEMS if each is system)))


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("trainer.epochs", "; SkyRL's, here trainer.num_epochs (with trainer.num_steps=null)"),
        ("use_tis", "; SkyRL's, here trainer.algorithm.off_policy_correction.tis_ratio_type (token for true, "),
        ("trainer.use_tis", "; SkyRL's, here trainer.algorithm.off_policy_correction.tis_ratio_type (token for true, "),
        ("gamma", "; SkyRL's and verl's, without a counterpart: there is no critic"),
        ("trainer.algorithm.gamma", "; SkyRL's, without a counterpart: there is no critic"),
        ("trainer.project_name", "; SkyRL's and verl's, here logging.wandb_project"),
        ("trainer.logger", "; SkyRL's, here logging.wandb=true for wandb, "),
        ("trainer.critic.optimizer_config.lr", "; SkyRL's, without a counterpart: there is no critic"),
        ("generator.num_inference_engines", "; SkyRL's, here engine.num_engines"),
        ("generator.engine_init_kwargs.swap_space", "; SkyRL's, here engine.extra_args.swap_space"),
        ("actor_rollout_ref.actor.clip_ratio_high", "; verl's, here trainer.algorithm.eps_clip_high"),
        ("rollout.max_head_offpolicyness", "; AReaL's, here trainer.max_staleness_steps"),
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
