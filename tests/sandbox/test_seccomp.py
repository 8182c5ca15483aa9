"""The filter of system calls, run as the kernel runs it: an interpreter of classic BPF, for both architectures."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable

import pytest

from strop.sandbox.protocol import RunResult
from strop.sandbox.seccomp import DENIED, filter_program

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL = "allow", "kill"
# Calls that any program needs: read, write, openat, mmap, exit_group, futex, execve, wait4, kill, setrlimit, pipe2.
NEEDED = {
    "x86_64": (0, 1, 257, 9, 231, 202, 59, 61, 62, 160, 293),
    "aarch64": (63, 64, 56, 222, 94, 98, 221, 260, 129, 164, 59),
}
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKET = {"x86_64": 41, "aarch64": 198}
IOCTL = {"x86_64": 16, "aarch64": 29}


def answer(machine: str, number: int, *arguments: int, architecture: int | None = None) -> str | int:
    """What the filter says of a call: `allow`, `kill`, or the error that it gives."""
    program = filter_program(machine)
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    values = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("=iIQ6Q", number, ARCHITECTURES[machine] if architecture is None else architecture, 0, *values)
    accumulator, at = 0, 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        if operation == 0x20:  # ld [k]
            accumulator = struct.unpack_from("=I", data, value)[0]
        elif operation == 0x54:  # and #k
            accumulator &= value
        elif operation == 0x15:  # jeq
            at += if_true if accumulator == value else if_false
        elif operation == 0x35:  # jge
            at += if_true if accumulator >= value else if_false
        elif operation == 0x45:  # jset
            at += if_true if accumulator & value else if_false
        elif operation == 0x06:  # ret
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(value) or value & 0xFFFF
        else:
            raise AssertionError(f"an operation {operation:#x} that the kernel may not know")


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_programs_need_is_allowed(machine: str) -> None:
    assert [answer(machine, number) for number in NEEDED[machine]] == [ALLOW] * len(NEEDED[machine])


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_denied_call_fails(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    numbers = {name: both[column] for name, both in DENIED.items() if both[column] is not None}
    assert len(set(numbers.values())) == len(numbers) > 50
    assert {name for name, number in numbers.items() if answer(machine, number) != errno.EPERM} == set()


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_processes_and_threads_can_be_made_and_namespaces_cannot(machine: str) -> None:
    threads = 0x3D0F00  # CLONE_VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS, ...: what a C library passes.
    for flags in (17, 0x01200011, threads):
        assert answer(machine, CLONE[machine], flags) == ALLOW
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert answer(machine, CLONE[machine], 17 | 1 << bit) == errno.EPERM
    assert answer(machine, 435) == errno.ENOSYS


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_sockets_are_those_of_a_namespace_without_network(machine: str) -> None:
    stream, datagram, raw, nonblocking = 1, 2, 3, 0o2004000
    for family in (1, 2, 10):
        for kind in (stream, datagram):
            assert answer(machine, SOCKET[machine], family, kind | nonblocking) == ALLOW
        assert answer(machine, SOCKET[machine], family, raw | nonblocking) == errno.EPERM
    for family in (0, 16, 17, 31, 38, 40, 44):
        assert answer(machine, SOCKET[machine], family, stream) == errno.EAFNOSUPPORT


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_nothing_is_typed_into_a_terminal(machine: str) -> None:
    assert answer(machine, IOCTL[machine], 0, 0x5412) == errno.EPERM
    assert answer(machine, IOCTL[machine], 0, 0x541C) == errno.EPERM
    assert answer(machine, IOCTL[machine], 0, 0x5413) == ALLOW


def test_calls_by_another_set_of_numbers_end_the_program() -> None:
    assert answer("x86_64", 0x40000000) == KILL
    assert answer("x86_64", 11, architecture=0x40000003) == KILL
    assert answer("aarch64", 11, architecture=0x40000028) == KILL


def test_an_unknown_architecture_is_told() -> None:
    with pytest.raises(ValueError, match="riscv64"):
        filter_program("riscv64")


def test_the_kernel_runs_the_filter(run: Callable[..., RunResult]) -> None:
    # Without it the first would make a file and the second would say "no such call" or EPERM for a namespace of users.
    source = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def fails(number, *arguments):
    return errno.errorcode.get(ctypes.get_errno()) if libc.syscall(number, *arguments) == -1 else "done"
machine = os.uname().machine
print(fails({"x86_64": 319, "aarch64": 279}[machine], b"x", 0), fails(435, 0, 0),
      next(line.split()[1] for line in open("/proc/self/status") if line.startswith("Seccomp:")))
"""
    assert run(source).stdout == "EPERM ENOSYS 2\n"
