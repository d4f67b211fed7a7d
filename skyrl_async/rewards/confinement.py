"""Confines its own process, then executes an untrusted program; run as a script in a process of its own.

Standard library only, because ``sandbox`` starts it by its path. What holds, in the order in which it is set up:

- limits of CPU time, memory, open files, size of what is written to a file; no core dump;
- no capabilities, and none to gain: also where a container runs as root;
- Landlock (Linux 5.13, where the kernel has it): nothing is read but the interpreter, the system's libraries, the working directory
  and the file that is standard input, and no file is made or written: no limit bounds how many files a program makes, hence how much
  of the disk it fills;
- a seccomp filter: no new process, no socket, no signal to another process, no namespaces, nothing that outlives it.

The first argument has the limits as JSON, the second is the program's path, the third a file descriptor to which one line is written once
all of this holds. The process that started it keeps the time and kills it.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from itertools import chain
from typing import Any

# In the order x86_64, aarch64; None where the machine has no such call.
_REFUSED: dict[str, dict[str, tuple[int, int | None]]] = {
    "processes": {"fork": (57, None), "vfork": (58, None)},
    "signals": {"rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130)},
    "handles of processes": {"pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424)},
    "other processes' memory": {"process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117)},
    "shared memory and queues": {"memfd_create": (319, 279), "mq_open": (240, 180)},
    "the same of System V": {"msgget": (68, 186), "semget": (64, 190), "shmget": (29, 194)},
    "keys": {"add_key": (248, 217), "keyctl": (250, 219), "request_key": (249, 218)},
    "namespaces": {"setns": (308, 268), "unshare": (272, 97)},
    "modes": {"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    "owners": {"chown": (92, None), "fchown": (93, 55), "fchownat": (260, 54), "lchown": (94, None)},
    "attributes": {"fsetxattr": (190, 7), "lsetxattr": (189, 6), "setxattr": (188, 5)},
    "input and output": {"io_uring_setup": (425, 425), "socket": (41, 198)},
    "the kernel": {"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282)},
}
_OF_SELF_ONLY = {"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261)}
"""Calls that may name this process as their first argument, and no other."""
_CLONE, _CLONE3, _CAPSET = (56, 220), (435, 435), (126, 91)
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # on every machine

_AUDIT_ARCHS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_MACHINES = tuple(_AUDIT_ARCHS)
_X32_BIT = 0x40000000
_CLONE_THREAD = 0x00010000

# classic BPF, and the offsets of struct seccomp_data
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 38, 22, 2

_LANDLOCK_VERSION_FLAG, _LANDLOCK_PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = (1 << n for n in (0, 1, 2, 3, 14))
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILES_ONLY = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_ALL_OF_FIRST_VERSION = (1 << 13) - 1
_SYSTEM = (
    *("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/proc/self"),
    *("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"),
)

_libc = ctypes.CDLL(None, use_errno=True)


def is_supported() -> bool:
    """Whether this machine has what the filter is written for."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def limit_resources(*, cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    """Set the limits of this process, soft and hard."""
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def drop_privileges() -> None:
    """Give up every capability, and the means to gain any."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    header, data = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(_libc.syscall(_CAPSET[_machine()], header, data), "capset")


def restrict_files(working_dir: str) -> bool:
    """Leave the interpreter, the system and ``working_dir`` readable, nothing else; False where the kernel has no Landlock."""
    version = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION_FLAG)
    if version < 1:
        return False
    handled = _ALL_OF_FIRST_VERSION | (1 << 13 if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("Q", handled)
    ruleset = _libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    _check(min(ruleset, 0), "landlock_create_ruleset")
    allowed = dict.fromkeys((*_SYSTEM, sys.prefix, sys.base_prefix), _READ)
    allowed["/dev/null"] |= _WRITE_FILE
    if os.path.isfile("/dev/stdin"):  # Landlock has no rule for a pipe
        allowed["/dev/stdin"] = _READ
    for path, rights in (allowed | {working_dir: _READ_FILE | _READ_DIR}).items():
        if os.path.exists(path):
            _allow(ruleset, path, rights & handled)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)
    return True


def _allow(ruleset: int, path: str, rights: int) -> None:
    beneath = os.open(path, os.O_PATH)
    rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & _FILES_ONLY, beneath)
    _check(_libc.syscall(_LANDLOCK_ADD, ruleset, _LANDLOCK_PATH_BENEATH, rule, 0), f"landlock_add_rule {path}")
    os.close(beneath)


def filter_syscalls() -> None:
    """Refuse, with an error number, what a program that only computes has no use for."""
    program = b"".join(struct.pack("HBBI", *instruction) for instruction in _instructions(_machine(), os.getpid()))
    buffer = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_, 0, 0), "seccomp")


def _instructions(machine: int, pid: int) -> list[tuple[int, int, int, int]]:
    """The filter, as (code, jump if true, jump if false, operand)."""

    def refuse(number: int | None, error: int = errno.EPERM) -> list[tuple[int, int, int, int]]:
        return [] if number is None else [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]

    audit_arch = _AUDIT_ARCHS[_MACHINES[machine]]
    filter_ = [(_LOAD, 0, 0, _ARCH), (_IF_EQUAL, 1, 0, audit_arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NR)]
    filter_ += [(_IF_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    for numbers in chain.from_iterable(calls.values() for calls in _REFUSED.values()):
        filter_ += refuse(numbers[machine])
    filter_ += refuse(
        _CLONE3[machine], errno.ENOSYS
    )  # its flags are in memory, which a filter cannot see; libc then calls clone
    filter_ += [(_IF_EQUAL, 0, 4, _CLONE[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    filter_ += [(_IF_BITS, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, _ERRNO | errno.EAGAIN), (_RETURN, 0, 0, _ALLOW)]
    for name, numbers in _OF_SELF_ONLY.items():
        own = 0 if name == "prlimit64" else pid
        filter_ += [(_IF_EQUAL, 0, 4, numbers[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
        filter_ += [(_IF_EQUAL, 1, 0, own), (_RETURN, 0, 0, _ERRNO | errno.EPERM), (_RETURN, 0, 0, _ALLOW)]
    return [*filter_, (_RETURN, 0, 0, _ALLOW)]


def _machine() -> int:
    return _MACHINES.index(platform.machine())


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def main(settings: dict[str, Any], program_path: str, status_fd: int) -> None:
    """Confine this process, say so on ``status_fd``, and execute the program as ``__main__``."""
    with open(program_path, encoding="utf-8") as file:
        source = file.read()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    limit_resources(**settings)
    drop_privileges()
    has_landlock = restrict_files(os.getcwd())
    filter_syscalls()
    os.write(status_fd, b"confined\n" if has_landlock else b"confined without landlock\n")
    os.close(status_fd)
    sys.argv = [program_path]
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(source, "program.py", "exec"), vars(program))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
