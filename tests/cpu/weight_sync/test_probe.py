"""The log-prob probe over modelled engines that leave, die or fall silent meanwhile, in virtual time."""

import asyncio
import math

import pytest

from skyrl_async.errors import EngineDeadError, NoEngineError
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.metrics.trace import Trace
from skyrl_async.simulator.clock import run_in_virtual_time
from skyrl_async.simulator.engine import ModelledEngine
from skyrl_async.simulator.models import ModelledPolicy
from skyrl_async.types import EngineOutput, EngineRequest, FinishReason, PauseMode
from skyrl_async.weight_sync.engine_updater import EngineWeightUpdater
from skyrl_async.weight_sync.verifier import WeightVerifier


class Letters:
    def decode(self, token_ids: list[int], **_: object) -> str:
        return ""


class Probed(ModelledEngine):
    """Answers as it is told to."""

    def __init__(self, name: str, answer: str) -> None:
        super().__init__(name, num_tokens_of=lambda prompt, seed: 8)
        self.answer = answer

    async def generate(self, request: EngineRequest) -> EngineOutput:
        if self.answer == "silent":
            await asyncio.get_running_loop().create_future()
        if self.answer == "dead":
            raise EngineDeadError(f"{self.name} is gone")
        if self.answer == "taken out":
            return EngineOutput(finish_reason=FinishReason.ABORT)
        return EngineOutput(
            token_ids=(1, 2), logprobs=(-1.0, -1.25), versions=(3, 3), finish_reason=FinishReason.LENGTH
        )


def probed(*answers: str) -> tuple[float, tuple[str, ...], float]:
    """The gap, who still serves, and the seconds it took."""

    async def main() -> tuple[float, tuple[str, ...], float]:
        engines = [Probed(f"engine-{i}", answer) for i, answer in enumerate(answers)]
        client = InferenceEngineClient(engines, tokenizer=Letters(), max_model_len=100)
        trace, clock = Trace(None, lambda: 0.0), asyncio.get_running_loop().time
        verifier = WeightVerifier(
            client=client,
            policy=ModelledPolicy(),
            updater=EngineWeightUpdater(client=client, pause_mode=PauseMode.KEEP, trace=trace, clock=clock),
            trace=trace,
            probe_prompt_token_ids=[1, 2, 3],
            max_logprob_gap=math.inf,
        )
        gap = (await verifier.check(3, is_first=False))["async/engine_logprob_gap"]
        return gap, tuple(engine.name for engine in client.engines), asyncio.get_running_loop().time()

    return run_in_virtual_time(main())


def test_the_gap_is_of_the_engines_that_answer() -> None:
    assert probed("well", "well") == (0.25, ("engine-0", "engine-1"), 0.0)


def test_an_engine_that_is_taken_out_of_service_meanwhile_is_no_reason_to_stop() -> None:
    assert probed("taken out", "well")[0] == 0.25


def test_contract_8_an_engine_that_never_answers_is_given_up() -> None:
    gap, left, seconds = probed("silent", "dead", "well")
    assert (gap, left) == (0.25, ("engine-2",)) and 0 < seconds <= 600


def test_without_an_answer_there_is_no_gap() -> None:
    with pytest.raises(NoEngineError, match="no inference engine survived the probe"):
        probed("taken out")
