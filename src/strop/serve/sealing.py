"""Encryption at rest: checkpoints and episodes of a run, for the owner of a key (extra `seal`, libsodium by PyNaCl).

The public half of a key seals, so whoever trains and serves need not be able to read what was sealed before. Each file
has a key of its own, sealed to the public key (X25519), under which it is encrypted in chunks (XChaCha20-Poly1305,
`crypto_secretstream`): chunks cannot be changed, left out, put elsewhere or cut off at the end, and a file not put in
another's place.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop.errors import MissingExtra, RunFailure, UserError
from strop.tracking.atomic import replacing, sync_folder
from strop.tracking.run_directory import read_manifest
from strop.tracking.run_lock import RunLock

SUFFIX = ".sealed"
MAGIC = b"strop-sealed-1\n"
CHUNK = 1 << 20
FOLDERS = ("checkpoints", "episodes")
POINTERS = ("latest", "best")
"""Files in `checkpoints/` that only name one of them; they stay as they are."""


class NotUnsealed(RunFailure):
    """A file that cannot be unsealed: another key, or it was changed."""


def make_key(path: Path) -> str:
    """Write a new private key to a file that only its owner can read; returns the public key.

    Raises:
        UserError: the file is there already.
    """
    public = _nacl().public
    key = public.PrivateKey.generate()
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(f"the key cannot be written: {error.strerror}", where=str(path)) from error
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(f"{bytes(key).hex()}\n")
    return bytes(key.public_key).hex()


def seal_run(run: Path, public: str) -> int:
    """Seal the checkpoints and episodes of a run that nobody trains; returns how many files.

    Raises:
        UserError: there is no run, it is being trained, or this is no public key.
    """
    key = _public(public)
    read_manifest(run)
    lock = RunLock(run)
    try:
        return sum(1 for path in _plain(run) if _seal(path, path.relative_to(run).as_posix(), key))
    finally:
        lock.release()


def unseal_run(run: Path, private: Path) -> int:
    """Undo `seal_run` with the private key; returns how many files.

    Raises:
        UserError: this is no private key. NotUnsealed: a file was sealed for another key, or was changed since.
    """
    key = _private(private)
    read_manifest(run)
    lock = RunLock(run)
    try:
        return sum(1 for path in _sealed(run) if _unseal(path, path.relative_to(run).as_posix(), key))
    finally:
        lock.release()


def _plain(run: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((run / folder).rglob("*")):
            if path.is_file() and not path.is_symlink() and path.suffix != SUFFIX and path.name not in POINTERS:
                yield path


def _sealed(run: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted(path for path in (run / folder).rglob(f"*{SUFFIX}") if path.is_file())


def _seal(path: Path, name: str, public: Any) -> bool:
    nacl = _nacl()
    bindings = nacl.bindings
    key, state = bindings.crypto_secretstream_xchacha20poly1305_keygen(), _state()
    header = bindings.crypto_secretstream_xchacha20poly1305_init_push(state, key)
    box = nacl.public.SealedBox(public).encrypt(key)
    target = path.with_name(path.name + SUFFIX)
    with replacing(target) as temporary, path.open("rb") as source, temporary.open("wb") as out:
        os.fchmod(out.fileno(), 0o600)
        out.write(MAGIC + struct.pack("<H", len(box)) + box + header)
        data = source.read(CHUNK)
        while True:
            after = source.read(CHUNK)
            tag = _tag(last=not after)
            out.write(bindings.crypto_secretstream_xchacha20poly1305_push(state, data, name.encode(), tag))
            if not after:
                break
            data = after
    path.unlink()
    sync_folder(path.parent)
    return True


def _unseal(path: Path, name: str, private: Any) -> bool:
    nacl = _nacl()
    bindings = nacl.bindings
    name = name.removesuffix(SUFFIX)
    try:
        with path.open("rb") as source, replacing(path.with_name(path.name.removesuffix(SUFFIX))) as temporary:
            if source.read(len(MAGIC)) != MAGIC:
                raise NotUnsealed("this is not a sealed file", where=str(path))
            (size,) = struct.unpack("<H", source.read(2))
            key = nacl.public.SealedBox(private).decrypt(source.read(size))
            state = _state()
            header = source.read(bindings.crypto_secretstream_xchacha20poly1305_HEADERBYTES)
            bindings.crypto_secretstream_xchacha20poly1305_init_pull(state, header, key)
            last = False
            with temporary.open("wb") as out:
                while data := source.read(CHUNK + bindings.crypto_secretstream_xchacha20poly1305_ABYTES):
                    if last:
                        raise NotUnsealed("something was added behind its end", where=str(path))
                    plain, tag = bindings.crypto_secretstream_xchacha20poly1305_pull(state, data, name.encode())
                    last = tag == _tag(last=True)
                    out.write(plain)
            if not last:
                raise NotUnsealed("its end is missing", where=str(path))
    except (nacl.exceptions.CryptoError, struct.error, ValueError, RuntimeError) as error:
        if isinstance(error, NotUnsealed):
            raise
        what = "it was sealed for another key, or was changed since"
        raise NotUnsealed(what, where=str(path)) from error
    path.unlink()
    sync_folder(path.parent)
    return True


def _state() -> Any:
    return _nacl().bindings.crypto_secretstream_xchacha20poly1305_state()


def _tag(*, last: bool) -> int:
    bindings = _nacl().bindings
    found: int = (
        bindings.crypto_secretstream_xchacha20poly1305_TAG_FINAL
        if last
        else bindings.crypto_secretstream_xchacha20poly1305_TAG_MESSAGE
    )
    return found


def _public(text: str) -> Any:
    try:
        return _nacl().public.PublicKey(bytes.fromhex(text))
    except (ValueError, TypeError) as error:
        what, mend = "this is not a public key", "give the 64 digits that `strop seal key` printed"
        raise UserError(what, where=text[:80], mend=mend) from error


def _private(path: Path) -> Any:
    try:
        return _nacl().public.PrivateKey(bytes.fromhex(path.read_text(encoding="ascii").strip()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            "this is not a private key", where=str(path), mend="name the file of `strop seal key`"
        ) from error


def _nacl() -> Any:
    try:
        import nacl.bindings
        import nacl.exceptions
        import nacl.public
    except ImportError:
        raise MissingExtra("pynacl", extra="seal", needed_for="encryption at rest") from None
    return nacl
