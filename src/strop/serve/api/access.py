"""Who may do what: tokens, of which only hashes are kept, and three roles."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from strop.errors import UserError
from strop.serve.api.database import Database

FILE = "access.db"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS tokens (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, hash BLOB NOT NULL,
    created REAL NOT NULL, expires REAL, revoked REAL
)
"""
_TOKEN = re.compile(r"strop-([0-9a-f]{12})-([A-Za-z0-9_-]{43})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_NOBODY = hashlib.sha256(b"").digest()


class Role(StrEnum):
    """`viewer` reads; `operator` also submits runs, steers its own, and samples; `admin` may do everything."""

    viewer = "viewer"
    operator = "operator"
    admin = "admin"

    def covers(self, other: Role) -> bool:
        """Whether this role may do what the other may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True)
class Caller:
    """Who a request is from: the id of its token, the name it was given to, and the role."""

    token: str
    name: str
    role: Role


@dataclass(frozen=True)
class TokenInfo:
    """A token without its secret. Times are Unix seconds."""

    id: str
    name: str
    role: Role
    created: float
    expires: float | None
    revoked: float | None

    @property
    def works(self) -> bool:
        """Whether it is accepted now."""
        return self.revoked is None and (self.expires is None or time.time() < self.expires)


class Tokens:
    """The tokens of a service, in a file that only its owner can read.

    A token is an id and 256 random bits. Of these the SHA-256 is kept: nobody can guess through so many values, so a
    slow hash would protect nothing and cost every request.
    """

    def __init__(self, state: Path) -> None:
        self._database = Database(state / FILE, _SCHEMA)

    def add(self, name: str, role: Role, *, days: float | None = None) -> str:
        """Make a token; its text is returned once and kept nowhere.

        Args:
            name: whose it is; runs belong to the name. days: after which it is refused; never when None.

        Raises:
            UserError: the name is not a plain one, or days is not above 0.
        """
        if not _NAME.fullmatch(name):
            mend = "use letters, digits and any of _ . @ -, at most 64"
            raise UserError(f"{name!r} is not a name for a token", where="NAME", mend=mend)
        if days is not None and not 0 < days <= 36500:
            raise UserError(f"a token cannot live {days} days", where="--days", mend="give a number above 0")
        token, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
        now = time.time()
        with self._database.writing() as connection:
            connection.execute(
                "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, NULL)",
                (token, name, role.value, _hashed(secret), now, None if days is None else now + 86400 * days),
            )
        return f"strop-{token}-{secret}"

    def list(self) -> list[TokenInfo]:
        """All tokens, oldest first."""
        return [_info(row) for row in self._database.rows("SELECT * FROM tokens ORDER BY created, id")]

    def revoke(self, token: str) -> TokenInfo:
        """Refuse a token from now on.

        Raises:
            UserError: there is no token of this id.
        """
        with self._database.writing() as connection:
            connection.execute("UPDATE tokens SET revoked = coalesce(revoked, ?) WHERE id = ?", (time.time(), token))
        row = self._database.row("SELECT * FROM tokens WHERE id = ?", token)
        if row is None:
            raise UserError(
                f"there is no token {token!r}", where="ID", mend="`strop serve token list` shows their ids, not secrets"
            )
        return _info(row)

    def caller(self, text: str) -> Caller | None:
        """Who a token is of; None for one that is unknown, revoked or expired. Takes the same time for each."""
        match = _TOKEN.fullmatch(text)
        row = self._database.row("SELECT * FROM tokens WHERE id = ?", match[1] if match else "")
        kept = bytes(row["hash"]) if row is not None else _NOBODY
        same = hmac.compare_digest(kept, _hashed(match[2] if match else ""))
        if row is None or match is None or not same:
            return None
        info = _info(row)
        return Caller(info.id, info.name, info.role) if info.works else None

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def _hashed(secret: str) -> bytes:
    return hashlib.sha256(b"strop token\0" + secret.encode()).digest()


def _info(row: object) -> TokenInfo:
    values = dict(row)  # type: ignore[call-overload]
    values.pop("hash")
    return TokenInfo(**values | {"role": Role(values["role"])})
