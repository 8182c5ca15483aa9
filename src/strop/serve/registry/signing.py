"""Lists of files by their SHA-256, signed with an Ed25519 key (extra `serve`)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.errors import MissingExtra, RunFailure

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY, PUBLIC = "signing.key", "signing.pub"
MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
FORMAT = "strop-model-1"
_CONTEXT = b"strop model manifest\0"
"""Signed in front of a manifest: a signature of it is one of nothing else."""
_STAGE = b"strop model stage\0"
"""The same in front of a change of stage."""


class NotAsSigned(RunFailure):
    """Files are not those that were signed, or not signed by this key."""


@dataclass(frozen=True)
class SigningKey:
    """The key of a registry, in files that only its owner can read; made when it is first needed."""

    private: Ed25519PrivateKey

    @classmethod
    def of(cls, folder: Path) -> SigningKey:
        """The key in a folder.

        Raises:
            MissingExtra: the package `cryptography` is missing.
        """
        serialization, ed25519 = _cryptography()
        path = folder / KEY
        if not path.exists():
            made = ed25519.Ed25519PrivateKey.generate()
            private = made.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            public = made.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            for file, data, mode in ((path, private, 0o600), (folder / PUBLIC, public, 0o644)):
                with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as out:
                    out.write(data)
        return cls(serialization.load_pem_private_key(path.read_bytes(), password=None))

    @property
    def public(self) -> str:
        """The public key, 64 hexadecimal digits."""
        found: bytes = self.private.public_key().public_bytes_raw()
        return found.hex()

    def sign(self, manifest: bytes) -> str:
        """The signature of a manifest, 128 hexadecimal digits."""
        return self.private.sign(_CONTEXT + manifest).hex()

    def sign_change(self, change: dict[str, Any], behind: str) -> dict[str, Any]:
        """A change of stage with its signature, which holds behind one other signature only."""
        return change | {"signature": self.private.sign(_STAGE + canonical([behind, change])).hex()}


def manifest_of(folder: Path, about: dict[str, Any]) -> bytes:
    """Every file below a folder with its size and SHA-256, and what they are, as canonical JSON.

    Raises:
        NotAsSigned: there is a link or something else that is no plain file.
    """
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise NotAsSigned(f"{name} is not a plain file", where=str(path))
        if path.is_file():
            files[name] = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
    return canonical({"format": FORMAT, "about": about, "files": files})


def canonical(values: Any) -> bytes:
    """One way to write values as JSON."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def check(folder: Path, manifest: bytes, signature: str, public: str) -> None:
    """Check that files are those that were signed, no more and no fewer.

    Args:
        public: the key that must have signed, 64 hexadecimal digits; from somewhere else than the files.

    Raises:
        NotAsSigned: they are not; the first that is wrong is named.
    """
    if not _signed(_CONTEXT + manifest, signature, public):
        mend = "it was changed, or signed by another key"
        raise NotAsSigned("the manifest is not signed by this key", where=str(folder), mend=mend)
    signed = json.loads(manifest)
    if signed.get("format") != FORMAT:
        raise NotAsSigned(f"this is not a manifest of the form {FORMAT}", where=str(folder))
    there = json.loads(manifest_of(folder, {}))["files"]
    for name in sorted({*signed["files"], *there}):
        if name not in there:
            raise NotAsSigned(f"{name} is missing", where=str(folder))
        if name not in signed["files"]:
            raise NotAsSigned(f"{name} was not signed", where=str(folder))
        if signed["files"][name] != there[name]:
            raise NotAsSigned(f"{name} is not the file that was signed", where=str(folder))


def check_changes(changes: Sequence[Mapping[str, Any]], behind: str, public: str, *, where: str) -> None:
    """Check that changes of stage are those that were signed, in this order.

    Args:
        behind: the signature of the manifest, which the first change was signed behind.

    Raises:
        NotAsSigned: one is not. That the last ones were left out is for the caller to see.
    """
    for change in changes:
        unsigned = {name: value for name, value in change.items() if name != "signature"}
        signature = str(change.get("signature", ""))
        if not _signed(_STAGE + canonical([behind, unsigned]), signature, public):
            mend = "it was changed, left out, or signed by another key; look into the audit log"
            raise NotAsSigned(f"its change to {change.get('stage')} is not as signed", where=where, mend=mend)
        behind = signature


def _signed(data: bytes, signature: str, public: str) -> bool:
    """Whether a key has signed this."""
    _, ed25519 = _cryptography()
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):
        return False
    return True


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingExtra("cryptography", extra="serve", needed_for="signing models") from None
    return serialization, ed25519
