"""Ray's workers as forks of one process that has imported torch, transformers and vLLM: most of what a worker's boot costs is imports.

    Ray ── "python this_file SOCKET worker.py ..." (its ``py_executable``) ──> client, which waits
                                                                    └── SOCKET ──> server ── fork ──> worker

A worker is a process of its own, with the environment, directory and output that Ray gave to the client. Client and worker end together,
whichever is killed, and all end with the process that started the server. The client imports nothing but the standard library.
"""

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "vllm.v1.engine.input_processor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "starlette.applications",
)
"""Nothing that imports Ray, which reads the environment of its worker when it is loaded."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""What libraries read when they are imported, as the processes of a run have it."""
_EXECUTABLE = "SKYRL_ASYNC_TESTS_WORKERS"
_STREAMS = 3


@contextlib.contextmanager
def forking_workers(directory: Path) -> Iterator[None]:
    """Run a server, from which this process's Ray and those of runs that it starts in this block get their workers."""
    path = directory / "workers.sock"
    command = [sys.executable, "-u", "-m", "tests.cpu.forked_workers", str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | ENVIRONMENT, start_new_session=True
    ) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            os.environ[_EXECUTABLE] = f"{sys.executable} -I -S {__file__} {path}"
            os.environ["RAY_RUNTIME_ENV_HOOK"] = f"{with_forked_workers.__module__}.{with_forked_workers.__name__}"
            yield
        finally:
            for name in (_EXECUTABLE, "RAY_RUNTIME_ENV_HOOK"):
                os.environ.pop(name, None)
            server.stdin.close()


def forking_executable() -> list[str]:
    """The command that takes a program's file and arguments as ``python`` does."""
    return os.environ[_EXECUTABLE].split()


def with_forked_workers(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """Ray's hook, which is called by ``ray.init``."""
    return {**(runtime_env or {}), "py_executable": os.environ[_EXECUTABLE]}


def _run_as_client(path: str, arguments: list[str]) -> int:
    """Have a worker forked; returns its exit code when it ends."""
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(request) + 4096)
        connection.connect(path)
        handles = array.array("i", range(_STREAMS))
        connection.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])
        answer = connection.recv(16)
    return int(answer) if answer else 1


class _Server:
    """Forks a worker per connection. The connection closes with the worker, and the worker is killed with the client."""

    def __init__(self, path: str) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(path)
        self._listening.listen(64)
        self._connections: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._woken, self._waking = socket.socketpair()
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waking.fileno())
        for source, react in ((self._listening, self._fork), (self._woken, self._reap), (sys.stdin, self._end)):
            self._selector.register(source, selectors.EVENT_READ, react)

    def serve(self) -> None:
        """Serve until standard input is closed; a fork leaves this method as the worker."""
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _fork(self) -> None:
        connection, _ = self._listening.accept()
        request, handles, _, _ = socket.recv_fds(connection, 1 << 20, _STREAMS)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for open_one in (self._listening, self._woken, self._waking, connection, *self._connections.values()):
                open_one.close()
            _run_as_worker(handles, **json.loads(request))
        for handle in handles:
            os.close(handle)
        self._connections[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._kill(pid))

    def _kill(self, pid: int) -> None:
        self._selector.unregister(self._connections[pid])
        os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        self._woken.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = self._connections.pop(ended[0])
                with contextlib.suppress(KeyError):
                    self._selector.unregister(connection)
                with contextlib.suppress(OSError):
                    connection.send(str(os.waitstatus_to_exitcode(ended[1])).encode())
                connection.close()

    def _end(self) -> None:
        for pid in self._connections:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _run_as_worker(handles: list[int], arguments: list[str], environment: dict[str, str], directory: str) -> None:
    """Become the program of ``arguments``; does not return."""
    code: object = 1
    try:
        for stream, handle in enumerate(handles):
            os.dup2(handle, stream)
            os.close(handle)
        os.setpgid(0, 0)  # Ray kills the groups of workers
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        random.seed()
        sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def _serve(path: str) -> None:
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack the other threads"
    gc.freeze()
    gc.enable()
    server = _Server(path)
    sys.stdout.write("ready\n")
    server.serve()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _serve(sys.argv[1])
    else:
        sys.exit(_run_as_client(sys.argv[1], sys.argv[2:]))
