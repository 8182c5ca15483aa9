"""How a service starts: where it listens, TLS, and that it gives way to what it starts."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serve_at_hand import ROOT

from strop.errors import MissingExtra, UserError
from strop.serve.api.access import Role, Tokens
from strop.serve.api.server import need_extra
from strop.serve.api.settings import ServiceSettings, is_loopback, made_state
from strop.serve.client import Client, ServiceError

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "192.168.1.5", "example.org"])
def test_beyond_this_machine_only_with_tls(tmp_path: Path, host: str) -> None:
    with pytest.raises(UserError, match="can be reached from other machines"):
        ServiceSettings(tmp_path, host=host).check()
    ServiceSettings(tmp_path, host=host, allow_plain=True).check()
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.53"])
def test_this_machine_needs_none(tmp_path: Path, host: str) -> None:
    ServiceSettings(tmp_path, host=host).check()


def test_tls_needs_both_files(tmp_path: Path) -> None:
    (tmp_path / "cert").touch()
    with pytest.raises(UserError, match="a certificate and its key"):
        ServiceSettings(tmp_path, certificate=tmp_path / "cert").check()
    with pytest.raises(UserError, match="there is no file"):
        ServiceSettings(tmp_path, certificate=tmp_path / "cert", key=tmp_path / "key").check()


def test_a_state_that_is_a_link_is_none(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / ".service").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="not a folder of its own"):
        made_state(tmp_path / "runs")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.serve.api.server.find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(MissingExtra, match=r"strop\[serve\]"):
        need_extra()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of this machine, signed by itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (tmp_path / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return tmp_path / "cert.pem", tmp_path / "key.pem"


@pytest.fixture
def encrypted(tmp_path: Path, certificate: tuple[Path, Path]) -> Iterator[tuple[subprocess.Popen[bytes], int, str]]:
    """A service with TLS: its process, its port and a token."""
    root = tmp_path / "runs"
    tokens = Tokens(made_state(root))
    token = tokens.add("alice", Role.viewer)
    tokens.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "strop", "serve", "--root", str(root), "--port", str(port), "--nice", "3"]
    command += ["--certificate", str(certificate[0]), "--key", str(certificate[1])]
    process = subprocess.Popen(command, env=ENVIRONMENT)
    yield process, port, token
    process.terminate()
    process.wait()


def test_a_service_with_tls(
    encrypted: tuple[subprocess.Popen[bytes], int, str], certificate: tuple[Path, Path]
) -> None:
    process, port, token = encrypted
    client = Client(f"https://localhost:{port}", token, authority=certificate[0])
    give_up = time.monotonic() + 60
    while True:
        try:
            assert client.runs() == []
            break
        except (ServiceError, OSError):
            assert time.monotonic() < give_up
            time.sleep(0.1)
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        Client(f"https://localhost:{port}", token).runs()
    plain = Client(f"http://localhost:{port}", token)
    with pytest.raises(Exception, match=r".") as caught:
        plain.runs()
    assert not isinstance(caught.value, ServiceError) or caught.value.status == 0
    # It gives way from its first request on.
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 3


STARTS = """
import os, sys, time
from pathlib import Path
from strop.serve.api import backend_local
from strop.serve.api.job_store import Job, JobState
folder = Path(sys.argv[1])
(folder / "j").mkdir()
code = f"import os; open({str(folder / 'found')!r}, 'w').write(str(os.nice(0)))"
backend_local.command_of = lambda *_: [sys.executable, "-c", code]
before = os.nice(0)
backend = backend_local.LocalBackend(folder, folder)
os.nice(4)
job = Job("j", "n", "o", "local", JobState.running, "", 1, 0, (), 0.0, 0.0, None, None, None, "")
backend.start(job)
backend._runners["j", 1].wait()
assert os.nice(0) == before + 4
print((folder / "found").read_text() == str(before))
"""


def test_runs_keep_the_priority_that_the_service_gives_up(tmp_path: Path) -> None:
    command: list[Any] = [sys.executable, "-c", STARTS, tmp_path]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
