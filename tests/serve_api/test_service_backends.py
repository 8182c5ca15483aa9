"""Jobs of several backends: one that does not answer holds up no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from serve_at_hand import SMALL, AtHand

from strop.serve.api.backend_local import Seen


class Backend:
    """Notes what it is asked for. down: fails at whatever it is asked."""

    def __init__(self, *, down: bool = False) -> None:
        self.down = down
        self.started: list[str] = []

    def start(self, job: Any) -> None:
        self._answer()
        self.started.append(job.id)

    def look(self, job: Any) -> Seen:
        self._answer()
        return Seen("alive" if job.id in self.started else "waiting")

    def _answer(self) -> None:
        if self.down:
            raise RuntimeError("nobody there")


def test_a_cluster_that_does_not_answer_holds_up_no_job_of_this_machine(
    at_hand: Callable[..., AtHand], quickstart: str
) -> None:
    there = at_hand()
    jobs = there.service.jobs
    # In this order the cluster is asked first.
    cluster, local = Backend(down=True), Backend()
    jobs.backends = {"ray": cluster, "local": local}  # type: ignore[dict-item]

    def submit(name: str, backend: str) -> str:
        body = {"recipe": quickstart, "overrides": SMALL, "name": name, "backend": backend}
        return str(there.operator("POST", "/api/v1/jobs", json=body).json()["id"])

    far, here = submit("far", "ray"), submit("here", "local")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nobody there"):
            jobs.look()
        assert local.started == [here]
    second = submit("second", "local")
    with pytest.raises(RuntimeError, match="nobody there"):
        jobs.look()
    # One after another, as the settings say.
    assert local.started == [here]
    assert jobs.of(second).state == "queued"
    cluster.down = False
    jobs.look()
    jobs.look()
    assert cluster.started == [far]
