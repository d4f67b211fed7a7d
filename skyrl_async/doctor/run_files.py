"""What a run has left in files: its configuration, its prompts, and the policy versions whose weights are still there.

version 0     policy.path, or the tiny policy that its configuration makes
version N     checkpoints/global_step_N, or the export in policy/ after the last step
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from skyrl_async.checkpoint.checkpointer import checkpoints_in
from skyrl_async.columns import TokenIds
from skyrl_async.composition.data import PolicyFiles, ProgressFn, load_renderer, prepare_prompts
from skyrl_async.composition.logprobs import training_settings
from skyrl_async.config.load import compose_config, load
from skyrl_async.data.dataset import load_sources
from skyrl_async.errors import ConfigError
from skyrl_async.record.files import read_tokenizer
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import SamplingParams

OWN_PROMPTS = "run"
_NOT_READ = ("server.host=127.0.0.1", "server.port=0", "trainer.resume_mode=none", "trainer.resume_path=null")
"""The ports that a run holds while it goes on, and the checkpoint that it began with: nobody needs them to examine it."""


class RunFiles:
    """Reads the directory of a run, which may go on, and writes a version as a Hugging Face directory in float32.

    Args:
        run_dir: the directory.
        work_dir: gets those of versions.
        overrides: of the run's configuration, such as ``engine.enforce_eager=true``.
        say: takes a line about a policy that is made anew.

    Raises ``ConfigError`` if it is no run's, or the configuration does not fit this machine.
    """

    def __init__(self, run_dir: Path, work_dir: Path, overrides: Sequence[str], say: ProgressFn) -> None:
        self.run_dir = run_dir
        """As given."""
        path = run_dir / "config.yaml"
        if not path.is_file():
            raise ConfigError(f"{run_dir} must be the directory of a run, such as outputs/RUN: it has no config.yaml")
        self.config = load(compose_config([*_NOT_READ, *overrides], path))
        """The run's with the overrides, checked."""
        self._work_dir, self._say = work_dir, say
        checkpoints = {step: path / "policy" for step, path in checkpoints_in(run_dir / "checkpoints").items()}
        self._found = _exported(run_dir) | checkpoints
        self._initial: Path | None = None
        self._tokenizer = read_tokenizer(run_dir)

    @property
    def sampling(self) -> SamplingParams:
        """Length, temperature and truncation as configured; the trainer truncates nothing."""
        own = self.config.generator.sampling
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p")
        return SamplingParams(**{name: getattr(own, name) for name in names})

    @property
    def uses_bfloat16(self) -> bool:
        """Whether engine or trainer may compute in it."""
        return self.config.policy.dtype.name == "bfloat16" or self.config.training.mixed_precision

    def text_of(self, token: int) -> str:
        """A token's text and number."""
        text = "" if self._tokenizer is None else f"{self._tokenizer.decode([token], skip_special_tokens=False)!r} "
        return f"{text}(token {token})"

    def prompts(self, source: str, tokenizer_dir: Path, num_prompts: int) -> list[TokenIds]:
        """The first prompts of a file, or the run's own for ``OWN_PROMPTS``. Raises ``DatasetError`` or ``ConfigError``."""
        if source == OWN_PROMPTS:
            prompts = prepare_prompts(self.config).train
        elif Path(source).exists():
            (prompts,) = load_sources([Path(source)], None, needs_environment=False)
        else:
            raise ConfigError(
                f"--prompts {source} does not exist: name a .jsonl or .parquet file, or {OWN_PROMPTS!r} for the run's own prompts"
            )
        renderer = load_renderer(tokenizer_dir, self.config.policy.trust_remote_code)
        return [renderer.render(prompt.messages) for prompt in prompts[:num_prompts]]

    @property
    def versions(self) -> Sequence[int]:
        """All of them."""
        return sorted({0, *self._found})

    async def initial(self) -> Path:
        """The policy that training began with; makes the tiny policy where it is not cached."""
        if self._initial is None:
            prompts = prepare_prompts(self.config)
            self._initial = await PolicyFiles(self.config, prompts, self._say).trained()
        return self._initial

    async def source(self, version: int) -> Path:
        """Where the weights of this version are."""
        return self._found.get(version) or await self.initial()

    async def directory(self, version: int) -> Path:
        """A Hugging Face directory of this version. Raises ``CheckpointError`` or ``PolicyError``."""
        if version not in self._found:
            return await self.initial()
        found = self._found[version]
        if (found / "config.json").is_file():
            return found
        directory = self._work_dir / f"version_{version}"
        if not directory.exists():
            settings = training_settings(self.config, await self.initial(), num_steps=1)
            settings = replace(
                settings, deepspeed=None, serve_dtype="float32", has_reference=False, shares_weights=False
            )
            policy = InProcessPolicy(settings)
            try:
                await policy.load(found)
                await policy.export_hf(directory)
            finally:
                await policy.close()
        return directory


def _exported(run_dir: Path) -> dict[int, Path]:
    """``policy/``, if the run's summary says which version it is."""
    try:
        steps = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {int(steps): run_dir / "policy"} if (run_dir / "policy" / "config.json").is_file() else {}
