"""A capture leaves the stream of its thread as it was, whatever becomes of it. What is captured: `tests/rollout/`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from strop.models import repeated


class Stream:
    def wait_stream(self, _: Stream) -> None: ...


class Cuda:
    """As torch.cuda: the stream of a capture is left only if its end does not fail."""

    def __init__(self, *, fails: bool) -> None:
        self.fails, self.current = fails, Stream()

    def current_stream(self) -> Stream:
        return self.current

    def current_device(self) -> int:
        return 0

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def CUDAGraph(self) -> object:
        return object()

    @contextmanager
    def graph(self, _: object, **options: Any) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"
        before, self.current = self.current, Stream()
        yield
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = before


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_is_on_its_own_stream_after_a_capture(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    cuda = Cuda(fails=fails)
    here, asides = cuda.current, []
    monkeypatch.setattr(repeated, "_aside", lambda _: asides.append(Stream()) or asides[-1])
    for name in ("current_stream", "current_device", "set_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    streams = []

    def compute() -> tuple[torch.Tensor]:
        streams.append(cuda.current)
        return (torch.ones(1),)

    if fails:
        with pytest.raises(RuntimeError, match="previous error during capture"):
            repeated.captured(compute)
    else:
        repeated.captured(compute)
    assert cuda.current is here
    # Warmed up aside, and captured on a third stream.
    assert streams[0] is streams[1] is asides[0]
    assert streams[2] not in (here, asides[0])
