"""The stages of a run as rows of its trace."""

from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.stages import OnLeft, StageState

_TRACED = {StageState.WAITING_FOR_INPUT, StageState.PROCESSING, StageState.WAITING_FOR_OUTPUT}


def trace_stages(trace: Trace) -> OnLeft:
    """Draw a row per stage; the trace and the stages have one clock."""

    def draw(name: str, state: StageState, item: str, begin: float, end: float) -> None:
        if state in _TRACED and end > begin:
            shown = item if state is StageState.PROCESSING else state.value
            trace.past_span(shown, f"stages/{name}", begin, end, state=state.value, item=item)

    return draw
