"""The publisher of weights, and the shared memory that it writes them to.

Raises ``ConfigError`` where the weights would not fit. A directory in shared memory is gone with its process, however that ends: while the
process lives, the kernel holds a lock (flock) on it, which processes in other containers see too. A directory without a lock was left by a
killed process, and the next run removes it.
"""

import contextlib
import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from skyrl_async.chat import ChatRenderer
from skyrl_async.composition.data import Prompts
from skyrl_async.composition.processes import is_supervised
from skyrl_async.composition.time_sharing import leasing_policy
from skyrl_async.config.rules.placement import BROADCASTS, broadcast_backend
from skyrl_async.config.schema.run import Config, WeightTransfer
from skyrl_async.inference.client import InferenceEngineClient
from skyrl_async.inference.policy_files import read_manifest
from skyrl_async.metrics.trace import Trace
from skyrl_async.runtime.device_leases import DeviceGroup
from skyrl_async.training.protocol import SendingPolicy
from skyrl_async.training.workers.logprob_workers import LogprobWorkers
from skyrl_async.types import PauseMode
from skyrl_async.weight_sync.broadcast import WeightBroadcast, from_devices, from_files_alone
from skyrl_async.weight_sync.engine_time_sharing import EngineTimeSharing
from skyrl_async.weight_sync.publisher import WeightPublisher, require_shm_capacity

_PREFIX = "skyrl_async-"


def shared_memory() -> Path:
    """Return the directory whose files are in memory; a temporary directory where a machine has none."""
    return Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())


@contextlib.contextmanager
def directory_in_memory(root: Path) -> Iterator[Path]:
    """Make a directory below ``root`` for this process, deleted at the end. Removes directories of killed processes."""
    for left in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _locked(left, wait=False):
            shutil.rmtree(left, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        directory = _locked_directory(root, stack)
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        yield directory


def _locked_directory(root: Path, stack: contextlib.ExitStack) -> Path:
    """Make and lock a directory; again where another process removed it before it was locked."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        try:
            stack.enter_context(_locked(directory, wait=True))
        except FileNotFoundError:
            continue
        except OSError:  # a file system without locks
            return directory
        if directory.exists():
            return directory


@contextlib.contextmanager
def _locked(directory: Path, *, wait: bool) -> Iterator[None]:
    """Lock the directory. Raises ``OSError`` without locks, or when another process holds it and ``wait`` is false."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def make_publisher(
    config: Config,
    client: InferenceEngineClient,
    policy: SendingPolicy,
    groups: Mapping[str, DeviceGroup],
    renderer: ChatRenderer,
    prompts: Prompts,
    trace: Trace,
    stack: contextlib.ExitStack | contextlib.AsyncExitStack,
    time_sharing: EngineTimeSharing | None = None,
    follower: LogprobWorkers | None = None,
) -> WeightPublisher:
    """Make a publisher; its buckets are deleted with ``stack``.

    The policy gathers under a lease on devices that it shares (``groups``), and sends without one: engines that may hold them wait for
    it. ``follower`` loads each version after the engines.
    """
    directory = stack.enter_context(directory_in_memory(shared_memory()))
    publisher = WeightPublisher(
        client=client,
        policy=leasing_policy(policy, groups),
        directory=directory,
        bucket_bytes=config.weight_sync.send_bucket_mb << 20,
        load_bucket_bytes=config.weight_sync.load_bucket_mb << 20,
        double_buffer=config.weight_sync.double_buffer,
        pause_mode=PauseMode(config.engine.pause_mode.name),
        trace=trace,
        probe_prompt_token_ids=renderer.render(list(prompts.train[0].messages)),
        max_logprob_gap=config.trainer.max_engine_logprob_gap,
        verifies_checksums=_verifies_checksums(config),
        max_retries=config.weight_sync.max_retries,
        hold_engines=time_sharing.holding if time_sharing else contextlib.nullcontext,
        followers=() if follower is None else (follower.load_weights,),
        broadcast=make_broadcast(config, policy) if is_supervised(config) else None,
        share=from_devices(policy) if config.weight_sync.transfer is WeightTransfer.ipc else from_files_alone,
    )
    stack.callback(publisher.close)
    return publisher


def _verifies_checksums(config: Config) -> bool | None:
    """Return ``weight_sync.verify_checksums``; False instead of None where no engine starts later, or only adapters are published."""
    is_wanted = config.weight_sync.verify_checksums
    if is_wanted is None and (not is_supervised(config) or config.policy.lora.served_rank):
        return False
    return is_wanted


def make_broadcast(config: Config, sender: SendingPolicy) -> WeightBroadcast | None:
    """Make what sends weights to engines that cannot or should not map the trainer's files; None where all map them."""
    from skyrl_async.inference.engines.ray import is_on_this_machine

    transfer = config.weight_sync.transfer
    if transfer is WeightTransfer.shm:
        return None
    return WeightBroadcast(
        policy=sender,
        backend=broadcast_backend(config),
        must_receive=lambda engine: transfer in BROADCASTS or not is_on_this_machine(engine),
        bucket_bytes=config.weight_sync.send_bucket_mb << 20,
        timeout_s=config.weight_sync.transfer_timeout_s,
    )


def check_shared_memory(config: Config, policy_dir: Path) -> None:
    """Raise ``ConfigError`` when published weights would not fit into shared memory.

    Adapters alone are small; the first publish checks them.
    """
    if config.policy.lora.served_rank:
        return
    num_elements = sum(math.prod(shape) for _, shape in read_manifest(str(policy_dir)).values())
    num_bytes = num_elements * {"float32": 4, "bfloat16": 2}[config.policy.dtype.name]
    require_shm_capacity(shared_memory(), num_bytes, double_buffer=config.weight_sync.double_buffer)
