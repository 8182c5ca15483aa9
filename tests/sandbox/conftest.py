"""One pool of sandboxes for all tests of this folder."""

from sandboxes import pool, run

__all__ = ["pool", "run"]
