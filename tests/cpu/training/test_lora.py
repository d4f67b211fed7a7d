"""Adapters on a tiny random Qwen3, one rank in this process, compared with plain torch on merged weights."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.func import functional_call
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from skyrl_async.composition.data import PolicyFiles, Prompts
from skyrl_async.composition.logprobs import training_settings
from skyrl_async.config.load import from_overrides
from skyrl_async.config.schema.policy import LoraConfig, LoraInit, LoraPublish
from skyrl_async.errors import CheckpointError, ConfigError, PolicyError, WeightsWriteError
from skyrl_async.training.backends.lora import add_adapters, merged
from skyrl_async.training.backends.settings import TrainingSettings
from skyrl_async.training.workers.in_process import InProcessPolicy
from skyrl_async.types import Adapter, LogprobModel, Trajectory
from skyrl_async.weights.formats import CONFIG_FILE, adapted_layers, tensor_names
from tests.cpu.quick_config import config_of
from tests.cpu.tiny_policies import (
    advantages,
    assert_close,
    export_weights,
    full_copy,
    num_tokens,
    train,
    trajectories,
    weights,
    write_policy,
)
from tests.cpu.training.test_logprobs import as_lists

LORA = LoraConfig(rank=4, alpha=6.0)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Make = Callable[..., InProcessPolicy]


def make_settings(directory: Path, **changes: Any) -> TrainingSettings:
    return replace(TrainingSettings(policy_path=str(directory), lr=1e-2, lora=LORA), **changes)


@pytest.fixture(scope="module")
def policy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def make(policy_directory: Path) -> Iterator[Make]:
    made: list[InProcessPolicy] = []

    def make_policy(**changes: Any) -> InProcessPolicy:
        made.append(InProcessPolicy(make_settings(policy_directory, **changes)))
        return made[-1]

    yield make_policy
    for policy in made:
        policy._rank.close()


def parameters(policy: InProcessPolicy) -> dict[str, nn.Parameter]:
    return policy._rank._backend._parameters


def values(policy: InProcessPolicy) -> dict[str, Tensor]:
    return {name: full_copy(p) for name, p in parameters(policy).items()}


def gradients(policy: InProcessPolicy) -> dict[str, Tensor]:
    return {name: full_copy(p.grad) for name, p in parameters(policy).items() if p.grad is not None}


def source_of(policy_directory: Path) -> dict[str, Tensor]:
    return load_file(policy_directory / "model.safetensors")


def ppo_clip_sum(logits_of: Callable[[Tensor], Tensor], rows: list[Trajectory], advantages: list[float]) -> Tensor:
    """Minus the sum over tokens of min(r A, clip(r) A), written out."""
    total = torch.zeros((), dtype=torch.float64)
    for row, advantage in zip(rows, advantages, strict=True):
        ids = torch.tensor([row.prompt_token_ids.tolist() + row.response_token_ids.tolist()])
        start = len(row.prompt_token_ids)
        logprobs = logits_of(ids)[0, start - 1 : -1].log_softmax(-1).gather(1, ids[0, start:, None])[:, 0]
        ratio = (logprobs - torch.tensor(row.logprobs, dtype=torch.float64)).exp()
        total = total - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum()
    return total


async def test_gradients_are_those_of_plain_torch_through_the_merged_weights(
    make: Make, policy_directory: Path
) -> None:
    policy = make()
    await train(policy, first_step=0, num_steps=1)  # B is 0 before, and A without a gradient
    rows, advantage = trajectories(5, seed=7), advantages(5, seed=8)
    await policy.forward_backward(rows, advantage, 1)

    model = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float64).eval()
    adapters = {n: v.double().requires_grad_() for n, v in values(policy).items() if ".lora_" in n}
    layers = [name.removesuffix(".lora_A.default.weight") for name in adapters if ".lora_A." in name]
    assert len(layers) == 2 * len(PROJECTIONS)
    scaling = 6.0 / 4
    replaced = {
        f"{layer}.weight": model.get_parameter(f"{layer}.weight").detach()
        + scaling * adapters[f"{layer}.lora_B.default.weight"] @ adapters[f"{layer}.lora_A.default.weight"]
        for layer in layers
    }
    ppo_clip_sum(lambda ids: functional_call(model, replaced, (ids,)).logits, rows, advantage).backward()

    per_token = {name: gradient.double() / num_tokens(rows) for name, gradient in gradients(policy).items()}
    assert_close(per_token, {name: a.grad / num_tokens(rows) for name, a in adapters.items()}, atol=1e-6)
    assert max(gradient.abs().max().item() for gradient in per_token.values()) > 0.1


@pytest.mark.slow
async def test_training_begins_with_the_weights_as_they_are_and_never_touches_them(
    make: Make, policy_directory: Path, tmp_path: Path
) -> None:
    policy, source = make(), source_of(policy_directory)
    assert_close(await weights(policy, tmp_path / "first"), source)
    await train(policy, first_step=0, num_steps=3)
    beneath = {n.replace(".base_layer.", "."): v for n, v in values(policy).items() if ".lora_" not in n}
    assert_close(beneath, source)
    after = await weights(policy, tmp_path / "after")
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, source[name])}
    assert moved == {name for name in source if name.split(".")[-2] in PROJECTIONS}


@pytest.mark.slow
async def test_adapters_alone_are_published_as_a_directory_that_peft_loads(
    make: Make, policy_directory: Path, tmp_path: Path
) -> None:
    lora = replace(LORA, alpha=7.5, publish=LoraPublish.adapter)
    policy, whole = make(lora=lora), make(lora=replace(lora, publish=LoraPublish.merged))
    await train(policy, first_step=0, num_steps=3)
    update = await export_weights(policy, 3, tmp_path / "adapter", 1 << 30)
    assert update.version == 3 and update.adapter == Adapter(rank=4, alpha=7.5)
    assert set((tmp_path / "adapter").iterdir()) == {Path(update.path), Path(update.path).with_name(CONFIG_FILE)}
    assert {name: tuple(t.shape) for name, t in load_file(update.path).items()} == {
        name: shape for name, (_, shape) in update.manifest.items()
    }
    assert len(update.manifest) == 2 * 2 * len(PROJECTIONS)
    assert update.num_bytes < (await export_weights(whole, 0, tmp_path / "whole", 1 << 30)).num_bytes / 2

    base = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = list(range(3, 30))
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert await policy.logprobs(ids) == pytest.approx(expected, abs=1e-5)
    assert await whole.logprobs(ids) != pytest.approx(expected, abs=0.1)


@pytest.mark.slow
async def test_an_export_holds_the_adapters_too_as_they_train(
    make: Make, policy_directory: Path, tmp_path: Path
) -> None:
    policy = make(serve_dtype="bfloat16")
    await train(policy, first_step=0, num_steps=3)
    await policy.export_hf(tmp_path / "hf")
    base = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "hf" / "adapter").eval()
    ids = list(range(3, 30))
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert await policy.logprobs(ids) == pytest.approx(expected, abs=1e-5)
    config = json.loads((tmp_path / "hf" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(policy_directory) and (config["r"], config["lora_alpha"]) == (4, 6)
    AutoModelForCausalLM.from_pretrained(tmp_path / "hf")


async def test_nothing_is_left_of_adapters_that_cannot_be_written(make: Make, tmp_path: Path) -> None:
    policy = make(lora=replace(LORA, publish=LoraPublish.adapter))
    (tmp_path / "adapter" / "adapter_model.safetensors" / "in the way").mkdir(parents=True)
    with pytest.raises(WeightsWriteError, match="cannot write .*adapter"):
        await export_weights(policy, 0, tmp_path / "adapter", 1 << 30)
    assert [path.name for path in (tmp_path / "adapter").iterdir()] == ["adapter_model.safetensors"]


def test_a_name_that_is_no_adapters_tensor_is_refused() -> None:
    a, b = tensor_names("model.layers.0.mlp.up_proj")
    assert adapted_layers([a, b]) == ["model.layers.0.mlp.up_proj"]
    with pytest.raises(
        ValueError, match=r"model.norm.weight is no tensor of an adapter, such as base_model.model.LAYER"
    ):
        adapted_layers([a, "model.norm.weight"])


async def test_merged_weights_compute_what_the_adapters_do(make: Make, tmp_path: Path) -> None:
    policy = make()
    await train(policy, first_step=0, num_steps=3)
    await policy.export_hf(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    ids = list(range(3, 30))
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    # float32's rounding: W x + s B (A x) and (W + s B A) x add the same products in another order, see the next test.
    assert await policy.logprobs(ids) == pytest.approx(expected.tolist(), abs=3e-6)
    update = await weights(policy, tmp_path / "update")
    assert_close(update, dict(load_file(tmp_path / "hf" / "model.safetensors")))


def test_merging_changes_nothing_but_the_order_of_additions(policy_directory: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float64).eval()
    model = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float64).eval()
    layers = add_adapters(model, LORA, seed=0)
    model.double()
    torch.manual_seed(1)
    for layer in layers.values():
        layer.lora_B["default"].weight.data.normal_(std=0.1)  # type: ignore[operator, index, union-attr]
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        adapted = model(ids).logits
        full = dict(merged(model.named_parameters(), scaling=LORA.alpha / LORA.rank))
        torch.testing.assert_close(functional_call(plain, full, (ids,)).logits, adapted, atol=1e-12, rtol=0)
        assert (adapted - plain(ids).logits).abs().max() > 0.1


def test_ranks_draw_the_same_adapters_and_keep_the_random_state_that_each_of_them_has(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        model = AutoModelForCausalLM.from_pretrained(policy_directory, dtype=torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("of GPUs, too"))
            add_adapters(model, LORA, seed=0)
        assert torch.equal(torch.get_rng_state(), before)
        drawn.append({name: tensor for name, tensor in model.state_dict().items() if ".lora_A" in name})
    assert_close(*drawn)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.3])
async def test_a_resumed_run_is_the_same_to_the_last_bit(make: Make, tmp_path: Path, dropout: float) -> None:
    lora = replace(LORA, dropout=dropout)
    first, second = make(lora=lora), make(lora=lora, seed=5)
    await train(first, first_step=0, num_steps=2)
    await first.save(tmp_path / "checkpoint")
    figures = await train(first, first_step=2, num_steps=2)
    expected = values(first)
    await second.load(tmp_path / "checkpoint")
    assert await train(second, first_step=2, num_steps=2) == figures
    assert_close(values(second), expected)


@pytest.mark.parametrize("is_tied", [False, True])
async def test_a_checkpoint_holds_the_adapters_and_names_what_they_are_of(
    make: Make, tmp_path: Path, is_tied: bool
) -> None:
    policy_directory = write_policy(tmp_path / "policy", is_tied=is_tied)
    await make(policy_path=str(policy_directory)).save(tmp_path / "adapted")
    saved = FileSystemReader(tmp_path / "adapted" / "state").read_metadata().state_dict_metadata
    assert saved and all(".lora_" in name for name in saved if name.startswith("model."))
    content = json.loads((tmp_path / "adapted" / "adapter.json").read_text())
    assert (content["rank"], content["alpha"], content["base"]) == (4, 6.0, str(policy_directory))
    assert len(content["modules"]) == 2 * len(PROJECTIONS)


@pytest.mark.slow
async def test_checkpoints_of_something_else_are_refused_with_what_to_change(
    make: Make, policy_directory: Path, tmp_path: Path
) -> None:
    adapted, whole = make(), make(lora=None)
    await adapted.save(tmp_path / "adapted")
    await whole.save(tmp_path / "whole")
    refusals = {
        "holds adapters of rank 4 over .* set policy.lora.rank=4": make(lora=None),
        "holds adapters with rank 4, and policy.lora.rank is 8": make(lora=replace(LORA, rank=8)),
        "holds adapters with alpha 6.0, and policy.lora.alpha is 5.0": make(lora=replace(LORA, alpha=5.0)),
        r"other layers \(\d+ differ, such as model.layers.0.mlp": make(lora=replace(LORA, target_modules=["q_proj"])),
        "weights of .*other are others; set policy.path": make(
            policy_path=str(write_policy(tmp_path / "other", seed=1))
        ),
    }
    for message, policy in refusals.items():
        with pytest.raises(CheckpointError, match=message):
            await policy.load(tmp_path / "adapted")
    with pytest.raises(CheckpointError, match="holds all weights and no adapters, and policy.lora.rank is 4"):
        await adapted.load(tmp_path / "whole")
    (tmp_path / "adapted" / "adapter.json").write_text("[]".ljust((tmp_path / "adapted/adapter.json").stat().st_size))
    with pytest.raises(CheckpointError, match=r"adapter.json is damaged"):
        await adapted.load(tmp_path / "adapted")


async def test_the_reference_is_the_policy_without_its_adapters(make: Make, policy_directory: Path) -> None:
    rows = trajectories(5, seed=3)
    policy, untrained = make(has_reference=True, kl_estimator="k3", kl_coef=0.1), make(lora=None)
    expected = as_lists(await untrained.logprobs_of(rows, LogprobModel.POLICY))
    await train(policy, first_step=0, num_steps=2)
    before = as_lists(await policy.logprobs_of(rows, LogprobModel.POLICY))
    found = as_lists(await policy.logprobs_of(rows, LogprobModel.REF))
    assert found == expected and found[0] == 0
    assert as_lists(await policy.logprobs_of(rows, LogprobModel.POLICY)) == before
    assert before[1] != found[1]
    held = sum(1 for module in policy._rank._token_logprobs._model.modules() if isinstance(module, nn.Embedding))
    assert held == 1 and policy._rank._reference is not None


async def test_dropout_is_where_gradients_are_taken_only(make: Make) -> None:
    rows, advantage = trajectories(5, seed=3), advantages(5, seed=4)
    found = []
    for dropout in (0.0, 0.5):
        policy = make(lora=replace(LORA, dropout=dropout))
        logprobs = await policy.logprobs_of(rows, LogprobModel.POLICY)
        await policy.forward_backward(rows, advantage, 0)
        found.append((as_lists(logprobs), gradients(policy)))
    (here, gradients_here), (there, gradients_there) = found
    assert here == there
    name = "model.layers.0.mlp.up_proj.lora_B.default.weight"
    assert not torch.allclose(gradients_here[name], gradients_there[name], atol=1e-3)


async def test_layers_are_chosen_by_their_names(make: Make, tmp_path: Path) -> None:
    chosen = make(lora=replace(LORA, target_modules=["q_proj", "mlp.up_proj"], exclude_modules=["1.mlp.up_proj"]))
    adapted = {name.removesuffix(".lora_A.default.weight") for name in parameters(chosen) if ".lora_A." in name}
    assert adapted == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
    }
    with pytest.raises(PolicyError, match=r"\(down_proj, .*, v_proj\), got lm_head"):
        make(lora=replace(LORA, target_modules=["q_proj", "lm_head"]))
    with pytest.raises(PolicyError, match="exclude_modules must leave a layer that trains"):
        make(lora=replace(LORA, target_modules=["q_proj"], exclude_modules=["q_proj"]))
    with pytest.raises(
        PolicyError, match=r"exclude_modules must name linear layers .*\(down_proj, .*, v_proj\), got qproj"
    ):
        make(lora=replace(LORA, exclude_modules=["lm_head", "qproj"]))


def test_matrices_that_are_no_linear_layers_are_named_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    of_experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
    experts = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **of_experts, head_dim=16))
    total = sum(p.numel() for p in experts.parameters())
    add_adapters(experts, replace(LORA, target_modules=["q_proj"]), seed=0)
    assert not caplog.records
    experts = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **of_experts, head_dim=16))
    add_adapters(experts, LORA, seed=0)
    assert (
        "2 parameters that each hold the matrices of several experts get no adapter and do not train, such as"
        in caplog.text
    )
    assert (
        f"model.layers.0.mlp.experts.gate_up_proj; they are {100 * 4 * 3 * 32 * 16 / total:.0f} % of the model"
        in caplog.text
    )
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    with pytest.raises(
        PolicyError, match=r"policy.lora.rank must be 0 for a GPT2LMHeadModel, got 4: it has no linear layer"
    ):
        add_adapters(gpt2, LORA, seed=0)


async def test_tied_embeddings_stay_tied(tmp_path: Path, make: Make) -> None:
    policy = make(policy_path=str(write_policy(tmp_path / "tied", is_tied=True)))
    await train(policy, first_step=0, num_steps=1)
    assert "lm_head.weight" not in await weights(policy, tmp_path / "update")


@pytest.mark.slow
async def test_gradients_are_the_same_with_activations_recomputed(make: Make) -> None:
    rows, advantage = trajectories(5, seed=3), advantages(5, seed=4)
    kept, recomputed = make(), make(activation_checkpointing=True)
    for policy in (kept, recomputed):
        await policy.forward_backward(rows, advantage, 0)
        await policy.step(num_tokens(rows))
        await policy.forward_backward(rows, advantage, 1)
    assert_close(gradients(recomputed), gradients(kept), atol=1e-6)


def test_every_init_begins_with_nothing(make: Make) -> None:
    found = {init: values(make(lora=replace(LORA, init_method=init))) for init in LoraInit}
    name = "model.layers.0.mlp.up_proj.lora_{}.default.weight"
    assert all(drawn[name.format("B")].abs().max() == 0 for drawn in found.values())
    assert found[LoraInit.gaussian][name.format("A")].std() == pytest.approx(0.25, rel=0.3)
    assert found[LoraInit.kaiming][name.format("A")].abs().max() <= 32**-0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.lora.rank=-1", "policy.lora.rank must be >= 0, got -1"),
        ("policy.lora.alpha=0", r"policy.lora.alpha must be in \(0, inf\), got 0.0"),
        ("policy.lora.alpha=inf", r"policy.lora.alpha must be in \(0, inf\), got inf"),
        ("policy.lora.dropout=1", r"policy.lora.dropout must be in \[0, 1\), got 1.0"),
        ("policy.lora.target_modules=[]", "policy.lora.target_modules must be"),
        ("policy.lora.target_modules=[all-linear,q_proj]", "policy.lora.target_modules must be"),
        ("policy.lora.init_method=pissa", "policy.lora.init_method must be kaiming or gaussian, got 'pissa'"),
    ],
)
def test_keys_that_make_no_adapters_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_overrides(override)


ALONE = ("policy.lora.rank=8", "policy.lora.publish=adapter")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("policy.lora.publish=adapter",),
            r"policy.lora.rank must be in \[1, 512\] with policy.lora.publish=adapter, got 0",
        ),
        ((*ALONE, "policy.lora.rank=513"), r"policy.lora.rank must be in \[1, 512\] .*, got 513"),
        (
            (*ALONE, "trainer.algorithm.policy_loss_type=decoupled_ppo", "training.num_logp_workers=1"),
            "policy.lora.publish must be merged with training.num_logp_workers > 0, got adapter: .* load whole weights",
        ),
        (
            (*ALONE, "engine.device=cuda"),
            "policy.dtype must be bfloat16 with policy.lora.publish=adapter on GPUs, got float32: .* set policy.dtype=",
        ),
        (
            (*ALONE, "engine.extra_args={enable_lora: false}"),
            "engine.extra_args.enable_lora must not be false with policy.lora.publish=adapter; leave it out",
        ),
        (
            (*ALONE, "policy.lora.rank=32", "engine.extra_args={max_lora_rank: 16}"),
            r"engine.extra_args.max_lora_rank must be >= policy.lora.rank \(32\) .*, got 16; leave it out",
        ),
    ],
)
def test_adapters_that_engines_cannot_serve_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*overrides)


def test_the_key_reaches_those_who_publish_and_those_who_serve() -> None:
    alone, merged = config_of(*ALONE), config_of(ALONE[0])
    assert (alone.policy.lora.served_rank, merged.policy.lora.served_rank) == (8, 0)
    assert training_settings(alone, Path("unused"), 1).published_adapter == Adapter(rank=8, alpha=16.0)
    assert training_settings(merged, Path("unused"), 1).published_adapter is None


@pytest.mark.slow
async def test_engines_boot_from_the_weights_that_published_adapters_are_over(tmp_path: Path) -> None:
    """A warm start makes them: whole weights would come with the first publish."""
    short = [f"policy.warm_start.{key}_tokens=1000" for key in ("min", "max", "mixture")]
    small = ("policy.hidden_size=32", "policy.num_layers=1", "policy.intermediate_size=32")
    for overrides, is_trained in ((ALONE, True), ((), False)):
        config = config_of(*overrides, *short, *small, "policy.warm_start.target_accuracy=0", f"cache_dir={tmp_path}")
        files = PolicyFiles(config, Prompts(train=(), held_out=()), say=lambda line: None)
        served = source_of(await files.served())
        same = {name: torch.equal(t, served[name]) for name, t in source_of(await files.trained()).items()}
        assert all(same.values()) == is_trained, same


def test_the_keys_reach_the_adapters() -> None:
    keys = ("rank=8", "alpha=4", "dropout=0.1", "target_modules=[q_proj]", "exclude_modules=[0.q_proj]")
    config = from_overrides(
        "trainer.seed=3", "policy.lora.init_method=gaussian", *(f"policy.lora.{key}" for key in keys)
    )
    settings = training_settings(config, Path("unused"), 1)
    assert (settings.lora, settings.seed) == (config.policy.lora, 3)
    assert training_settings(from_overrides(), Path("unused"), 1).lora is None
