"""Work that goes on in a thread while the loop trains: one piece at a time, and no failure of it is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """One thread's work.

    The thread is no daemon: an interpreter that ends waits for it, so only a kill interrupts it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether there is work that is done, well or not, and that nobody has waited for yet."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, work: Callable[[], object]) -> None:
        """Begin with a piece of work; what was begun before must have been waited for."""
        assert self._thread is None, "one piece of work at a time"

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name=self._name)
        self._thread.start()

    def wait(self) -> bool:
        """Wait until the work is done; returns whether there was any.

        Raises:
            BaseException: what the work raised, once.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return False
        try:
            thread.join()
        except BaseException:
            self._thread = thread
            raise
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True
