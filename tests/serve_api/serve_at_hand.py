"""A service in this process, callers of each role, and a run as the trainer leaves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from strop.serve.api.access import Role
from strop.serve.api.app import Service
from strop.serve.api.settings import Limits, ServiceSettings

ROOT = Path(__file__).parents[2]
SMALL = [
    "model.create.hidden_size=32",
    "model.create.layers=1",
    "data.train.arguments.count=200",
    "data.eval.arguments.count=10",
    "warmup.data.arguments.count=200",
    "warmup.steps=3",
    "warmup.batch_size=8",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "evaluation.every=1",
    "run.steps=2",
    "tracking.tensorboard=false",
    "hardware.threads=1",
]
"""Overrides that make the quickstart a matter of a second."""


class Caller:
    """Sends requests with one token, or without any."""

    def __init__(self, client: TestClient, token: str | None) -> None:
        self.client, self.token = client, token

    def __call__(self, method: str, path: str, **more: Any) -> Any:
        headers = {**({"Authorization": f"Bearer {self.token}"} if self.token else {}), **more.pop("headers", {})}
        return self.client.request(method, path, headers=headers, **more)


class AtHand:
    """A service whose jobs are not looked after: what is submitted stays in the queue."""

    def __init__(self, root: Path, **settings: Any) -> None:
        limits = settings.pop("limits", Limits(rate=10_000, burst=10_000, failures=10_000))
        self.root = root
        self.service = Service(ServiceSettings(root=root, limits=limits, **settings))
        self.client = TestClient(self.service.app, base_url="http://localhost", raise_server_exceptions=False)
        self.tokens = {role: self.service.tokens.add(f"the-{role}", role) for role in Role}
        self.anonymous = Caller(self.client, None)
        self.viewer, self.operator, self.admin = (Caller(self.client, self.tokens[role]) for role in Role)

    def audit(self) -> list[dict[str, Any]]:
        """The lines of the audit log, which is whole."""
        self.service.audit.verify()
        return self.service.audit.read(limit=10**6)

    def close(self) -> None:
        self.client.close()
        self.service.close()


def put_run(root: Path, name: str = "done", *, steps: int = 3) -> Path:
    """A finished run as the trainer leaves it, without a trainer."""
    from strop.tracking.metrics import MetricsWriter
    from strop.tracking.run_directory import RunDirectory

    directory = RunDirectory.create(root, name, config_yaml="model: {path: m}\n", config_hash="c0ffee", steps=steps)
    writer = MetricsWriter(directory.metrics_path)
    for step in range(1, steps + 1):
        writer.log(step, {"reward/mean": step / 10, "accuracy": step / 20, "loss": float("nan")})
    writer.close()
    model = directory.checkpoints_folder / f"step-{steps:06d}" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (model / "model.safetensors").write_bytes(bytes(range(256)) * 16)
    (directory.checkpoints_folder / "latest").write_text(f"step-{steps:06d}\n")
    directory.episodes_folder.mkdir()
    (directory.episodes_folder / "step-000001.parquet").write_bytes(b"PAR1 not really")
    directory.update(scores={"before": {"accuracy": 0.1}, "after": {"accuracy": 0.9}})
    directory.close()
    return directory.path
