"""Puts its own process into namespaces of its own, with a root file system in memory, and runs commands there on request.

``sandbox`` starts this file by its path, as a script, with a socket. Standard library only. What holds inside, in
the order in which it is set up:

- cgroups with limits of memory and processes, or limits of each process where this user may make no cgroups;
- user, mount, process, network, IPC, host-name and cgroup namespaces: no other process is seen or signalled, and no network exists but
  the loopback interface, with sockets that the caller listens on;
- a root in a tmpfs of limited size: the host's ``/usr`` and a few directories of ``/etc`` (or another root file system) as the lower layer
  of overlays, so that they can be changed and nothing of the host is; no ``/home``, ``/root``, ``/sys`` or other directory of the host;
- ``/proc`` of its own with the kernel's settings read-only, and a ``/dev`` of seven devices;
- no capability that could undo this, none to gain, and no further user namespace.

The kernel is the host's: a fault in it is not confined. All users are the one who started this, who is root inside.
Process 1 ends when the socket is closed, also because its owner was killed, and the kernel then ends all that runs inside.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any, NoReturn

_MAX_REQUEST_BYTES = 1 << 20
_RESERVED_MB = 64
_GROUPS_DIR = "/sys/fs/cgroup"

_CLONE_NEW = {
    "mnt": 0x00020000,
    "cgroup": 0x02000000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    *(1, 2, 4, 8, 32, 4096, 16384),
    1 << 18,
)
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_SIOCSIFFLAGS, _IFF_UP_AND_RUNNING = 0x8914, 0x41
_KEPT_CAPABILITIES = (0, 1, 3, 4, 5, 6, 7, 8, 10, 18)
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, sys_chroot."""
_NUM_CAPABILITIES = 41

_HOST_LAYERS = ("usr", "etc/alternatives", "etc/ca-certificates", "etc/ld.so.conf.d", "etc/ssl/certs", "etc/terminfo")
_HOST_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_HOST_FILES = (
    *("bash.bashrc", "ca-certificates.conf", "debian_version", "inputrc", "ld.so.cache", "ld.so.conf", "localtime"),
    *("magic", "mime.types", "nsswitch.conf", "os-release", "profile", "protocols", "services", "shells"),
)
_OWN_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n",
    "etc/hostname": "sandbox\n",
    "etc/resolv.conf": "",
}
_DIRECTORIES = {
    **dict.fromkeys(
        ("dev", "etc", "home", "logs", "mnt", "opt", "proc", "root", "run", "srv", "var", "var/lib"), 0o755
    ),
    **dict.fromkeys(("tmp", "var/tmp", "dev/shm"), 0o1777),
}
_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
_READ_ONLY_PROC = ("bus", "fs", "irq", "sys")
_HIDDEN_PROC = ("kcore", "keys", "kmsg", "sched_debug", "sysrq-trigger", "timer_list")

_libc = ctypes.CDLL(None, use_errno=True)


def main(control: socket.socket) -> NoReturn:
    """Set up the namespaces and serve requests as process 1; exits with 0 at the end of the socket.

    ``control`` is a socket of whole messages (``SOCK_SEQPACKET``), each a JSON object. The first message to here has the settings:

    - ``base``: a directory to mount at;
    - ``root_dir``: a root file system, or null for the host's;
    - ``disk_mb``, ``memory_mb``, ``max_processes``;
    - ``ports`` to listen on;
    - ``read_only``: pairs of a directory of the host and where it is mounted;
    - ``reserved``: directories that can be written to when the disk is full.

    The first message from here is ``{"ready": true}`` with the sockets of ``ports``, or ``{"error": "..."}``. Requests are ``{"id"}`` with
    four file descriptors, the standard ones and a file of ``{"argv", "cwd", "env"}``, and ``{"kill": id}``; each command is answered
    with ``{"id", "status"}`` or ``{"id", "error"}``.
    """
    settings = json.loads(control.recv(_MAX_REQUEST_BYTES))
    groups = _make_groups(settings)
    try:
        _enter_namespaces()
        gate, opening = os.pipe()
        child = os.fork()
    except OSError as error:
        _remove_groups(groups)
        _fail(control, error)
    if child != 0:
        control.close()
        _wait_for(child, opening, groups)
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.close(opening)
        os.read(gate, 1)  # until this process is in its cgroups
        _make_root(settings)
        _raise_loopback()
        listening = [_listen(port) for port in settings["ports"]]
        _limit(settings, has_groups=bool(groups))
        _drop_capabilities()
    except OSError as error:
        _fail(control, error)
    for *_, fd in groups:
        os.close(fd)
    socket.send_fds(control, [b'{"ready": true}'], [one.fileno() for one in listening])
    for one in listening:
        one.close()
    _serve(control)
    os._exit(0)


def _fail(control: socket.socket, error: OSError) -> NoReturn:
    control.send(json.dumps({"error": str(error)}).encode())
    os._exit(1)


def _make_groups(settings: dict[str, Any]) -> list[tuple[int, str, int]]:
    """New cgroups with the limits, of version 2 or 1; none where this process may make none.

    Each is its parent directory, its name, and the file that takes a process.
    """
    memory_bytes, processes = settings["memory_mb"] << 20, settings["max_processes"]
    if Path(_GROUPS_DIR, "cgroup.controllers").exists():
        wanted = {"": {"memory.max": memory_bytes, "memory.swap.max": 0, "pids.max": processes}}
    else:
        wanted = {"memory": {"memory.limit_in_bytes": memory_bytes}, "pids": {"pids.max": processes}}
    name = f"skyrl-sandbox-{os.getpid()}"
    groups: list[tuple[int, str, int]] = []
    try:
        for controller, values in wanted.items():
            parent = os.open(Path(_GROUPS_DIR, controller), os.O_PATH | os.O_DIRECTORY)
            os.mkdir(name, dir_fd=parent)
            groups.append((parent, name, -1))
            for file, value in values.items():
                Path(_GROUPS_DIR, controller, name, file).write_text(str(value))
            groups[-1] = (parent, name, os.open(f"{name}/cgroup.procs", os.O_WRONLY, dir_fd=parent))
    except OSError:
        _remove_groups(groups)
        return []
    return groups


def _remove_groups(groups: list[tuple[int, str, int]]) -> None:
    for parent, name, _ in groups:
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=parent)


def _wait_for(child: int, opening: int, groups: list[tuple[int, str, int]]) -> NoReturn:
    """Put process 1 into its cgroups, wait until it and all that ran inside has ended, and remove the cgroups.

    This process dies of nothing else: process 1 ends when its socket is closed.
    """
    for *_, procs in groups:
        with contextlib.suppress(OSError):  # it has ended
            os.write(procs, str(child).encode())
    os.close(opening)
    _, status = os.waitpid(child, 0)
    _remove_groups(groups)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _enter_namespaces() -> None:
    user, group = os.getuid(), os.getgid()
    flags = sum(_CLONE_NEW.values())
    _check(_libc.unshare(flags), "unshare (are user namespaces allowed here?)")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _make_root(settings: dict[str, Any]) -> None:
    """Make the root file system and go there; the host's is gone afterwards."""
    base = Path(settings["base"])
    _mount("none", Path("/"), None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", base, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={settings['disk_mb']}m,nr_inodes=200k,mode=755")
    root = base / "root"
    root.mkdir()
    if settings["root_dir"] is not None:
        _overlay(base, Path(settings["root_dir"]), root)
    else:
        _mount(str(root), root, None, _MS_BIND)
        _lay_host_under(base, root)
    for name, mode in _DIRECTORIES.items():
        (root / name).mkdir(mode, parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # another's, in a root file system
            (root / name).chmod(mode)
    for name, text in _OWN_FILES.items():
        with contextlib.suppress(OSError):
            (root / name).unlink(missing_ok=True)
            (root / name).write_text(text)
    for source, target in settings["read_only"]:
        _bind_read_only(Path(source), _directory(root, target))
    for target in settings["reserved"]:
        _mount("tmpfs", _directory(root, target), "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={_RESERVED_MB}m,mode=755")
    _make_proc(root)
    _make_dev(root)
    (root / ".old").mkdir()
    _check(_syscall(_PIVOT_ROOT, bytes(root), bytes(root / ".old")), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/.old", _MNT_DETACH), "umount of the host's root")
    os.rmdir("/.old")
    socket.sethostname("sandbox")


def _directory(root: Path, name: str) -> Path:
    place = root / name.lstrip("/")
    place.mkdir(parents=True, exist_ok=True)
    return place


def _lay_host_under(base: Path, root: Path) -> None:
    """Put the host's programs, and what they need of ``/etc``, under overlays."""
    for name in _HOST_LAYERS:
        if Path("/", name).is_dir():
            (root / name).mkdir(parents=True, exist_ok=True)
            _overlay(base, Path("/", name), root / name)
    for name in _HOST_LINKS:
        here = Path("/", name)
        if here.is_symlink():
            (root / name).symlink_to(os.readlink(here))
        elif here.is_dir():
            (root / name).mkdir()
            _overlay(base, here, root / name)
    for name in _HOST_FILES:
        with contextlib.suppress(OSError):
            shutil.copyfile(Path("/etc", name), root / "etc" / name)


def _overlay(base: Path, lower: Path, target: Path) -> None:
    number = len(list(base.iterdir()))
    upper, work = base / f"upper-{number}", base / f"work-{number}"
    upper.mkdir()
    work.mkdir()
    escaped = str(lower).replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
    _mount("overlay", target, "overlay", _MS_NODEV, f"lowerdir={escaped},upperdir={upper},workdir={work},userxattr")


def _make_proc(root: Path) -> None:
    proc = root / "proc"
    _mount("proc", proc, "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    (proc / "sys/user/max_user_namespaces").write_text("0")
    for name in _READ_ONLY_PROC:
        if (proc / name).exists():
            _bind_read_only(proc / name, proc / name)
    for name in _HIDDEN_PROC:
        if (proc / name).exists():
            _mount("/dev/null", proc / name, None, _MS_BIND)


def _make_dev(root: Path) -> None:
    dev = root / "dev"
    for name in _DEVICES:
        (dev / name).touch()
        _mount(f"/dev/{name}", dev / name, None, _MS_BIND)
    (dev / "pts").mkdir()
    _mount("devpts", dev / "pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    for name, there in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1")):
        (dev / name).symlink_to(there)
    (dev / "stderr").symlink_to("fd/2")


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        fcntl.ioctl(asking, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP_AND_RUNNING))


def _listen(port: int) -> socket.socket:
    listening = socket.socket()
    listening.bind(("127.0.0.1", port))
    listening.listen(64)
    return listening


def _limit(settings: dict[str, Any], *, has_groups: bool) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file_bytes = settings["disk_mb"] << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))  # of an output, which is no file of the tmpfs
    if not has_groups:
        memory_bytes, processes = settings["memory_mb"] << 20, settings["max_processes"]
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))


def _drop_capabilities() -> None:
    for number in range(_NUM_CAPABILITIES):
        if number not in _KEPT_CAPABILITIES:
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    kept = sum(1 << number for number in _KEPT_CAPABILITIES)
    header, both = struct.pack("Ii", 0x20080522, 0), struct.pack("IIIIII", kept, kept, kept, 0, 0, 0)
    _check(_syscall(_CAPSET, header, both), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _serve(control: socket.socket) -> None:
    """Run commands until the socket's end. All children are reaped, also those whose parents have died."""
    waking, woken = socket.socketpair()
    for end in (waking, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    """Process id to the request's."""
    while True:
        ready, _, _ = select.select([control, waking], [], [])
        if waking in ready:
            with contextlib.suppress(BlockingIOError):
                waking.recv(4096)
            _reap(control, running)
        if control in ready and not _answer(control, running):
            return


def _answer(control: socket.socket, running: dict[int, int]) -> bool:
    """Read one request; False at the socket's end."""
    message, fds, _, _ = socket.recv_fds(control, _MAX_REQUEST_BYTES, 4)
    if not message:
        return False
    for fd in fds:
        os.set_inheritable(fd, False)
    request = json.loads(message)
    if "kill" in request:
        for pid in [pid for pid, number in running.items() if number == request["kill"]]:
            for kill in (os.killpg, os.kill):  # one that has just been forked leads no group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        return True
    with open(fds.pop(), encoding="utf-8") as asked:
        request |= json.load(asked)
    try:
        pid = os.fork()
    except OSError as error:  # the limit of processes
        control.send(json.dumps({"id": request["id"], "error": str(error)}).encode())
    else:
        if pid == 0:
            _execute(request, fds)
        running[pid] = request["id"]
    for fd in fds:
        os.close(fd)
    return True


def _execute(request: dict[str, Any], fds: list[int]) -> NoReturn:
    """Become the command; what prevents it is written to its standard error, and its status is 126."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, fd in enumerate(fds):
            os.dup2(fd, number)
        os.chdir(request["cwd"])
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        os.write(2, f"{request['argv'][0]} in {request['cwd']}: {error}\n".encode())
    os._exit(126)


def _reap(control: socket.socket, running: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if (number := running.pop(pid, None)) is not None:
            control.send(json.dumps({"id": number, "status": os.waitstatus_to_exitcode(status)}).encode())


def _bind_read_only(source: Path, target: Path) -> None:
    _mount(str(source), target, None, _MS_BIND | _MS_REC)
    kept = os.statvfs(target).f_flag & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)  # a user namespace may not loosen them
    _mount("none", target, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY | kept)


def _mount(source: str, target: Path, kind: str | None, flags: int, options: str = "") -> None:
    given = (source.encode(), bytes(target), None if kind is None else kind.encode(), flags, options.encode())
    _check(
        _libc.mount(given[0], given[1], given[2], ctypes.c_ulong(flags), given[4]), f"mount {kind or ''} at {target}"
    )


def _syscall(numbers: dict[str, int], *arguments: bytes) -> int:
    result: int = _libc.syscall(numbers[os.uname().machine], *arguments)
    return result


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
