"""docs/coming_from.md: the keys of other systems beside ours. ``python -m skyrl_async.config.coming_from_page`` prints it."""

import sys
from collections.abc import Iterator
from itertools import groupby

from skyrl_async.config.coming_from import Foreign, foreign_keys, sources, yaml_value
from skyrl_async.config.help import all_keys

_BEGIN = """# Coming from SkyRL, verl or AReaL

Keys and commands of three other trainers beside ours. An error about an unknown key gives the same answers.
Written by `python -m skyrl_async.config.coming_from_page > docs/coming_from.md`, from these versions:

"""
_MIDDLE = """
## A launch script of SkyRL's

`--from-skyrl` reads a script, runs nothing of it, and prints our command:

```bash
uv run -m skyrl_async.main --from-skyrl SCRIPT
```

Variables of the script and of the environment are filled in. SkyRL's defaults are set where ours differ. Comments name the keys that
need no setting, those without a counterpart, and values that only a run of the script would tell, such as `$(date)`. The last comment says
what this machine lacks. Saved as a file, `bash FILE --cfg job` prints the whole configuration.

## Commands

| | SkyRL | verl | AReaL | here |
|---|---|---|---|---|
| start | `bash fully_async_run_gsm8k.sh` | `python -m verl.experimental.fully_async_policy.fully_async_main` | \
`python3 gsm8k_rl.py --config gsm8k_grpo.yaml` | `uv run -m skyrl_async.main` |
| set a key | `key=value` | `key=value`, `+key=value` for a new one | `key=value` | `key=value` |
| a file of keys | none | hydra's `--config-path`, `--config-name` | `--config` | `--config`, such as a run's config.yaml |
| all keys | `skyrl/train/config/config.py` | `verl/trainer/config` | `areal/api/cli_args.py` | `--help`, [reference](reference/config.md) |
| evaluate only | `main_generate` | `trainer.val_only` | `gsm8k_eval.py` | `trainer.eval_only=true` |
| an agent of yours | a generator class | an agent loop | a workflow class | `generator=agent`, [how](tutorials/03_your_own_agent.md) |
| a loss of yours | `PolicyLossRegistry` | `register_policy_loss` | a change of the actor | `package.module:function` in place of a name |

## One name, another meaning

- **`trainer.algorithm.policy_loss_type`.** Our ratios are to the log-probs of the engine that sampled the token. SkyRL's `regular`,
  `dual_clip`, `gspo`, `cispo`, `sapo`, `clip_cov` and `kl_cov` recompute them; its fully asynchronous trainer refuses these, except `cispo`
  with `cispo_anchor` rollout. Ours that recompute are `decoupled_ppo` and `cispo_old`.
- **`rollout_is`.** SkyRL drops tokens whose ratio is outside 1 - `eps_clip_low` and 1 + `eps_clip_high`. Ours caps the ratio at `tis_cap`.
  `--from-skyrl` sets `token_mask_is_threshold_low` and `token_mask_is_threshold_high` to SkyRL's bounds.
- **`trainer.train_batch_size`.** Ours has none: an optimizer step takes `trainer.policy_mini_batch_size` groups.
- **Micro-batches** are in tokens here (`training.micro_batch_tokens`), in samples in SkyRL and verl unless they pack by tokens.
- **Staleness.** SkyRL's `max_staleness_steps` and AReaL's `max_head_offpolicyness` admit groups by our rule. Ours also bounds the age at
  which a group is trained, see [staleness](tutorials/02_staleness.md). verl's `staleness_threshold` is a share of prompts.
- **Evaluation** uses all held-out prompts there. Here it uses the first `evaluation.num_prompts`, between steps
  `evaluation.num_prompts_while_training`.

## Defaults that differ under one name

Empty: no key with a default ends in this name.

"""


def markdown() -> str:
    """The page."""
    lines = [_BEGIN + "\n".join(f"- {name}: {source}" for name, source in sources().items())]
    lines += [_MIDDLE + "\n".join(_differing_defaults())]
    for name in sources():
        lines += ["", f"## {name}'s keys", "", f"| {name} | default | here | what differs |", "|---|---|---|---|"]
        lines += _lines_of(name)
    return "\n".join(lines) + "\n"


def _differing_defaults() -> Iterator[str]:
    names = list(sources())
    yield f"| key | here | {' | '.join(names)} |"
    yield "|---|---|" + "---|" * len(names)
    for key, ours in all_keys().items():
        word, cells, differs = key.rpartition(".")[2], [], False
        for name in names:
            rows = (row for row in foreign_keys(name).values() if row.ours == (key,) and row.default)
            row = next((row for row in rows if row.name.rpartition(".")[2] == word), None)
            cells.append(f"`{row.default}`" if row else "")
            differs = differs or (row is not None and not _is_same(row, ours.default))
        if differs:
            yield f"| `{key}` | `{ours.default}` | {' | '.join(cells)} |"


def _is_same(row: Foreign, ours: str) -> bool:
    """Whether both defaults are the same value; no list is an empty list."""
    theirs, here = (yaml_value(text) for text in (row.value_of(row.default) or row.default, ours))
    return bool(theirs == here or [theirs] == here or (theirs is None and here == []))


def _lines_of(system: str) -> Iterator[str]:
    same = groupby(
        foreign_keys(system).values(), key=lambda row: (row.default, row.ours, tuple(row.values.items()), row.note)
    )
    for _, group in same:
        rows = list(group)
        row, names = rows[0], ", ".join(f"`{each.name}`" for each in rows)
        keys = ["the same" if row.ours == (row.name,) else " ".join(f"`{key}`" for key in row.ours)] if row.ours else []
        meant = [_meant(theirs, ours) for theirs, ours in row.values.items()]
        here = "; ".join([*keys, *filter(None, meant)]) or "none"
        default = f"`{row.default}`" if row.default else ""
        yield f"| {names} | {default} | {here} | {row.note} |"


def _meant(theirs: str, ours: str) -> str:
    if theirs == "*":
        return f"otherwise `{ours}`" if ours else "nothing to set"
    return f"`{theirs}`: `{ours}`" if ours else f"`{theirs}`: nothing to set"


if __name__ == "__main__":
    sys.stdout.write(markdown())
