"""Messages over a socket: a length (4 bytes, big-endian), then so many bytes."""

from __future__ import annotations

import socket
import struct
import time

_HEAD = struct.Struct(">I")


class Closed(Exception):
    """The other end is closed."""


class Frames:
    """One end of a connection. What has come of a message is kept when waiting for the rest takes too long."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._read = bytearray()

    def send(self, message: bytes, *, timeout: float | None = None) -> None:
        """Send one message, within so many seconds.

        Raises:
            Closed: nobody reads any more. TimeoutError: nobody read it in time; it may have gone in part.
        """
        self.connection.settimeout(timeout)
        try:
            self.connection.sendall(_HEAD.pack(len(message)) + message)
        except TimeoutError:
            raise
        except OSError as error:
            raise Closed from error

    def receive(self, *, timeout: float | None = None) -> bytes:
        """The next message, if it is whole within so many seconds.

        Raises:
            Closed: there is none and will be none. TimeoutError: it is not whole yet; ask again.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while len(self._read) < _HEAD.size or len(self._read) < self._whole():
            # With no time left, what has come is still read: this thread may have waited for its turn meanwhile.
            self.connection.settimeout(None if end is None else max(0.0, end - time.monotonic()))
            try:
                part = self.connection.recv(1 << 16)
            except (TimeoutError, BlockingIOError):
                raise TimeoutError from None
            except OSError as error:
                raise Closed from error
            if not part:
                raise Closed
            self._read += part
        whole = self._whole()
        message = bytes(self._read[_HEAD.size : whole])
        del self._read[:whole]
        return message

    def _whole(self) -> int:
        return _HEAD.size + int(_HEAD.unpack_from(self._read)[0])

    def close(self) -> None:
        self.connection.close()
