"""A sandbox on this machine: namespaces with a root file system in memory, in which commands run (``sandbox_init`` lists what holds).

    async with await Sandbox.start(base, Limits()) as sandbox:
        done = await sandbox.run("echo hello > note && cat note")

Nothing is left of a sandbox once it is closed, or once its owner has died in any way: processes, mounts and files end with process 1.
"""

import asyncio
import contextlib
import io
import itertools
import json
import os
import socket
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from skyrl_async.harbor.runner import sandbox_init

ENVIRONMENT = {
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "TERM": "xterm-256color",
}
"""The environment of every command; nothing of this process's environment."""
TIMED_OUT = 124
"""Exit status of a command that was killed at its deadline, as of ``timeout``."""
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
_MAX_OUTPUT_BYTES = 4 << 20
_MAX_COPY_BYTES = 256 << 20


class SandboxError(Exception):
    """A sandbox could not be made, or has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What all commands of a sandbox may use together."""

    memory_mb: int = 2048
    """MiB, the files' included; without cgroups, address space of each process."""
    disk_mb: int = 1024
    """MiB of files, which are in memory."""
    max_processes: int = 256
    """Processes and threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a command ended."""

    status: int
    """Exit status; negative: number of the signal; ``TIMED_OUT`` at the deadline."""
    output: bytes
    """Standard output, at most 4 MiB of it."""
    error: bytes
    """Standard error, at most 4 MiB of it."""
    is_late: bool
    """It was killed at its deadline; a command may also exit with ``TIMED_OUT`` itself."""


class Sandbox:
    """A running sandbox; use it on one event loop."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._servers: list[asyncio.Server] = []
        self._carrying: set[asyncio.Task[Any]] = set()
        asyncio.get_running_loop().add_reader(control, self._read)

    @classmethod
    async def start(
        cls,
        base: Path,
        limits: Limits,
        *,
        root_dir: Path | None = None,
        read_only: Sequence[tuple[Path, str]] = (),
        reserved: Sequence[str] = (),
        forwarded: Mapping[int, tuple[str, int]] | None = None,
    ) -> Self:
        """Make a sandbox.

        Args:
            base: an existing directory, absolute like all paths here, over which the sandbox alone sees its own file system.
            limits: what it may use.
            root_dir: root file system that it sees and changes a copy of; None: the host's programs.
            read_only: directories of the host, and where they are seen.
            reserved: directories inside that are not part of the disk: they have 64 MiB each when it is full.
            forwarded: port on the sandbox's 127.0.0.1 to the host and port that connections are carried to.

        Raises:
            SandboxError: this machine cannot make one; the message says what failed.
        """
        forwarded = forwarded or {}
        settings = {
            **asdict(limits),
            "base": str(base),
            "root_dir": None if root_dir is None else str(root_dir),
            "ports": list(forwarded),
            "reserved": list(reserved),
            "read_only": [(str(source), target) for source, target in read_only],
        }
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(sandbox_init.__file__), str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={},
                start_new_session=True,
            )
        finally:
            theirs.close()
        try:
            control.send(json.dumps(settings).encode())
            control.setblocking(False)
            listening = await _ready(control)
            sandbox = cls(process, control)
        except BaseException:
            control.close()
            await _end(process)
            raise
        try:
            for one, target in zip(listening, forwarded.values(), strict=True):
                carry = partial(sandbox._carry, *target)
                sandbox._servers.append(await asyncio.start_server(carry, sock=one, start_serving=False))
            for server in sandbox._servers:
                await server.start_serving()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all that runs inside, and wait until it is gone. Idempotent."""
        for server in self._servers:
            server.close()
        for carrying in self._carrying:
            carrying.cancel()
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._lose("the sandbox was closed")
        await _end(self._process)

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str = "/",
        env: Mapping[str, str] | None = None,
        given: bytes = b"",
        timeout_s: float | None = None,
        max_output_bytes: int = _MAX_OUTPUT_BYTES,
    ) -> Done:
        """Run a command to its end; what it left in the background goes on.

        Args:
            command: for ``sh``, or a program with its arguments.
            env: beside ``ENVIRONMENT``.
            given: its standard input.
            timeout_s: after which its process group is killed; None: no limit.
            max_output_bytes: read of each of its outputs.

        Raises:
            SandboxError: the sandbox has ended.
        """
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        number = next(self._numbers)
        request = {"argv": argv, "cwd": cwd, "env": {**ENVIRONMENT, **(env or {})}}
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        with contextlib.ExitStack() as files:
            stdin, output, error, asked = (_memory_file(files) for _ in range(4))
            for file, content in ((stdin, given), (asked, json.dumps(request).encode())):
                os.write(file, content)
                os.lseek(file, 0, os.SEEK_SET)
            is_late = False
            try:
                self._send({"id": number}, [stdin, output, error, asked])
                async with asyncio.timeout(timeout_s) as deadline:
                    found = await answer
            except TimeoutError:
                if not deadline.expired():
                    raise
                is_late = True
                self._send({"kill": number}, [])
                found = {"status": TIMED_OUT}
            except asyncio.CancelledError:
                with contextlib.suppress(SandboxError):
                    self._send({"kill": number}, [])
                raise
            finally:
                self._waiting.pop(number, None)
            if "error" in found:
                raise SandboxError(f"a command could not be started: {found['error']}")
            written, errors = (os.pread(fd, max_output_bytes, 0) for fd in (output, error))
        if is_late:
            errors += f"\nkilled after {timeout_s:g} s\n".encode()
        return Done(status=found["status"], output=written, error=errors, is_late=is_late)

    async def put(self, source: Path, target: str, mode: int | None = None) -> None:
        """Copy a file or a directory's content from the host to ``target``, as root's. Raises ``SandboxError``.

        A file is copied into ``target`` if that is a directory or ends with a slash. ``mode`` is that of all copies; None: as it is.
        """
        is_file = source.is_file()  # noqa: ASYNC240 (nothing beside its reading)
        if is_file and (target.endswith("/") or await self._has_directory(target)):
            target = f"{target}/{source.name}"
        try:
            packed, directory = _pack(source, target, mode)
        except OSError as error:
            raise SandboxError(f"{source} could not be copied to {target}: {error}") from error
        script = 'mkdir -p "$1" && exec tar -x --no-same-owner -C "$1"'
        done = await self.run(["/bin/sh", "-c", script, "sh", directory], given=packed)
        if done.status != 0:
            raise SandboxError(f"{source} could not be copied to {target}: {_last_line(done.error)}")

    async def _has_directory(self, path: str) -> bool:
        return (await self.run(["/bin/sh", "-c", 'test -d "$1"', "sh", path])).status == 0

    async def get(self, source: str, target: Path) -> None:
        """Copy a file, or a directory's content, from the sandbox to ``target``; links and devices in it are not trusted.

        Raises ``SandboxError``, if there is none or it is larger than 256 MiB.
        """
        script = (
            'if [ -d "$1" ]; then exec tar -c -C "$1" .; else exec tar -c -C "$(dirname "$1")" "$(basename "$1")"; fi'
        )
        done = await self.run(["/bin/sh", "-c", script, "sh", source], max_output_bytes=_MAX_COPY_BYTES)
        if done.status != 0 or len(done.output) >= _MAX_COPY_BYTES:
            words = _last_line(done.error) or f"more than {_MAX_COPY_BYTES >> 20} MiB"
            raise SandboxError(f"{source} could not be copied out: {words}")
        try:
            _unpack(done.output, Path(source).name, target)
        except tarfile.TarError as error:
            raise SandboxError(f"{source} could not be copied out: {error}") from error

    async def _carry(self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a connection from inside to ``host:port``."""
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            there_reader, there_writer = await asyncio.open_connection(host, port)
            with contextlib.closing(there_writer):
                async with asyncio.TaskGroup() as group:
                    group.create_task(_pump(reader, there_writer), name="to the endpoint")
                    group.create_task(_pump(there_reader, writer), name="from the endpoint")
        writer.close()
        self._carrying.discard(task)

    def _send(self, request: Mapping[str, Any], fds: Sequence[int]) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], fds)
        except OSError as error:
            raise SandboxError(f"a command could not be passed to the sandbox: {error}") from error

    def _read(self) -> None:
        try:
            message = self._control.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            asyncio.get_running_loop().remove_reader(self._control)
            self._lose("the sandbox has ended")
            return
        found = json.loads(message)
        if (answer := self._waiting.get(found["id"])) is not None and not answer.done():
            answer.set_result(found)

    def _lose(self, why: str) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(SandboxError(why))


async def _ready(control: socket.socket) -> list[socket.socket]:
    """Wait for the first message. Returns the listening sockets."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(control, lambda: None if readable.done() else readable.set_result(None))
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            await readable
    except TimeoutError as error:
        raise SandboxError(f"the sandbox was not ready within {_START_TIMEOUT_S:g} s") from error
    finally:
        loop.remove_reader(control)
    message, fds, _, _ = socket.recv_fds(control, 1 << 16, 16)
    found = json.loads(message or b'{"error": "its process died"}')
    if "error" in found:
        raise SandboxError(f"this machine cannot make a sandbox: {found['error']}")
    listening = [socket.socket(fileno=fd) for fd in fds]
    for one in listening:
        one.setblocking(False)
    return listening


async def _end(process: asyncio.subprocess.Process) -> None:
    try:
        async with asyncio.timeout(_END_TIMEOUT_S):
            await process.wait()
    except (TimeoutError, asyncio.CancelledError):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class _Archive(tarfile.TarFile):
    """Holds what links lead to; a link that leads nowhere, to its neighbours, or back to a directory it is in, stays one."""

    packed: Path

    def gettarinfo(self, name: Any = None, arcname: str | None = None, fileobj: Any = None) -> tarfile.TarInfo:
        self.dereference = not os.path.islink(name) or not _stays(Path(name), self.packed.resolve())
        return super().gettarinfo(name, arcname, fileobj)


def _stays(link: Path, packed: Path) -> bool:
    """Whether a link is to stay one in an archive of ``packed``: what it leads to is missing, there too, or without an end."""
    if not link.exists():
        return True
    place, target = link.parent.resolve(), link.resolve()
    is_of_neighbours = (
        place.is_relative_to(packed) and target.is_relative_to(packed) and not link.readlink().is_absolute()
    )
    return is_of_neighbours or target in {around.resolve() for around in link.parents}


def _pack(source: Path, target: str, mode: int | None) -> tuple[bytes, str]:
    """The archive that becomes ``target``, and the directory to unpack it in."""
    packed = io.BytesIO()

    def with_mode(member: tarfile.TarInfo) -> tarfile.TarInfo:
        if mode is not None and member.name != ".":
            member.mode = mode
        return member

    with _Archive(fileobj=packed, mode="w") as archive:
        archive.packed = source
        archive.add(source, arcname="." if source.is_dir() else Path(target).name, filter=with_mode)
    return packed.getvalue(), target if source.is_dir() else str(Path(target).parent)


def _unpack(packed: bytes, name: str, target: Path) -> None:
    """Unpack a file called ``name`` to ``target``, or a directory's content into it, without devices and links that lead out.

    Raises ``TarError`` for what becomes larger than it is packed: root inside may have replaced ``tar``.
    """
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:") as archive:
        members = [member for member in archive if not member.isdev()]
        if sum(member.size for member in members) > len(packed):
            raise tarfile.ReadError("its files have holes")
        if [member.name for member in members] == [name] and members[0].isfile():
            target.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(members[0])
            target.write_bytes(content.read() if content else b"")
            return
        target.mkdir(parents=True, exist_ok=True)
        for member in members:
            with contextlib.suppress(tarfile.FilterError):
                archive.extract(member, target, filter="data")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()


def _memory_file(files: contextlib.ExitStack) -> int:
    fd = os.memfd_create("sandbox")
    files.callback(os.close, fd)
    return fd


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else ""
