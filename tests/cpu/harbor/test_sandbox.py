"""A sandbox on this machine, with real namespaces: what is kept apart, what is limited, what is left."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl_async.harbor.runner.sandbox import TIMED_OUT, Limits, Sandbox, SandboxError
from tests.patience import PATIENCE_S

IN_BACKGROUND = (
    "(exec -a {0} sleep 1000) & until grep -q {0} /proc/$!/cmdline && ! grep -q bash /proc/$!/cmdline; do :; done"
)
"""Leaves a process of this name behind, and ends when it runs."""
LIMITS = Limits(memory_mb=128, disk_mb=32, max_processes=24)


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    base = tmp_path / "base"
    base.mkdir()
    try:
        made = await Sandbox.start(base, LIMITS)
    except SandboxError as error:
        pytest.skip(f"no sandboxes on this machine: {error}")
    async with made:
        yield made


async def printed(sandbox: Sandbox, command: str) -> str:
    done = await sandbox.run(command, timeout_s=PATIENCE_S)
    return (done.output + done.error).decode()


async def test_a_command_sees_programs_but_nothing_else_of_the_host(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    assert "No such file" in await printed(sandbox, f"cat {tmp_path / 'secret'}")
    assert "No such file" in await printed(sandbox, "cat /etc/shadow")
    assert not (await printed(sandbox, "ls -A /root /home /tmp /mnt | grep -v :")).strip()
    # init, sh, ls, and grep if it is there already; a command before may not be gone yet
    assert 3 <= int(await printed(sandbox, "ls /proc | grep -c '^[0-9]'")) <= 6
    assert "HOME=/root" in (seen := await printed(sandbox, "env")) and "PYTEST" not in seen


async def test_what_is_changed_inside_is_not_changed_outside(sandbox: Sandbox) -> None:
    name = f"/usr/sandbox-test-{os.getpid()}"
    is_root = os.getuid() == 0  # of another user's files there is no copy to change
    place = name if is_root else f"/tmp/{Path(name).name}"
    assert await printed(sandbox, f"echo new > {place} && cat {place}") == "new\n"
    assert not os.path.exists(name)  # noqa: ASYNC240


async def test_root_inside_can_change_neither_the_kernel_nor_its_walls(sandbox: Sandbox) -> None:
    assert "Read-only" in await printed(sandbox, "echo 1 > /proc/sys/kernel/panic")
    assert (await sandbox.run("mount -t proc proc /mnt")).status != 0
    assert (await sandbox.run("mount -o remount,rw /proc/sys")).status != 0
    assert (await sandbox.run("unshare -Ur true")).status != 0
    assert (await sandbox.run("chroot /proc/1/root true && mknod /tmp/sda b 8 0")).status != 0


async def test_there_is_no_network_but_forwarded_ports(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    (tmp_path / "base").mkdir()
    ask = "exec 3<>/dev/tcp/127.0.0.1/{0} && echo GET >&3 && cat <&3"
    async with server, await Sandbox.start(tmp_path / "base", LIMITS, forwarded={port: (host, port)}) as sandbox:
        found = await sandbox.run(["bash", "-c", ask.format(port)], timeout_s=PATIENCE_S)
        other = await sandbox.run(["bash", "-c", ask.format(port + 1)], timeout_s=PATIENCE_S)
        interfaces = await printed(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1")
    assert found.output.endswith(b"hello")
    assert b"refused" in other.error
    assert interfaces.split() == ["lo"]


async def test_memory_disk_processes_and_time_are_limited(sandbox: Sandbox) -> None:
    big = "x=$(head -c 200000000 /dev/zero | tr '\\0' x); echo ${#x}"
    assert "200000000" not in await printed(sandbox, big)
    assert "No space" in await printed(sandbox, "head -c 64000000 /dev/zero > /tmp/file; rm -f /tmp/file")
    late = await sandbox.run("sleep 1000 & sleep 1000", timeout_s=0.2)
    assert late.status == TIMED_OUT
    assert await printed(sandbox, "pgrep -c sleep") == "0\n"
    if os.getuid() == 0:  # other users' processes outside count towards theirs
        forked = await sandbox.run("for i in $(seq 40); do sleep 1000 & done; pgrep -c sleep", timeout_s=PATIENCE_S)
        assert b"fork" in forked.error


async def test_a_command_that_ends_with_the_status_of_late_ones_is_not_late(sandbox: Sandbox) -> None:
    found = await sandbox.run(f"exit {TIMED_OUT}", timeout_s=PATIENCE_S)
    assert (found.status, found.is_late) == (TIMED_OUT, False)
    assert (await sandbox.run("sleep 1000", timeout_s=0.1)).is_late


async def test_a_command_that_is_cancelled_at_once_does_not_live_on(sandbox: Sandbox) -> None:
    for _ in range(20):
        running = asyncio.create_task(sandbox.run(["/bin/sleep", "1000"]))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
    assert await printed(sandbox, "while pgrep sleep > /dev/null; do :; done; echo gone") == "gone\n"


async def test_a_long_command_runs_and_one_beyond_the_kernels_limit_fails_like_any_other(sandbox: Sandbox) -> None:
    long = await sandbox.run(["/bin/sh", "-c", "echo $#", "sh", *["x" * 1000] * 500], timeout_s=PATIENCE_S)
    assert (long.status, long.output) == (0, b"500\n")
    too_long = await sandbox.run(f": {'x' * 300_000}", timeout_s=PATIENCE_S)
    assert too_long.status == 126 and b"Argument list too long" in too_long.error
    assert await printed(sandbox, "echo on") == "on\n"


async def test_a_file_is_copied_into_a_directory_that_is_there(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "note").write_text("hello")
    for target in ("/tmp", "/srv/", "/opt/new"):
        await sandbox.put(tmp_path / "note", target)
    assert await printed(sandbox, "cat /tmp/note /srv/note /opt/new") == "hello" * 3


async def test_copies_have_the_mode_that_is_asked_for(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "tools/deep").mkdir(parents=True)
    for name in ("tools/deep/inner", "up"):
        (tmp_path / name).write_text("#!/bin/sh\necho up\n")
        (tmp_path / name).chmod(0o600)
    await sandbox.put(tmp_path / "tools", "/srv/tools", 0o755)
    for target in ("/usr/local/bin", "/srv/other", "/srv/new/"):
        await sandbox.put(tmp_path / "up", target, 0o755)
    command = "/srv/tools/deep/inner && up && /srv/other && /srv/new/up && stat -c %a /srv/other"
    assert await printed(sandbox, command) == "up\n" * 4 + "755\n"


async def test_a_link_that_leads_nowhere_stays_one_and_a_missing_file_is_named(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "note").write_text("hello")
    (tmp_path / "in/there").symlink_to(tmp_path / "note")
    (tmp_path / "in/nowhere").symlink_to("missing")
    await sandbox.put(tmp_path / "in", "/app")
    assert await printed(sandbox, "cat /app/there; readlink /app/nowhere") == "hellomissing\n"
    with pytest.raises(SandboxError, match="missing could not be copied to /app: .*No such file"):
        await sandbox.put(tmp_path / "missing", "/app")


async def test_links_that_lead_in_circles_are_copied_once(sandbox: Sandbox, tmp_path: Path) -> None:
    for name in ("in/a", "in/b", "out"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "note").write_text(name)
    for link, target in (
        ("in/one", "."),
        ("in/two", "."),
        ("in/self", "self"),
        ("in/a/b", "../b"),
        ("in/b/a", "../a"),
        ("in/out", "../out"),
    ):
        (tmp_path / link).symlink_to(target)
    for name in ("one", "two"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "out")
    async with asyncio.timeout(PATIENCE_S):
        await sandbox.put(tmp_path / "in", "/app")
    assert await printed(sandbox, "cat /app/one/two/a/b/a/note /app/out/note") == "in/aout"
    assert await printed(sandbox, "find /app -type f | wc -l") == "3\n"


async def test_files_come_out_as_files_and_no_link_leads_out(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "note").write_text("hello")
    await sandbox.put(tmp_path / "in", "/app")
    await sandbox.put(tmp_path / "in" / "deep" / "note", "/app/copy")
    await sandbox.run("cd /app && ln -s /etc/passwd link && mkfifo pipe && ln -s ../../../outside deep/far")
    await sandbox.get("/app", tmp_path / "out")
    await sandbox.get("/app/copy", tmp_path / "one")
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*"))
    assert found == ["copy", "deep", "deep/note"]
    assert (tmp_path / "out" / "copy").read_text() == (tmp_path / "one").read_text() == "hello"
    with pytest.raises(SandboxError, match="/nothing could not be copied out"):
        await sandbox.get("/nothing", tmp_path / "nothing")


@pytest.mark.skipif(os.getuid() != 0, reason="of another user's files there is no copy to change")
@pytest.mark.parametrize("program", ['tar.real "$@" | gzip', 'exec tar.real -S "$@"'], ids=["packed", "holes"])
async def test_what_comes_out_is_no_larger_than_what_is_read(sandbox: Sandbox, tmp_path: Path, program: str) -> None:
    (tmp_path / "tar").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "tar").chmod(0o755)
    await sandbox.run("mkdir /left && truncate -s 8M /left/zeros && cp /usr/bin/tar /usr/bin/tar.real")
    await sandbox.put(tmp_path / "tar", "/usr/bin/tar")
    with pytest.raises(SandboxError, match="/left could not be copied out: "):
        await sandbox.get("/left", tmp_path / "left")


async def test_what_runs_inside_ends_with_the_sandbox_and_waiting_commands_are_told(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    sandbox = await Sandbox.start(tmp_path / "base", LIMITS)
    mark = f"sandbox-{os.getpid()}"
    await sandbox.run(["bash", "-c", IN_BACKGROUND.format(mark)], timeout_s=PATIENCE_S)
    assert pids_of(mark)
    waiting = asyncio.create_task(sandbox.run("sleep 1000"))
    await asyncio.sleep(0)
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await waiting
    assert not pids_of(mark)


async def test_nothing_is_left_of_a_start_that_is_cancelled_once_it_is_up(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_server, others = asyncio.start_server, psutil.Process().children()

    async def cancelled(*args: Any, **kwargs: Any) -> asyncio.Server:
        starting.cancel()
        return await start_server(*args, **kwargs)

    monkeypatch.setattr(asyncio, "start_server", cancelled)
    starting = asyncio.create_task(Sandbox.start(tmp_path / "base", LIMITS, forwarded={8000: ("127.0.0.1", 1)}))
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert psutil.Process().children() == others


def test_nothing_is_left_after_its_owner_was_killed(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    mark = f"sandbox-owner-{os.getpid()}"
    program = f"""
import asyncio
from pathlib import Path
from skyrl_async.harbor.runner.sandbox import Limits, Sandbox

async def main():
    sandbox = await Sandbox.start(Path({str(tmp_path / "base")!r}), Limits())
    await sandbox.run(["bash", "-c", {IN_BACKGROUND.format(mark)!r}])
    print("up", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        try:
            assert owner.stdout is not None
            if owner.stdout.readline() != b"up\n":
                pytest.skip("no sandboxes on this machine")
            (pid,) = pids_of(mark)
            own = [
                line.rpartition("/")[2]
                for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()
                if "sandbox" in line
            ]
        finally:
            owner.kill()
    deadline = time.monotonic() + PATIENCE_S
    # ``Path.glob`` raises where a directory vanishes meanwhile.
    while pids_of(mark) or any(not set(own).isdisjoint(groups) for _, groups, _ in os.walk("/sys/fs/cgroup")):
        assert time.monotonic() < deadline
        time.sleep(0.02)  # the kernel ends it


def pids_of(mark: str) -> list[int]:
    """Ids of the processes, outside or inside of sandboxes, that go by this name."""
    found: list[int] = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (place / "cmdline").read_bytes().split(b"\0")[0] == mark.encode():
                found.append(int(place.name))
    return found
