"""A checked configuration without the grammar of the command line: for tables of rules."""

from contextlib import suppress
from functools import cache

from omegaconf import DictConfig, OmegaConf

from skyrl_async.config.rules.all import check
from skyrl_async.config.schema.fields import check_bounds
from skyrl_async.config.schema.groups import GROUPS
from skyrl_async.config.schema.run import Config
from skyrl_async.errors import PolicyError


@cache
def _schema() -> DictConfig:
    tree = OmegaConf.merge(OmegaConf.structured(Config), GROUPS["policy"]["tiny"].values)
    assert isinstance(tree, DictConfig)
    return tree


def config_of(*overrides: str) -> Config:
    """As ``from_overrides``, of keys that exist and values that have their type. Raises ``ConfigError``; any path is a model's."""
    config = OmegaConf.to_object(OmegaConf.merge(_schema(), OmegaConf.from_dotlist(list(overrides))))
    assert isinstance(config, Config)
    check_bounds(config)
    with suppress(PolicyError):
        check(config)
    return config
