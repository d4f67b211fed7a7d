"""Starts the Ray that a run's engines and workers live in, or joins one.

Flows in: the configuration's placement. Flows out: a Ray that this process is connected to, left with the run's stack. Knows not what
runs in it.
"""

import asyncio
import atexit
import logging
import signal

from skyrl_async.composition.closing import ClosingStack, descendants, kill_descendants
from skyrl_async.config.rules.placement import num_cpu_slots
from skyrl_async.config.schema.run import PlacementConfig
from skyrl_async.errors import ConfigError, DeadlineError

_MAX_STARTS = 2

logger = logging.getLogger(__name__)


async def start_ray(config: PlacementConfig, stack: ClosingStack) -> None:
    """A Ray of the run's own, or the one it joins; left with ``stack``.

    Raises:
        ConfigError: the one to join is not there.
        DeadlineError: its own did not come up.
    """
    on_sigterm = signal.getsignal(signal.SIGTERM)
    stack.callback_in_thread("Ray", end_ray)
    try:
        _init_ray(config)
    except SystemExit:
        # Ray's own handler of SIGTERM, while Ray was starting: let the run's handler have the signal.
        signal.signal(signal.SIGTERM, on_sigterm)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(1.0)
        raise
    finally:
        # Ray puts a handler of its own in place, which aborts this process and its clean-up with it.
        signal.signal(signal.SIGTERM, on_sigterm)


def end_ray() -> None:
    """Blocks for ever where Ray's own processes hang; they end with this process all the same, which must not wait again."""
    import ray

    atexit.unregister(ray.shutdown)
    ray.shutdown()


def _init_ray(config: PlacementConfig) -> None:
    import ray

    if config.ray_address != "local":
        try:
            ray.init(address=config.ray_address, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"placement.ray_address={config.ray_address} cannot be joined: {error}") from error
        return
    for num_starts in range(1, _MAX_STARTS + 1):
        before = descendants()
        try:
            _start_local_ray(num_cpu_slots(config))
            return
        # A bare one, where Ray's processes take longer than the 30 seconds that it gives them.
        except Exception as error:
            kill_descendants(but=before)
            if num_starts == _MAX_STARTS:
                raise DeadlineError(
                    f"Ray did not start, in {_MAX_STARTS} attempts: {error} A machine that is very busy is one reason; "
                    "placement.ray_address joins a Ray that runs already"
                ) from error
            logger.warning("Ray did not start (%s); it is started once more", error)


def _start_local_ray(num_cpus: int | None) -> None:
    import ray

    # A notice that a Ray of one's own is protected by a token.
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=512 << 20,
    )
