"""Programs that try to get out, to do harm, or to be held for right: all contained, nothing changed, verdicts right.

A program prints ESCAPED when it has done what it must not be able to do.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from host import SECRET, Host, processes_inside, settles_at

from strop.sandbox.pool import Pool
from strop.sandbox.protocol import RunResult


@dataclass(frozen=True)
class Attempt:
    """ends: ways in which the run may end. says: what it must print, for attempts that go on to say how they failed."""

    source: str
    ends: tuple[str, ...] = ("ok",)
    says: str = "contained"
    changes: tuple[tuple[str, object], ...] = ()


def tries(body: str, error: str = "OSError", before: str = "") -> Attempt:
    """An attempt of several statements, of which each has to fail with the error."""
    lines = ["import os, socket, ctypes, time", *textwrap.dedent(before).strip().splitlines()]
    for statement in textwrap.dedent(body).strip().splitlines():
        lines += ["try:", f"    {statement}", f"except {error}: pass", f"else: print('ESCAPED', {statement!r})"]
    return Attempt("\n".join([*lines, "print('contained')"]))


SYSCALL = """
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    import platform
    column = 0 if platform.machine() == 'x86_64' else 1
    number = NUMBERS[name][column]
    if number is None: raise OSError
    if libc.syscall(number, *arguments) == -1: raise OSError(ctypes.get_errno())
NUMBERS = {
    'ptrace': (101, 117), 'process_vm_writev': (311, 271), 'mount': (165, 40), 'unshare': (272, 97),
    'setns': (308, 268), 'pivot_root': (155, 41), 'keyctl': (250, 219), 'bpf': (321, 280),
    'perf_event_open': (298, 241),
    'userfaultfd': (323, 282), 'io_uring_setup': (425, 425), 'memfd_create': (319, 279), 'shmget': (29, 194),
    'add_key': (248, 217), 'open_by_handle_at': (304, 265), 'clone': (56, 220), 'clone3': (435, 435),
    'reboot': (169, 142), 'syslog': (103, 116), 'init_module': (175, 105), 'settimeofday': (164, 170),
    'sethostname': (170, 161), 'iopl': (172, None), 'personality': (135, 92), 'fsopen': (430, 430),
}
"""

ATTEMPTS: dict[str, Attempt] = {
    # --- files ---
    "read the password file": tries(
        """
        open('/etc/shadow').read()
        open('/etc/sudoers').read()
        open('/proc/1/root/etc/shadow').read()
        """
    ),
    "read the home folder": tries(
        """
        open('{home}').read()
        open('{file}').read()
        open('/proc/1/root{file}').read()
        os.listdir('/home')
        """
    ),
    "write outside of its folder": tries(
        """
        open('/escaped', 'w')
        open('/usr/escaped', 'w')
        open('/usr/bin/python3', 'w')
        open('/etc/escaped', 'w')
        open('/dev/escaped', 'w')
        open('{file}', 'w')
        os.mkdir('{folder}/escaped')
        """
    ),
    "poison the interpreter and the runner for later jobs": tries(
        """
        open(os.__file__, 'a')
        open('/.strop-runner/runner.py', 'a')
        open('/.strop-runner/escaped.py', 'w')
        os.mkdir('/.strop-runner/__pycache__/escaped')
        open(os.path.join(os.path.dirname(os.__file__), 'site-packages', 'escaped.pth'), 'w')
        """
    ),
    "follow a symbolic link out": tries(
        """
        open('link').read()
        open('link', 'w')
        open('up').read()
        """,
        before="os.symlink('{file}', 'link'); os.symlink('../../../../../../..{file}', 'up')",
    ),
    "make a hard link to a file of the system, or a device": tries(
        """
        os.link('/usr/bin/env', 'env')
        os.mknod('memory', 0o20666, os.makedev(1, 1))
        os.mknod('disk', 0o60666, os.makedev(8, 0))
        open('/dev/mem', 'rb')
        open('/dev/kmsg', 'rb')
        open('/dev/vda', 'rb')
        """
    ),
    "become root": tries(
        """
        os.setuid(0)
        os.setgid(0)
        os.seteuid(0)
        os.chown('.', 0, 0)
        os.setgroups([0])
        """
    ),
    "use a program that makes its user root": Attempt(
        """
        import os, shutil, subprocess
        shutil.copy("/usr/bin/env", "mine"); os.chmod("mine", 0o6755)
        for command in (["./mine", "id", "-u"], ["su", "-c", "id -u"], ["mount", "-t", "tmpfs", "x", "/sandbox"]):
            try:
                done = subprocess.run(command, capture_output=True, text=True, input="")
            except OSError:
                continue
            if done.returncode == 0 and done.stdout.strip() in ("0", ""): print("ESCAPED", command, done)
        print("contained")
        """
    ),
    # --- the kernel ---
    "mount": tries("call('mount', b'x', b'/sandbox', b'tmpfs', 0, None)\ncall('fsopen', b'tmpfs', 0)", before=SYSCALL),
    "make namespaces": tries(
        """
        call('unshare', 0x10000000)
        call('unshare', 0x00020000)
        call('clone', 0x10000000 | 17, 0, 0, 0, 0)
        call('clone', 0x40000000 | 17, 0, 0, 0, 0)
        call('clone3', 0, 0)
        call('setns', 0, 0)
        call('pivot_root', b'.', b'.')
        os.chroot('.')
        """,
        before=SYSCALL,
    ),
    "ask for dangerous parts of the kernel": tries(
        """
        call('bpf', 0, 0, 0)
        call('perf_event_open', 0, 0, -1, -1, 0)
        call('userfaultfd', 1)
        call('io_uring_setup', 1, ctypes.create_string_buffer(120))
        call('keyctl', 0, -3, 1)
        call('add_key', b'user', b'x', b'y', 1, -3)
        call('open_by_handle_at', 0, 0, 0)
        call('init_module', 0, 0, b'')
        call('syslog', 3, ctypes.create_string_buffer(99), 99)
        call('iopl', 3)
        call('personality', 0x0400000)
        """,
        before=SYSCALL,
    ),
    "set clock and hostname, reboot": tries(
        """
        call('settimeofday', 0, 0)
        call('sethostname', b'escaped', 7)
        socket.sethostname('escaped')
        time.clock_settime(0, time.time())
        call('reboot', 0xfee1dead, 672274793, 0, 0)
        """,
        before=SYSCALL,
    ),
    "change the kernel through its files": tries(
        """
        os.open('/proc/sys/kernel/core_pattern', os.O_WRONLY)
        os.open('/proc/sys/kernel/hostname', os.O_WRONLY)
        os.open('/proc/sys/vm/drop_caches', os.O_WRONLY)
        os.open('/proc/sysrq-trigger', os.O_WRONLY)
        os.open('/proc/self/oom_score_adj', os.O_WRONLY)
        os.open('/proc/self/uid_map', os.O_WRONLY)
        os.open('/sys/fs/cgroup/release_agent', os.O_WRONLY)
        os.listdir('/sys/fs/cgroup')
        """
    ),
    # --- other processes ---
    "kill the parent": Attempt(
        """
        import os, signal
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGKILL, signal.SIGSEGV):
            os.kill(os.getppid(), number)
            os.kill(1, number)
        print("contained")
        """
    ),
    "signal everybody": Attempt(
        """
        import os, signal
        for number in (signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
            try: os.kill(-1, number)
            except ProcessLookupError: pass
        for pid in [*range(2, 5000), {bystander}]:
            if pid != os.getpid():
                try: os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError): pass
                else: print("ESCAPED", pid)
        print("contained")
        """
    ),
    "trace the process above": tries(
        """
        call('ptrace', 16, 1, 0, 0)
        call('ptrace', 0x4206, 1, 0, 0)
        call('process_vm_writev', 1, 0, 0, 0, 0, 0)
        open('/proc/1/mem', 'r+b')
        open('/proc/1/mem', 'rb')
        open('/proc/1/environ').read()
        os.listdir('/proc/1/fd')
        os.readlink('/proc/1/exe')
        open('/proc/1/maps').read()
        os.pidfd_open(1) and call('ptrace', 16, os.getppid(), 0, 0)
        """,
        before=SYSCALL,
    ),
    "look at the machine's processes": Attempt(
        """
        import os
        pids = [name for name in os.listdir("/proc") if name.isdigit()]
        if len(pids) > 2: print("ESCAPED", pids)
        for pid in pids:
            for name in ("cmdline", "environ", "status"):
                try: text = open(f"/proc/{{pid}}/{{name}}", "rb").read()
                except OSError: continue
                if b"{secret}" in text or b"pytest" in text: print("ESCAPED", pid, name)
        print("contained")
        """
    ),
    "find something in the environment": Attempt(
        """
        import os
        known = {{"HOME", "TMPDIR", "PATH", "LANG", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PWD"}}
        more = [name for name in os.environ if name not in known and not name.endswith("_NUM_THREADS")]
        print("ESCAPED" if more else "contained", more)
        """
    ),
    "use an open file or socket": Attempt(
        """
        import os, stat
        for number in range(3, 1024):
            try: mode = os.fstat(number).st_mode
            except OSError: continue
            if stat.S_ISSOCK(mode) or stat.S_ISDIR(mode) or stat.S_ISREG(mode): print("ESCAPED", number, oct(mode))
        print("contained")
        """
    ),
    # --- the network ---
    "connect to this machine": tries(
        """
        socket.create_connection(('127.0.0.1', {port}), 1)
        socket.create_connection(('localhost', {port}), 1)
        socket.socket(socket.AF_UNIX).connect('\\0{abstract}')
        """
    ),
    "connect to the outside": tries(
        """
        socket.create_connection(('1.1.1.1', 53), 1)
        socket.create_connection(('169.254.169.254', 80), 1)
        socket.getaddrinfo('example.com', 80)
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).sendto(b'x', ('2001:4860:4860::8888', 53))
        """
    ),
    "open raw and unusual sockets": tries(
        """
        socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
        socket.socket(40, socket.SOCK_STREAM)
        socket.socket(38, socket.SOCK_SEQPACKET)
        """
    ),
    # --- using things up ---
    "fork without end": Attempt(
        """
        import os
        while True:
            try: os.fork()
            except OSError: pass
        """,
        ends=("timeout", "killed"),
        says="",
    ),
    "start threads without end": Attempt(
        """
        import threading, time
        def sleep(): time.sleep(3600)
        try:
            for _ in range(1000): threading.Thread(target=sleep, daemon=True).start()
            print("ESCAPED")
        except RuntimeError: print("contained")
        """,
        ends=("ok", "killed"),
        says="",
    ),
    "take memory": Attempt("block = bytearray(1 << 30); print('ESCAPED')", ends=("memory", "error"), says=""),
    "take memory bit by bit": Attempt(
        "blocks = []\nwhile True: blocks.append(bytes(1 << 20))", ends=("memory", "error", "killed"), says=""
    ),
    "take memory in many processes": Attempt(
        """
        import os, time
        for _ in range(10):
            if os.fork() == 0:
                block = bytearray(b"x") * (150 << 20)
                time.sleep(60)
        time.sleep(60)
        print("ESCAPED")
        """,
        ends=("memory", "killed"),
        says="",
    ),
    "take memory that belongs to no process": Attempt(
        """
        import mmap, os, time
        for _ in range(10):
            if os.fork() == 0:
                shared = mmap.mmap(-1, 150 << 20)
                for _ in range(150): shared.write(b"x" * (1 << 20))
                time.sleep(60)
        time.sleep(60)
        print("ESCAPED")
        """,
        ends=("memory", "killed"),
        says="",
    ),
    "keep memory in unnamed files": tries(
        "call('memfd_create', b'x', 0)\nos.memfd_create('x')\ncall('shmget', 0, 1 << 28, 0o1600)", before=SYSCALL
    ),
    "fill the disk": Attempt(
        """
        try:
            for number in range(1000):
                with open(f"file{number}", "wb") as file: file.write(b"x" * (1 << 20))
            print("ESCAPED")
        except OSError as error: print("contained", error)
        """
    ),
    "write one large file": Attempt(
        """
        import os
        try:
            with open("/dev/shm/large", "wb") as file:
                for _ in range(1000): file.write(b"x" * (1 << 20))
            print("ESCAPED")
        except OSError as error: print("contained", error)
        """
    ),
    "make files without end": Attempt(
        "number = 0\nwhile True:\n    open(f'f{number}', 'w').close()\n    number += 1",
        ends=("memory", "timeout"),
        says="",
        changes=(("memory_mib", 48),),
    ),
    "print a gigabyte": Attempt(
        "import sys\nfor _ in range(1 << 10): sys.stdout.write('x' * (1 << 20))\nprint('ESCAPED')",
        ends=("output_limit",),
        says="xxx",
    ),
    "print errors without end": Attempt(
        "import os\nwhile True: os.write(2, b'y' * 4096)", ends=("output_limit",), says=""
    ),
    "sleep for ever": Attempt("import time\ntime.sleep(1e6)", ends=("timeout",), says=""),
    "compute for ever and take no signal": Attempt(
        """
        import signal
        for number in range(1, 64):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: pass
        """,
        ends=("timeout",),
        says="",
    ),
    "catch SIGTERM and stay": Attempt(
        """
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: print("ESCAPED"))
        while True: time.sleep(1)
        """,
        ends=("timeout",),
        says="",
    ),
    "leave threads that never end": Attempt(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,)).start()\nprint('started')",
        ends=("timeout",),
        says="",
    ),
    "leave a daemon behind": Attempt(
        """
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in range(3): os.close(number)
                while True: time.sleep(0.01)
            os._exit(0)
        print("contained")
        """
    ),
    "leave a daemon that holds its output open": Attempt(
        "import os, time\nif os.fork() == 0: time.sleep(3600)\nelse: print('contained')"
    ),
    "recurse without end": Attempt("def f(): return f()\nf()", ends=("error",), says=""),
    "recurse until the stack breaks": Attempt(
        """
        import sys
        sys.setrecursionlimit(1 << 30)
        class A:
            def __getattr__(self, name): return getattr(self, name + "x")
        def f(x): return sorted([x], key=f)
        f(1)
        """,
        ends=("error", "memory", "timeout", "killed"),
        says="",
    ),
    "nest code until the parser breaks": Attempt(
        "exec('(' * 100_000)\nprint('ESCAPED')", ends=("error", "memory", "output_limit"), says=""
    ),
    "delete its own script and everything else": Attempt(
        """
        import os, shutil
        os.unlink(__file__)
        for folder in ("/sandbox", "/dev/shm", "/tmp", "/usr/bin", "/.strop-runner"):
            shutil.rmtree(folder, ignore_errors=True)
        print("contained" if os.path.exists("/usr/bin") else "ESCAPED")
        """
    ),
    "make folders that cannot be removed": Attempt(
        """
        import os
        os.makedirs("a/b"); open("a/b/c", "w").close(); os.chmod("a/b", 0); os.chmod("a", 0)
        for _ in range(400):
            os.mkdir("deep"); os.chdir("deep")
        try: os.chmod("/sandbox", 0)
        except PermissionError: pass
        print("contained")
        """
    ),
    "kill itself": Attempt("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", ends=("killed",), says=""),
    "crash": Attempt("import ctypes\nctypes.string_at(0)", ends=("error",), says=""),
}  # fmt: skip


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    made = Host(tmp_path_factory.mktemp("host"))
    yield made
    made.close()


def filled(source: str, host: Host) -> str:
    """The program with what there is to find on this machine."""
    source = textwrap.dedent(source)
    for name, value in {
        "{home}": host.home, "{file}": host.file, "{folder}": host.folder, "{port}": host.port,
        "{abstract}": host.abstract_name, "{bystander}": host.bystander.pid, "{secret}": SECRET,
        "{{": "{", "}}": "}",
    }.items():  # fmt: skip
        source = source.replace(name, str(value))
    return source


def test_the_suite_is_as_long_as_it_should_be() -> None:
    assert len(ATTEMPTS) >= 25


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_is_contained(name: str, run: Callable[..., RunResult], host: Host, pool: Pool) -> None:
    attempt = ATTEMPTS[name]
    result = run(filled(attempt.source, host), **dict(attempt.changes))
    assert "ESCAPED" not in result.stdout
    assert SECRET not in result.stdout + result.stderr
    assert result.ended in attempt.ends, result
    assert attempt.says in result.stdout, result
    assert not host.harm()
    # Nothing of it is left: only the sandboxes are there that wait for the next jobs, each with its runner alone.
    assert settles_at(pool.warm), processes_inside()
    # And the next job is served.
    assert run("print(6 * 7)").stdout == "42\n"
