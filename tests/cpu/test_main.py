"""The command line as a user runs it: processes, their files, their exit codes, what they say on standard error.

One run of the default engine is killed, resumed and finished. What is refused is tried in this process, where nothing boots;
``test_equal_runs`` trains on a dataset and evaluates, ``tests/chaos`` stops runs.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_async.checkpoint.checkpointer import read_state
from skyrl_async.main import main
from skyrl_async.metrics.stage_picture import read_stages
from skyrl_async.metrics.trace_parts import read_spans
from skyrl_async.metrics.tracker import read_rows
from skyrl_async.rollout.group_state import from_json
from skyrl_async.types import EngineOutput
from tests.cpu.forked_workers import forking_executable
from tests.cpu.metrics.test_metrics import files_of_at_most
from tests.patience import PATIENCE_S
from tests.terminal import AS_IN_A_TERMINAL

REPOSITORY = Path(__file__).parents[2]
MARK = "SKYRL_ASYNC_TEST_RUN"
GROUPS_PER_STEP = 2
NUM_LAST_STEPS = 4
BOUND = 2
"""So that the last steps need more groups than a checkpoint holds, at most (BOUND + 1) mini-batches."""
SMALL = (
    "policy.warm_start.enabled=false",
    f"trainer.policy_mini_batch_size={GROUPS_PER_STEP}",
    "generator.n_samples_per_prompt=2",
    "generator.sampling.max_tokens=24",
    "evaluation.sampling.max_tokens=24",
    "evaluation.num_prompts=4",
    "evaluation.num_prompts_while_training=2",
    "task.num_eval_prompts=4",
    "trainer.eval_interval_steps=2",
    "trainer.checkpoint_interval_steps=1",
)
LONG_ANSWERS = "generator.sampling.max_tokens=120"
"""Still being sampled whenever a checkpoint is written."""
NO_VLLM = ("engine=deterministic", "logging.tensorboard=false", "evaluation.num_prompts=0")
BOUNDED = f"trainer.max_staleness_steps={BOUND}"
FOR_EVER = "trainer.num_steps=100000"
REFERENCE = ("trainer.algorithm.use_kl_loss=true", "training.num_ref_workers=1")
SEPARATE = ("placement.groups=[[policy],[ref],[generate]]", "placement.devices=[1,1,1]", "placement.num_cpu_slots=3")
SHARED = ("placement.groups=[[policy,generate]]", "placement.devices=[1]", "placement.min_generation_slice_s=0.2")
SUMMARY_KEYS = {
    "reward_before",
    "reward_after",
    "steps",
    "seconds",
    "tokens_generated",
    "staleness_max",
    "staleness_wait_seconds",
    "pause_seconds_median",
    "trainer_idle_frac",
}


RECORDING = """
import json
from skyrl_async.generators.gym.generator import GymGenerator
from skyrl_async.tasks.registry import make_environment

class Recording:
    def __init__(self, generator):
        self.generator = generator

    async def generate(self, request):
        rows = await self.generator.generate(request)
        if not request.is_evaluation:
            told = [[list(map(float, column)) for column in (row.response_token_ids, row.logprobs, row.versions)] for row in rows]
            with open("rows.jsonl", "a") as file:
                file.write(json.dumps([request.priority, told]) + "\\n")
        return rows

def make_recording(client, renderer, config):
    return Recording(GymGenerator(client, renderer, make_environment))
"""


class Command:
    """One ``python -m skyrl_async.main ...``; every process that descends from it can be told by its environment.

    Where ``is_forked``, the program is a fork of the process that has done its imports (``forked_workers``).
    """

    def __init__(self, overrides: Sequence[str], *, cwd: Path, is_forked: bool = False) -> None:
        self._mark = uuid.uuid4().hex
        program = [sys.executable, "-m", "skyrl_async.main"]
        if is_forked:
            program = [*forking_executable(), str(REPOSITORY / "skyrl_async/main.py")]
        self.stderr_path = cwd / f"stderr-{self._mark}"
        paths = [str(REPOSITORY), str(cwd), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {MARK: self._mark, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "400"}
        with self.stderr_path.open("w") as stderr:
            self.process = subprocess.Popen(
                [*AS_IN_A_TERMINAL, *program, f"cache_dir={cwd / 'cache'}", *overrides],
                cwd=cwd,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def read_until(self, text: str) -> str:
        """The output up to a line that holds ``text``."""
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if text in line:
                return "".join(lines)
        raise AssertionError(f"{text!r} not in:\n{''.join(lines)}{self.stderr_path.read_text()}")

    def wait_for_step(self, step: int) -> None:
        """Read until a step from ``step`` on is reported."""
        while not (found := re.match(r"step (\d+)", self.read_until("step ").splitlines()[-1])) or int(found[1]) < step:
            pass

    def finish(self, timeout_s: float = 4 * PATIENCE_S) -> "Outcome":
        """Wait for its end, and for that of all its processes."""
        started = time.monotonic()
        stdout, _ = self.process.communicate(timeout=timeout_s)
        # Ray's agents whose node was killed may ask its dead server for a minute.
        _, orphans = psutil.wait_procs(self.family(), timeout=2 * PATIENCE_S)
        return Outcome(
            pid=self.process.pid,
            code=self.process.returncode,
            stdout=stdout,
            stderr=self.stderr_path.read_text(),
            seconds=time.monotonic() - started,
            orphans=tuple(" ".join(orphan.cmdline()) for orphan in orphans),
        )

    def family(self) -> list[psutil.Process]:
        """The processes alive that descend from the command, whoever is their parent now."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.communicate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a command."""

    pid: int
    code: int
    stdout: str
    stderr: str
    seconds: float
    orphans: tuple[str, ...]
    """Command lines of processes that outlived it by two minutes."""

    @property
    def error(self) -> str:
        """The one error, without the program's notices around it."""
        lines = self.stderr.splitlines()
        (index,) = (i for i, line in enumerate(lines) if line.startswith("error: "))
        return "\n".join(lines[index:])


def run(*overrides: str, cwd: Path, is_forked: bool = False) -> Outcome:
    with Command(overrides, cwd=cwd, is_forked=is_forked) as command:
        outcome = command.finish()
    assert outcome.orphans == ()
    return outcome


Here = Callable[..., Outcome]


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Calls the command line in this process, where Ray cannot be started: for what must be refused before."""

    def run_without_ray(*overrides: str) -> Outcome:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray was started"))
        code = main([f"cache_dir={tmp_path / 'cache'}", *overrides])
        out, err = capsys.readouterr()
        assert "starting Ray" not in out
        return Outcome(pid=os.getpid(), code=code, stdout=out, stderr=err, seconds=0.0, orphans=())

    return run_without_ray


def assert_refused(outcome: Outcome, *said: str) -> None:
    """One clear line, nothing started."""
    assert outcome.code == 2
    assert outcome.stderr.startswith("error: ")
    assert outcome.stderr.count("\n") == 1, outcome.stderr
    for words in said:
        assert words in outcome.stderr


def state(run_dir: Path) -> tuple[Path, dict[str, Any], list[str]]:
    """The newest checkpoint: its directory, the trainer's state, the uids of finished groups that wait in it."""
    step = (run_dir / "checkpoints" / "latest_ckpt_global_step.txt").read_text()
    directory = run_dir / "checkpoints" / f"global_step_{step}"
    groups = json.loads((directory / "groups.json").read_text())
    return directory, json.loads((directory / "trainer_state.json").read_text()), [group["uid"] for group in groups]


def assert_ledger_is_exact(run_dir: Path) -> list[str]:
    """Every group trained so far is of a prompt of its own; returns the uids trained."""
    directory, saved, waiting = state(run_dir)
    (epoch,) = saved["dataloader"]["ledger"]["epochs"].values()
    trained: list[str] = epoch["trained"]
    assert len(set(trained)) == len(trained) == saved["totals"]["trained_groups"] == saved["step"] * GROUPS_PER_STEP
    assert sorted(epoch["finished"]) == sorted(waiting)
    running = [group["uid"] for group in json.loads((directory / "running_groups.json").read_text())]
    assert sorted(epoch["running"]) == sorted(running)
    assert len({*trained, *waiting, *running}) == len(trained) + len(waiting) + len(running)
    return trained


def begun_samples(checkpoint: Path) -> Iterator[tuple[int, int, EngineOutput]]:
    """(admission index, sample index, tokens) of the answers that a checkpoint holds the beginning of."""
    for group in read_state(checkpoint).running:
        for index, sample in group.samples.items():
            if (begun := (sample.state or {}).get("generation")) is not None:
                yield group.admission_index, index, from_json(EngineOutput, begun)


def has_tokens_of_versions_before(run_dir: Path) -> bool:
    """Whether the newest checkpoint holds the beginning of an answer from before its last publish; engines may be faster than training."""
    checkpoint, saved, _ = state(run_dir)
    return any(min(begun.versions, default=saved["step"]) < saved["step"] for *_, begun in begun_samples(checkpoint))


def seconds_beside_gradients(stage: str, run_dir: Path) -> float:
    """For how long a stage worked on groups while gradients of others were computed; of a run that still goes on, too."""
    gradients = [(span.begin, span.end) for span in read_spans(run_dir) if span.name == "forward_backward"]
    worked = [span for span in read_stages(run_dir) if (span.stage, span.state) == (stage, "processing")]
    return sum(max(0.0, min(span.end, end) - max(span.begin, begin)) for span in worked for begin, end in gradients)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workplace")


@pytest.fixture(scope="module")
def killed(workplace: Path, forked_workers: None) -> tuple[Path, Outcome]:
    """A run of the default engine, ended by kill -9 in the middle of answers that the weights changed under."""
    run_dir = workplace / "run"
    overrides = [*SMALL, *SEPARATE, *REFERENCE, LONG_ANSWERS, BOUNDED, FOR_EVER, f"trainer.output_dir={run_dir}"]
    with Command(overrides, cwd=workplace) as command:
        for step in range(3, 40):
            command.wait_for_step(step)
            command.process.send_signal(signal.SIGSTOP)
            if has_tokens_of_versions_before(run_dir) and seconds_beside_gradients("ref_logp", run_dir):
                break
            command.process.send_signal(signal.SIGCONT)
        command.process.send_signal(signal.SIGKILL)
        return run_dir, command.finish()


@pytest.fixture(scope="module")
def finished(killed: tuple[Path, Outcome], workplace: Path) -> tuple[Path, int, list[str], Outcome]:
    """The same run resumed on one device, and finished after more steps than there are finished groups for: with what it began with."""
    run_dir, _ = killed
    first, trained = state(run_dir)[1]["step"], assert_ledger_is_exact(run_dir)
    shutil.copytree(state(run_dir)[0], workplace / "resumed")
    (workplace / "recording.py").write_text(RECORDING)
    outcome = run(
        *SMALL,
        *SHARED,
        LONG_ANSWERS,
        BOUNDED,
        "weight_sync.transfer=gloo",
        f"trainer.num_steps={first + NUM_LAST_STEPS}",
        "generator.entrypoint=recording:make_recording",
        "server.enabled=true",
        "trainer.resume_mode=latest",
        f"trainer.output_dir={run_dir}",
        cwd=workplace,
        is_forked=True,
    )
    return run_dir, first, trained, outcome


@pytest.mark.slow
def test_kill_9_leaves_no_process_and_a_whole_checkpoint(killed: tuple[Path, Outcome]) -> None:
    run_dir, outcome = killed
    assert outcome.code == -signal.SIGKILL
    assert outcome.orphans == ()
    assert state(run_dir)[1]["step"] >= 2
    assert_ledger_is_exact(run_dir)


@pytest.mark.slow
def test_a_reference_on_a_worker_of_its_own_works_while_gradients_are_computed(killed: tuple[Path, Outcome]) -> None:
    run_dir, _ = killed
    assert seconds_beside_gradients("ref_logp", run_dir) > 0
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if "reward/mean" in row]
    assert rows and all("policy/ref_kl" in row for row in rows)


@pytest.mark.slow
def test_groups_that_were_running_at_kill_9_go_on_with_their_tokens_of_the_versions_before(
    finished: tuple[Path, int, list[str], Outcome], workplace: Path
) -> None:
    run_dir, first, _, _ = finished
    played = dict(map(json.loads, (workplace / "rows.jsonl").read_text().splitlines()))
    num_continued = 0
    for admission_index, index, begun in begun_samples(workplace / "resumed"):
        columns = [list(column) for column in (begun.token_ids, begun.logprobs, begun.versions)]
        row = played[admission_index][index]
        assert [column[: len(columns[0])] for column in row] == columns
        num_continued += min(row[2]) < first <= max(row[2])
    assert num_continued > 0
    assert re.search(r"resumed global_step_\d+: .* 0 begin anew", (run_dir / "run.log").read_text())
    totals = state(run_dir)[1]["totals"]
    assert totals["restarted_trajectories"] == 0 and totals["resumed_trajectories"] >= num_continued


@pytest.mark.slow
def test_a_killed_run_is_resumed_and_finishes_with_all_its_files(
    killed: tuple[Path, Outcome], finished: tuple[Path, int, list[str], Outcome]
) -> None:
    run_dir, first, trained, outcome = finished
    assert outcome.code == 0, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert "held-out reward after" in outcome.stdout and "endpoint: http://127.0.0.1:" in outcome.stdout
    assert set(trained) < set(assert_ledger_is_exact(run_dir))

    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_KEYS and None not in summary.values()
    last = first + NUM_LAST_STEPS
    assert summary["steps"] == last
    assert summary["staleness_max"] <= BOUND
    rows = read_rows(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if "reward/mean" in row] == list(range(1, last + 1))
    evaluated = [row["step"] for row in rows if "reward/eval" in row]
    assert len(set(evaluated)) == len(evaluated) and {0, last} <= set(evaluated)
    assert all(earlier["time_s"] <= later["time_s"] for earlier, later in itertools.pairwise(rows))

    trained_rows = [row for row in rows if "reward/mean" in row]
    assert all({"train", "generate"} <= row["stages"].keys() for row in trained_rows)
    assert all(0 <= row["engines"]["engine-0"]["lag_steps"] <= BOUND for row in trained_rows)
    assert sum(row["stage/train/items"] for row in trained_rows[first:]) == NUM_LAST_STEPS * GROUPS_PER_STEP
    before, config = (
        yaml.safe_load((run_dir / f).read_text()) for f in (f"config_to_step_{first}.yaml", "config.yaml")
    )
    assert (before["weight_sync"]["transfer"], config["weight_sync"]["transfer"]) == ("auto", "gloo")
    assert "weight_sync.transfer=gloo (was auto)" in outcome.stderr
    assert config["server"]["enabled"] and config["trainer"]["policy_mini_batch_size"] == GROUPS_PER_STEP
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    parts = sorted((run_dir / "trace").iterdir())
    assert [path.name for path in parts] == ["000001.json", "000002.json"]
    assert {"group", "forward_backward", "broadcast", "pause", "load", "evaluate"} <= {
        span.name for span in read_spans(parts[1])
    }
    assert max(span.end for span in read_spans(parts[0])) < min(span.begin for span in read_spans(parts[1]))
    assert list((run_dir / "tensorboard").iterdir())
    assert {p.name for p in (run_dir / "checkpoints").glob("global_step_*")} == {
        f"global_step_{last - 1}",
        f"global_step_{last}",
    }
    assert not (run_dir / "endpoint.json").exists()
    last_pid = (run_dir / "run.lock").read_text().split()[1]
    for pid in (killed[1].pid, last_pid):
        assert not list(Path("/dev/shm").glob(f"skyrl_async-{pid}-*"))
    assert re.search(r"\b[sc]k-[\w-]{8}", (run_dir / "run.log").read_text()) is None

    tokenizer = AutoTokenizer.from_pretrained(run_dir / "policy")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "policy")
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "1"}], return_tensors="pt")["input_ids"]
    assert model(prompt).logits.isfinite().all()


@pytest.mark.slow
def test_which_stages_have_which_devices_is_shown_and_logged(
    finished: tuple[Path, int, list[str], Outcome],
) -> None:
    run_dir, _, _, outcome = finished
    log = (run_dir / "run.log").read_text()
    separate = (
        "placement: 3 of 3 CPU slots",
        "  [policy]    1  policy: training.num_workers=1",
        "  [ref]       1  ref: training.num_ref_workers=1",
        "  [generate]  1  generate: engine.num_engines=1, engine.tensor_parallel_size=1",
    )
    assert all(line in log for line in separate)
    shared = "[policy,generate]  1  policy: training.num_workers=1; generate: engine.num_engines=1"
    assert shared in log and shared in outcome.stdout
    assert "while the run was ended" not in outcome.stderr


@pytest.mark.slow
def test_an_engine_and_a_policy_on_one_device_take_turns_on_it(
    finished: tuple[Path, int, list[str], Outcome],
) -> None:
    run_dir, first, _, _ = finished
    times = {name: [] for name in ("others compute", "forward_backward", "optimizer_step", "broadcast", "load")}
    for span in read_spans(run_dir / "trace" / "000002.json"):
        if span.name in times and not span.track.startswith("engines/"):
            times[span.name].append((span.begin, span.end))
    paused = times.pop("others compute")
    for name in ("forward_backward", "optimizer_step"):
        assert times[name]
        assert all(any(a <= begin and end <= b for a, b in paused) for begin, end in times[name]), name
    assert len(times["broadcast"]) == len(times["load"]) > 0
    assert not any(a < end and begin < b for a, b in paused for begin, end in times["load"]), "loaded in others' turn"
    rows = [row for row in read_rows(run_dir / "metrics.jsonl") if "reward/mean" in row and row["step"] > first]
    assert len(rows) == NUM_LAST_STEPS and sum(row["generate/tokens"] for row in rows) > 0
    assert NUM_LAST_STEPS <= rows[-1]["devices/policy/leases"] <= rows[-1]["devices/generate/leases"] + 1


@pytest.mark.slow
def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path: Path, run_here: Here) -> None:
    outcome = run_here("trainer.max_stalenes_steps=4")
    assert_refused(outcome, "unknown key 'trainer.max_stalenes_steps'; did you mean trainer.max_staleness_steps?")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("directory", "why"),
    [
        ("/proc/nope", "'/proc/nope'"),
        ("/proc", "'/proc/run.lock'"),
        ("x" * 300, "File name too long"),
        ("file/run", "file is a file"),
        ("~no-such-user/run", "~no-such-user"),
    ],
)
def test_an_output_directory_that_takes_no_run_is_refused_by_its_key(
    tmp_path: Path, run_here: Here, directory: str, why: str
) -> None:
    (tmp_path / "file").touch()
    assert_refused(run_here(f'trainer.output_dir="{directory}"'), "trainer.output_dir must be a directory", why)


@pytest.mark.slow
def test_an_output_directory_on_a_full_disk_is_refused_by_its_key(tmp_path: Path, run_here: Here) -> None:
    with files_of_at_most(1000):
        outcome = run_here("trainer.output_dir=out")
    assert_refused(outcome, "trainer.output_dir must be a directory that can be written to, got 'out': ")


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of one's own."""
    from skyrl_async.tasks.registry import get_task
    from skyrl_async.tasks.tiny_policy import PolicySizes, prepare_initial_policy

    return prepare_initial_policy(
        cache_dir=tmp_path_factory.mktemp("policies"), task=get_task("lagged_fibonacci"), sizes=PolicySizes(), seed=0
    )


def dataset(directory: Path, lines: Sequence[str]) -> Path:
    path = directory / "train.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def row(uid: str, content: str = "Extend 3248 until 0.") -> str:
    prompt = [{"role": "user", "content": content}]
    return json.dumps(
        {"uid": uid, "prompt": prompt, "env_class": "lagged_fibonacci", "reward_spec": {"ground_truth": "3"}}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([""], "no prompts in PATH"),
        ([row("a"), row("b"), row("a")], "PATH,? line 3.* uid 'a' .*PATH,? line 1"),
        ([row("a"), '{"uid": "b", "prompt"'], "PATH,? line 2 is not JSON"),
    ],
    ids=["no prompts", "duplicate uid", "broken line"],
)
def test_a_dataset_that_cannot_be_used_is_named_by_file_and_line(
    tmp_path: Path, run_here: Here, policy_dir: Path, lines: list[str], complaint: str
) -> None:
    path = dataset(tmp_path, lines)
    files = ["task=dataset", f"task.train_files=[{path}]", f"policy.path={policy_dir}"]
    outcome = run_here(*files, "trainer.output_dir=out")
    assert outcome.code in (1, 2)
    assert re.search(complaint.replace("PATH", re.escape(str(path))), outcome.error), outcome.error
    assert "Traceback" not in outcome.stderr


@pytest.mark.slow
def test_a_checkpoint_with_a_missing_file_is_refused(
    killed: tuple[Path, Outcome], tmp_path: Path, run_here: Here
) -> None:
    checkpoint, _, _ = state(killed[0])
    damaged = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, damaged)
    (damaged / "policy" / "scheduler.pt").unlink()
    outcome = run_here("trainer.resume_mode=from_path", f"trainer.resume_path={damaged}")
    assert_refused(outcome, f"checkpoint {damaged} is incomplete: policy/scheduler.pt is missing")


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused(killed: tuple[Path, Outcome], tmp_path: Path, run_here: Here) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(state(killed[0])[0], checkpoint)
    resume = ["trainer.resume_mode=from_path", f"trainer.resume_path={checkpoint}"]
    outcome = run_here(*SMALL, *NO_VLLM, *resume, "policy.num_layers=3", "trainer.output_dir=out")
    assert outcome.code == 1
    assert "is of another model: model.layers.2" in outcome.error and "trainer.resume_mode=none" in outcome.error
    assert "Traceback" not in outcome.stderr
