"""A run with one fault is told so: engines, trainer and publish are real, and the fault is in one of them or in what they are given."""

import asyncio
import json
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from skyrl_async import view
from skyrl_async.columns import VersionSpans
from skyrl_async.config.load import from_overrides, to_yaml
from skyrl_async.doctor.__main__ import main, report
from skyrl_async.doctor.examination import Examination, examine
from skyrl_async.doctor.explanations import Idea, best_explanation
from skyrl_async.doctor.findings import path_findings
from skyrl_async.doctor.paths import PathGap
from skyrl_async.doctor.rows import MAX_TOKENS_PER_ROW, read_rows
from skyrl_async.doctor.run_files import RunFiles
from skyrl_async.errors import EngineStartError
from skyrl_async.inference.engines.deterministic import DeterministicEngine
from skyrl_async.inference.protocol import InferenceEngine
from skyrl_async.inference.vllm.engine import VLLMEngine, VLLMEngineConfig
from skyrl_async.record.ended import EndedGroup, Outcome
from skyrl_async.record.files import DIRECTORY, file_of, write
from skyrl_async.record.sample_record import SampleRecord
from skyrl_async.record.table import table_of
from skyrl_async.tasks.tokenizer import train_tokenizer
from skyrl_async.training.backends import packing, token_logprobs
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import Group, SampleWork, Trajectory
from tests.cpu.tiny_policies import train
from tests.engine_checks import make_policy, make_request

pytestmark = pytest.mark.slow

TRAINED = 2
BEGIN, NEWLINE, ROLE = 2, 9, 10
PROMPTS = [[BEGIN, ROLE, NEWLINE, *range(20 + i, 22 + 2 * i), NEWLINE, ROLE, NEWLINE] for i in range(4)]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Version -> its policy, whose head is tied."""
    first = make_policy(tmp_path_factory.mktemp("first"), seed=0, is_tied=True)
    train_tokenizer(["a text of some words"]).save_pretrained(first)
    return {0: first, TRAINED: changed(first, tmp_path_factory.mktemp("trained"))}


def changed(policy: Path, directory: Path) -> Path:
    """A policy after some training: its weights, moved a little."""
    torch.manual_seed(1)
    weights = load_file(policy / "model.safetensors")
    moved = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in weights.items()}
    (directory / "config.json").write_text((policy / "config.json").read_text())
    save_file(moved, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def checkpoint(policies: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of the second step."""

    async def save(directory: Path) -> Path:
        policy = InProcessPolicy(TrainingSettings(policy_path=str(policies[TRAINED])))
        await policy.save(directory / "policy")
        await policy.close()
        return directory

    return asyncio.run(save(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture
def run_dir(policies: dict[int, Path], checkpoint: Path, tmp_path: Path) -> Path:
    """A run with one checkpoint."""
    config = from_overrides(f"policy.path={policies[0]}", "engine=vllm", f"generator.sampling.max_tokens={NUM_TOKENS}")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    shutil.copytree(checkpoint, tmp_path / "checkpoints" / f"global_step_{TRAINED}")
    return tmp_path


@pytest.fixture
def engine(policies: dict[int, Path]) -> InferenceEngine:
    """An engine without a fault."""
    return DeterministicEngine("engine-0", policies[TRAINED])


@pytest.fixture(scope="module")
def rows(policies: dict[int, Path]) -> list[Trajectory]:
    """What such an engine sampled."""
    return asyncio.run(sampled(DeterministicEngine("engine-0", policies[TRAINED])))


async def sampled(
    engine: InferenceEngine,
    *,
    version: int = TRAINED,
    reads: Callable[[list[int]], list[int]] = list,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> list[Trajectory]:
    """Answers to all prompts, recorded as of ``version``. ``reads`` is what the engine gets for a recorded prompt."""
    rows = []
    for number, prompt in enumerate(PROMPTS):
        sampling: dict[str, Any] = {
            "max_tokens": NUM_TOKENS,
            "temperature": temperature,
            "top_p": top_p,
            "seed": number,
        }
        request = make_request(f"r{number}", reads(prompt), **sampling)
        output = await engine.generate(request)
        row = Trajectory(
            prompt_token_ids=prompt,
            response_token_ids=output.token_ids,
            loss_mask=np.ones(len(output.token_ids), bool),
            logprobs=output.logprobs,
            versions=VersionSpans.constant(version, len(output.token_ids)),
            reward=0.0,
        )
        rows.append(row)
    return rows


def record(run_dir: Path, rows_of_engines: dict[str, Sequence[Trajectory]]) -> None:
    """Record rows as trained in the step after the checkpoint."""
    groups, first = [], 0
    for engine, rows in rows_of_engines.items():
        for row in rows:
            work = {0: SampleWork(seconds=1.0, engines=(engine,))}
            group = Group(
                uid=f"p{first}", admission_index=first, scheduled_version=TRAINED, trajectories=(row,), work=work
            )
            groups.append((first, EndedGroup(group=group, outcome=Outcome.TRAINED, step=TRAINED + 1), True))
            first += 1
    (run_dir / DIRECTORY).mkdir(exist_ok=True)
    write(file_of(run_dir / DIRECTORY, 0, first), iter([table_of(groups)]))


async def examined(
    run_dir: Path, rows: Sequence[Trajectory] | dict[str, Sequence[Trajectory]], *, with_engine: bool = False
) -> Examination:
    record(run_dir, rows if isinstance(rows, dict) else {"engine-0": rows})
    return await examine(run_dir, with_engine=with_engine)


def faults(found: Examination) -> list[tuple[str, str]]:
    """Kind and place of each fault."""
    return [(finding.kind, finding.where) for finding in found.findings if finding.is_fault]


async def test_a_healthy_run_is_called_healthy_and_its_ratios_are_all_staleness(
    run_dir: Path, policies: dict[int, Path], rows: list[Trajectory]
) -> None:
    stale = await sampled(DeterministicEngine("engine-1", policies[0]), version=0)
    record(run_dir, {"engine-0": rows, "engine-1": await trained(stale, policies[TRAINED])})
    health = await examine(run_dir)
    assert health.is_healthy, report(health)
    assert health.versions == (0, TRAINED)
    assert [path.name for path in health.paths][-1] == "engine, decode, after a publish"
    assert len(health.paths) >= 9
    assert all(path.mean_abs < 1e-5 for path in health.paths if "bfloat16" not in path.name)
    assert health.split is not None
    assert health.split.num_tokens == len(PROMPTS) * NUM_TOKENS
    assert health.split.mismatch < 1e-5
    assert health.split.staleness == pytest.approx(health.split.log_ratio, rel=1e-3)
    assert health.split.staleness > 0.01
    assert "healthy" in report(health)


async def trained(rows: Sequence[Trajectory], policy: Path, version: int = TRAINED) -> list[Trajectory]:
    """Rows with what a trainer with the weights of ``policy`` finds when it trains them."""
    scores = InProcessPolicy(TrainingSettings(policy_path=str(policy)))
    found = [await scores.logprobs(np.concatenate([row.prompt_token_ids, row.response_token_ids])) for row in rows]
    await scores.close()
    return [
        replace(row, old_logprobs=np.asarray(values[len(row.prompt_token_ids) - 1 :]), old_version=version)
        for row, values in zip(rows, found, strict=True)
    ]


async def test_a_run_whose_first_policy_was_replaced_is_told_so_and_judged_by_its_other_weights(
    run_dir: Path, policies: dict[int, Path], rows: list[Trajectory], tmp_path_factory: pytest.TempPathFactory
) -> None:
    own = make_policy(tmp_path_factory.mktemp("own"), seed=5, is_tied=True)
    first = await trained(await sampled(DeterministicEngine("engine-0", own), version=0), own, version=0)
    newer = await trained(rows, policies[TRAINED])
    health = await examined(run_dir, [*first, *newer])
    assert [(finding.kind, finding.where) for finding in health.findings] == [("other weights", "version 0")]
    assert f"{policies[0]} does not hold the weights that the run had" in health.findings[0].sentence
    assert health.is_healthy and "as far as it can be judged without the run's weights" in report(health)
    assert health.split is not None and health.split.num_tokens == len(PROMPTS) * NUM_TOKENS
    hot = await sampled(DeterministicEngine("engine-1", own), version=0, temperature=0.5)
    health = await examined(run_dir, {"engine-0": first, "engine-1": await trained(hot, own, version=0)})
    assert faults(health) == [("unexplained", "engine-1")]


async def test_a_checkpoint_without_the_weights_that_were_trained_is_a_fault(run_dir: Path, tmp_path: Path) -> None:
    own = make_policy(tmp_path / "own", seed=5, is_tied=True)
    rows = await trained(await sampled(DeterministicEngine("engine-0", own)), own)
    health = await examined(run_dir, rows)
    assert faults(health) == [("other weights", f"version {TRAINED}")]
    assert f"global_step_{TRAINED}/policy does not hold the weights" in health.findings[0].sentence
    assert health.findings[0].sentence.endswith("resume from another checkpoint")


async def test_the_run_that_ships_is_not_called_wrong_for_want_of_its_policy(policies: dict[int, Path]) -> None:
    shipped = Path(view.__file__).with_name("demo")
    health = await examine(shipped, num_rows=4, with_engine=False, overrides=[f"policy.path={policies[0]}"])
    assert [(finding.kind, finding.where) for finding in health.findings] == [("other weights", "version 0")]


def test_a_run_that_holds_its_port_and_whose_first_checkpoint_is_gone_can_be_examined(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    config = from_overrides("generator=gym_http", "trainer.resume_mode=from_path", f"trainer.resume_path={checkpoint}")
    checkpoint.rmdir()
    with socket.create_server(("127.0.0.1", 0)) as held:
        config.server.port = held.getsockname()[1]
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        assert RunFiles(tmp_path, tmp_path, [], print).versions == [0]


async def test_a_fault_that_engine_and_trainer_share_is_not_taken_for_other_weights(
    run_dir: Path, policies: dict[int, Path], rows: list[Trajectory]
) -> None:
    shifted = [
        replace(row, logprobs=np.roll(row.logprobs, 1), old_logprobs=np.roll(row.old_logprobs, 1))
        for row in await trained(rows, policies[TRAINED])
    ]
    assert faults(await examined(run_dir, shifted)) == [("shifted mask", "engine-0"), ("shifted mask", "trainer")]


@pytest.mark.parametrize("where", ["engine-0", "trainer"])
async def test_an_adapter_that_is_not_in_force_is_named(tmp_path: Path, policies: dict[int, Path], where: str) -> None:
    config = from_overrides(f"policy.path={policies[0]}", "policy.lora.rank=4", "engine=vllm")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    policy = InProcessPolicy(TrainingSettings(policy_path=str(policies[0]), lora=config.policy.lora, lr=1e-2))
    await train(policy, first_step=0, num_steps=TRAINED)
    for step in (TRAINED - 1, TRAINED, TRAINED + 1):  # three that are nearer than version 0
        await policy.save(tmp_path / "checkpoints" / f"global_step_{step}" / "policy")
    await policy.export_hf(tmp_path / "merged")
    await policy.close()
    used = dict.fromkeys(["engine-0", "trainer"], tmp_path / "merged") | {where: policies[0]}
    rows = await sampled(DeterministicEngine("engine-0", used["engine-0"]))
    health = await examined(tmp_path, await trained(rows, used["trainer"]))
    assert faults(health) == [("adapter", where)]
    who = "the trainer" if where == "trainer" else "the engine"
    assert f"{who} computed tokens that are recorded as of version 2 without the adapter" in health.findings[0].sentence


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [("temperature", 0.7, "temperature 0.7 was in force"), ("top_p", 0.8, "top_p 0.8 was in force")],
)
async def test_sampling_parameters_that_are_not_the_configured_ones_are_named_with_their_values(
    run_dir: Path, engine: InferenceEngine, kind: str, value: float, said: str
) -> None:
    health = await examined(run_dir, await sampled(engine, **{kind: value}))  # type: ignore[arg-type]
    assert faults(health) == [(kind, "engine-0")]
    assert said in health.findings[0].sentence
    assert health.findings[0].explained > 0.99


async def test_a_stale_version_on_one_engine_is_named_with_the_engine(
    run_dir: Path, policies: dict[int, Path], rows: list[Trajectory]
) -> None:
    stale = await sampled(DeterministicEngine("engine-1", policies[0]))
    health = await examined(run_dir, {"engine-0": rows, "engine-1": stale})
    assert faults(health) == [("stale version", "engine-1")]
    assert "weights of version 0" in health.findings[0].sentence


@pytest.mark.parametrize(("stale", "is_named"), [(1.0, True), (0.0, False), (0.1, False)])
def test_old_weights_are_found_beneath_larger_rounding_and_nowhere_else(stale: float, is_named: bool) -> None:
    random = np.random.default_rng(0)
    model, change, rounding = (random.normal(0, size, 4000) for size in (1.0, 0.01, 0.04))
    idea = Idea("stale version", "", model + change, is_direction=True)
    recorded = model + stale * change + rounding
    found = best_explanation([[idea]], recorded, model)
    assert (found is not None) == is_named


def test_a_long_answer_whose_tokens_were_rewarded_is_read_up_to_its_first_tokens(tmp_path: Path) -> None:
    num = 2 * MAX_TOKENS_PER_ROW
    long = Trajectory(
        prompt_token_ids=(1, 2),
        response_token_ids=np.arange(num),
        loss_mask=np.ones(num, bool),
        logprobs=np.zeros(num),
        versions=np.ones(num, int),
        reward=1.0,
        token_rewards=np.eye(1, num, num - 1)[0],
    )
    record = SampleRecord(tmp_path / DIRECTORY)
    group = Group(uid="a", admission_index=0, scheduled_version=1, trajectories=(long,))
    record.add(EndedGroup(group=group, outcome=Outcome.TRAINED, step=2))
    record.close()
    (row,) = read_rows(tmp_path, {1}, 1)
    assert len(row.places) == MAX_TOKENS_PER_ROW


def test_rows_that_were_not_stale_are_read_although_newer_ones_of_their_version_were(
    run_dir: Path, rows: list[Trajectory]
) -> None:
    fresh, *stale = (replace(row, old_logprobs=row.logprobs, old_version=TRAINED + i) for i, row in enumerate(rows))
    record(run_dir, {"engine-0": [fresh, *stale]})
    assert {row.trajectory.old_version for row in read_rows(run_dir, {TRAINED}, 2)} == {TRAINED, TRAINED + 3}


async def test_a_fault_that_all_engines_have_is_said_once(run_dir: Path, engine: InferenceEngine) -> None:
    rows = await sampled(engine, temperature=0.5)
    health = await examined(run_dir, {"engine-0": rows[:2], "engine-1": rows[2:]})
    assert faults(health) == [("temperature", "all engines")]


@pytest.mark.parametrize(
    ("differing", "kinds"),
    [
        ([], []),
        (["trainer, packed"], ["batch shape"]),
        (["trainer, one row at a time", "trainer, packed", "trainer, padded"], ["trainer"]),
        (["engine, prefill, as booted", "engine, prefill, after a publish"], ["engine"]),
        (["engine, prefill, after a publish", "engine, decode, after a publish"], ["publish"]),
        (["trainer, padded", "engine, decode, as booted"], ["batch shape", "engine"]),
    ],
)
def test_ways_of_computing_that_differ_are_told_by_what_they_share(differing: list[str], kinds: list[str]) -> None:
    for gap in (0.1, float("nan")):
        paths = [PathGap(name, 10, gap, gap, gap) for name in differing]
        assert [finding.kind for finding in path_findings(paths, 0.01)] == kinds


async def test_a_tied_head_that_was_not_updated_is_named(
    run_dir: Path, policies: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    served = tmp_path_factory.mktemp("served")
    config = json.loads((policies[TRAINED] / "config.json").read_text())
    (served / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    old_head = load_file(policies[0] / "model.safetensors")["model.embed_tokens.weight"]
    weights = load_file(policies[TRAINED] / "model.safetensors") | {"lm_head.weight": old_head}
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    health = await examined(run_dir, await sampled(DeterministicEngine("engine-0", served)))
    assert faults(health) == [("tied head", "engine-0")]
    assert "the output head of the engine has the weights of version 0" in health.findings[0].sentence


async def test_a_layer_that_was_not_updated_is_named(
    run_dir: Path, policies: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    served = tmp_path_factory.mktemp("served")
    (served / "config.json").write_text((policies[TRAINED] / "config.json").read_text())
    old = load_file(policies[0] / "model.safetensors")
    weights = {
        name: old[name] if ".layers.1." in name else tensor
        for name, tensor in load_file(policies[TRAINED] / "model.safetensors").items()
    }
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    health = await examined(run_dir, await sampled(DeterministicEngine("engine-0", served)))
    assert faults(health) == [("stale weights", "engine-0")]
    assert "layer 1 of the engine has the weights of version 0" in health.findings[0].sentence


async def test_rows_that_a_packed_forward_does_not_keep_apart_are_named(
    run_dir: Path, rows: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(model: nn.Module, row_lengths: tuple[int, ...], device: torch.device) -> dict[str, Any]:
        """Arguments as if all rows were one, which training's own check at the beginning does not see."""
        return packing.packed_arguments(model, (sum(row_lengths),), device)

    monkeypatch.setattr(token_logprobs, "packed_arguments", joined)
    health = await examined(run_dir, rows)
    assert faults(health) == [("batch shape", "trainer, packed")]
    assert "training.use_sample_packing=false" in health.findings[0].sentence


async def test_a_publish_that_leaves_a_tied_head_old_is_named(
    run_dir: Path, rows: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyrl_async.inference.vllm import weight_transfer

    # The engine's core is a fork of this process.
    monkeypatch.setattr(weight_transfer, "_pack_again", lambda model: None)
    health = await examined(run_dir, rows, with_engine=True)
    assert faults(health) == [("publish", "engine, prefill, after a publish")]
    assert "begins behind them, in the last norm or the output head" in health.findings[0].sentence


async def test_a_layer_that_an_engine_computes_in_another_way_is_named_from_new_answers_to_prompts_of_a_file(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.qwen3 import Qwen3Attention

    make = Qwen3Attention.__init__

    def make_with_other_angles(layer: Qwen3Attention, **arguments: Any) -> None:
        if ".layers.1." in arguments["prefix"]:
            arguments["rope_parameters"] = arguments["rope_parameters"] | {"rope_theta": 100.0}
        make(layer, **arguments)

    monkeypatch.setattr(Qwen3Attention, "__init__", make_with_other_angles)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"some words {i}"}) + "\n" for i in range(6)))
    health = await examine(run_dir, num_rows=4, prompts=str(prompts))
    assert faults(health) == [("unexplained", "engine-0"), ("engine", "engine, prefill, as booted")]
    assert "it begins in layer 1: its output differs by" in health.findings[1].sentence
    assert not health.is_recorded and health.num_rows == 4 and health.versions == (TRAINED,)
    assert "4 answers sampled now" in report(health)


async def test_bfloat16_is_named_where_float32_is_configured_from_new_answers_to_prompts_of_the_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyrl_async.doctor import paths

    as_configured = paths.vllm_config
    monkeypatch.setattr(paths, "vllm_config", lambda *given: replace(as_configured(*given), dtype="bfloat16"))
    health = await examine(run_dir, num_rows=8, prompts="run")
    assert faults(health) == [("bfloat16", "engine-0"), ("engine", "engine, prefill, as booted")]
    assert "policy.dtype is float32" in health.findings[0].sentence


@pytest.mark.parametrize("by", [1, -1])
async def test_a_column_that_is_shifted_by_a_token_is_named(run_dir: Path, rows: list[Trajectory], by: int) -> None:
    health = await examined(run_dir, [replace(row, logprobs=np.roll(row.logprobs, by)) for row in rows])
    assert faults(health) == [("shifted mask", "engine-0")]


async def test_a_loss_mask_that_is_shifted_onto_an_observation_is_named_also_as_json(
    run_dir: Path, rows: list[Trajectory]
) -> None:
    shifted = []
    for row in rows:
        ids = np.insert(row.response_token_ids, 0, [NEWLINE, ROLE])
        mask = np.insert(row.loss_mask, 0, [False, False])
        mask[:3] = [False, True, True]  # one early
        versions = VersionSpans.joined([VersionSpans.constant(-1, 2), row.versions])
        logprobs = np.insert(row.logprobs, 0, [0.0, 0.0])
        shifted.append(replace(row, response_token_ids=ids, loss_mask=mask, versions=versions, logprobs=logprobs))
    health = await examined(run_dir, shifted)
    assert ("shifted mask", "the record") in faults(health)
    figures = run_dir / "figures.json"
    assert await asyncio.to_thread(main, [str(run_dir), "--no-engine", "--json", str(figures)]) == 1
    (of_record,) = (
        one for one in msgspec.json.decode(figures.read_bytes())["findings"] if one["where"] == "the record"
    )
    assert of_record["mean_abs_gap"] is None, "JSON has no NaN"


@pytest.mark.parametrize("place", [-1, -2, 1])
async def test_a_template_token_that_the_record_lacks_is_named(
    run_dir: Path, rows: list[Trajectory], place: int
) -> None:
    def without(prompt: list[int]) -> list[int]:
        return [token for i, token in enumerate(prompt) if i != place % len(prompt)]

    health = await examined(
        run_dir, [replace(row, prompt_token_ids=without(row.prompt_token_ids.tolist())) for row in rows]
    )
    token = NEWLINE if place == -1 else ROLE
    assert faults(health) == [("template token", "engine-0")]
    assert f"(token {token})" in health.findings[0].sentence
    assert health.findings[0].explained > 0.99


async def test_a_template_token_that_the_engine_did_not_read_is_named(run_dir: Path, engine: InferenceEngine) -> None:
    health = await examined(run_dir, await sampled(engine, reads=lambda prompt: prompt[:-1]))
    assert faults(health) == [("template token", "engine-0")]
    assert f"(token {NEWLINE})" in health.findings[0].sentence


async def test_an_engine_is_forked_before_anything_computes_on_several_threads(
    run_dir: Path, rows: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its core would wait for ever for OpenMP's other threads. A stand-in, which boots nothing: other tests fork from this process."""
    num_threads: list[int] = []

    async def start(config: VLLMEngineConfig) -> VLLMEngine:
        num_threads.append(torch.get_num_threads())
        raise EngineStartError("boots nothing")

    monkeypatch.setattr(VLLMEngine, "start", start)
    torch.set_num_threads(2)
    try:
        with pytest.raises(EngineStartError, match="boots nothing"):
            await examined(run_dir, rows, with_engine=True)
        assert (num_threads, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's full device")
async def test_a_disk_that_is_full_costs_the_figures_and_not_the_report(
    run_dir: Path, rows: list[Trajectory], capsys: pytest.CaptureFixture[str]
) -> None:
    record(run_dir, {"engine-0": rows})
    assert await asyncio.to_thread(main, [str(run_dir), "--no-engine", "--json", "/dev/full"]) == 2
    said = capsys.readouterr()
    assert "healthy" in said.out and "No space left on device" in said.err


async def test_what_cannot_be_examined_is_said(
    run_dir: Path, rows: list[Trajectory], capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(main, [str(run_dir / "missing")]) == 2
    assert "has no config.yaml" in capsys.readouterr().err
    assert await asyncio.to_thread(main, [str(run_dir), "--prompts", str(run_dir / "missing")]) == 2
    assert "missing does not exist: name a .jsonl or .parquet file, or 'run'" in capsys.readouterr().err
    assert await asyncio.to_thread(main, [str(run_dir), "--rows", "2", "policy.dtpye=float32"]) == 2
    assert "did you mean policy.dtype" in capsys.readouterr().err
    nowhere = str(run_dir / "nowhere" / "figures.json")
    assert await asyncio.to_thread(main, [str(run_dir / "missing"), "--json", nowhere]) == 2
    assert f"--json {nowhere} cannot be written: No such file" in capsys.readouterr().err, "before it examines anything"
    config = run_dir / "config.yaml"
    written = config.read_text()
    config.write_text(f"{written}cheese: 1\n")
    assert await asyncio.to_thread(main, [str(run_dir)]) == 2
    assert f"error: {config}: unknown key 'cheese'" in capsys.readouterr().err
    config.write_text(written)
    record(run_dir, {"engine-0": [replace(row, versions=VersionSpans.constant(1, NUM_TOKENS)) for row in rows]})
    with pytest.raises(Exception, match=r"tokens of version 1, and weights of version 0, 2; keep checkpoints"):
        await examine(run_dir, with_engine=False)
