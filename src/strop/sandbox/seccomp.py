"""The system calls that a program in the sandbox does not get: a filter for the kernel, as a classic BPF program.

The namespaces of the sandbox already keep the program from what these calls would reach. The filter is the second wall:
most holes that were found in namespaces were reached through one of them.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping

# Instructions of classic BPF, and offsets in `struct seccomp_data` (linux/bpf_common.h, linux/seccomp.h).
_LOAD, _EQUAL, _GREATER_EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

# Flags of clone() that make a namespace: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACE = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: the families of sockets that a namespace without a network makes harmless."""
_RAW = 3
_X32 = 0x40000000

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Name: number on x86_64, number on aarch64 (arch/x86/entry/syscalls/syscall_64.tbl, asm-generic/unistd.h).
DENIED: Mapping[str, tuple[int | None, int | None]] = {
    # Other processes' memory.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    # Mounts and namespaces.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Parts of the kernel that are large, young, or shared by all namespaces.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "lookup_dcookie": (212, 18),
    "vmsplice": (278, 75),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "_sysctl": (156, None),
    # Memory that no limit of a process counts.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # The machine.
    "syslog": (103, 116),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "nfsservctl": (180, 42),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "vhangup": (153, 58),
}
"""Calls that fail with EPERM."""

_CLONE, _CLONE3, _SOCKET, _IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)


def filter_program(machine: str | None = None) -> bytes:
    """The filter of an architecture.

    Args:
        machine: as `uname -m` says; the one that this runs on when not given.

    Returns:
        `struct sock_filter` after `struct sock_filter`, as `bwrap --seccomp` reads it.

    Raises:
        ValueError: there is no table for the architecture.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise ValueError(f"no table of system calls for {machine}")
    column = list(_ARCHITECTURES).index(machine)
    code = [
        _load(_ARCHITECTURE),
        _jump(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _give(_KILL),
        _load(_NUMBER),
    ]
    if machine == "x86_64":
        # A second set of numbers for the same calls.
        code += [_jump(_GREATER_EQUAL, _X32, 0, 1), _give(_KILL)]
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            code += [_jump(_EQUAL, number, 0, 1), _give(_ERROR | _EPERM)]
    # The C library tries clone3 first and takes clone when there is none; only the flags of clone can be seen here.
    code += [_jump(_EQUAL, _CLONE3[column], 0, 1), _give(_ERROR | _ENOSYS)]
    code += _where(_CLONE[column], [_load(_argument(0)), _jump(_ANY_BIT, _NEW_NAMESPACE, 0, 1), _give(_ERROR | _EPERM)])
    code += _where(
        _IOCTL[column],
        [
            _load(_argument(1)),
            _jump(_EQUAL, _TIOCSTI, 1, 0),
            _jump(_EQUAL, _TIOCLINUX, 0, 1),
            _give(_ERROR | _EPERM),
        ],
    )
    code += _where(
        _SOCKET[column],
        [
            _load(_argument(0)),
            *(_jump(_EQUAL, family, len(_FAMILIES) - index, 0) for index, family in enumerate(_FAMILIES)),
            _give(_ERROR | _EAFNOSUPPORT),
            _load(_argument(1)),
            (0x54, 0, 0, 0xF),  # Keep the type, drop SOCK_NONBLOCK and SOCK_CLOEXEC.
            _jump(_EQUAL, _RAW, 0, 1),
            _give(_ERROR | _EPERM),
        ],
    )
    code.append(_give(_ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


Instruction = tuple[int, int, int, int]


def _where(number: int, body: list[Instruction]) -> list[Instruction]:
    """A body for one system call; where it does not return, the call is allowed."""
    return [_jump(_EQUAL, number, 0, len(body) + 1), *body, _give(_ALLOW)]


def _load(offset: int) -> Instruction:
    return (_LOAD, 0, 0, offset)


def _argument(index: int) -> int:
    """Offset of the low half of an argument, on a little-endian machine."""
    return 16 + 8 * index


def _jump(kind: int, value: int, if_true: int, if_false: int) -> Instruction:
    return (kind, if_true, if_false, value)


def _give(value: int) -> Instruction:
    return (_RETURN, 0, 0, value)
