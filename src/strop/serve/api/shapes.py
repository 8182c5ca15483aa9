"""What goes over the wire, as the OpenAPI document has it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from strop.serve.api.job_store import Job, JobState
from strop.serve.api.settings import MAX_RECIPE


class Strict(BaseModel):
    """What a caller sends: nothing that is not known."""

    model_config = ConfigDict(extra="forbid")


class Problem(BaseModel):
    """What is wrong, where, and how to mend it."""

    what: str
    where: str = ""
    mend: str = ""


class Submission(Strict):
    """A recipe to train."""

    recipe: Annotated[str, Field(min_length=1, max_length=MAX_RECIPE)]
    """The YAML text of a recipe or a pipeline."""
    overrides: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=200)] = []
    """`section.key=value`, applied over the recipe."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] | None = None
    """Name of the run, which has to be free; `run.name` of the recipe, or a new name, when not given."""
    backend: Literal["local", "ray"] = "local"
    """Where it runs."""

    @field_validator("name")
    @classmethod
    def _no_line_end(cls, value: str | None) -> str | None:
        # `$` of a pattern also matches before a line end.
        if value is not None and value.endswith("\n"):
            raise ValueError("a name has no line end")
        return value


class JobView(BaseModel):
    """A job. run: the name of its run. wish: what a running job was asked to do and has not done yet. Times are Unix
    seconds."""

    id: str
    run: str
    owner: str
    backend: str
    state: JobState
    wish: str
    attempt: int
    overrides: list[str]
    created: float
    started: float | None
    ended: float | None
    exit_code: int | None
    error: str

    @classmethod
    def of(cls, job: Job) -> JobView:
        """A job as callers see it."""
        values = {key: getattr(job, key) for key in cls.model_fields if key != "run"}
        return cls(run=job.name, **{**values, "overrides": list(job.overrides)})


class RunView(BaseModel):
    """A run at a glance; `docs/service.md` says what the parts are."""

    name: str
    status: str
    step: int
    steps: int
    reward: float | None
    accuracy: float | None
    created: str
    ended: str | None
    id: str
    parent: str | None
    config_hash: str
    scores: dict[str, Any]
    best: dict[str, Any]
    alarms: int
    stopped: str
    error: str


class FileView(BaseModel):
    """A file of a run. path: what to ask for. changed: Unix seconds."""

    path: str
    bytes: int
    changed: float


class MetricsView(BaseModel):
    """Lines of `metrics.jsonl`: step, time, kind and metrics. next: send it as `after` to read on. restarted: the run
    went on from a checkpoint and its lines are sent from the beginning."""

    records: list[dict[str, Any]]
    next: str
    restarted: bool


class LoadView(BaseModel):
    """Lines of `load.jsonl`: time, step, node, and numbers of processors, memory and cards. next: send it as `after` to
    read on. restarted: the file is another one, and its lines are sent from the beginning."""

    records: list[dict[str, Any]]
    next: str
    restarted: bool


class CallerView(BaseModel):
    """Who a token is of."""

    name: str
    role: str
    token: str


class AuditView(BaseModel):
    """Lines of the audit log."""

    lines: list[dict[str, Any]]


class Registration(Strict):
    """A checkpoint to keep as the next version of a model."""

    run: Annotated[str, Field(min_length=1, max_length=200)]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$", max_length=64)]
    checkpoint: Annotated[str, Field(pattern=r"^(latest|best|[0-9]{1,9})$")] = "latest"


class Move(Strict):
    """Where a version is to go."""

    stage: Literal["approved", "retired"]


class VersionView(BaseModel):
    """A version of a model. changes: who moved it to which stage."""

    name: str
    version: int
    stage: str
    registered: str
    by: str
    run: str
    checkpoint: str
    scores: dict[str, float]
    before: dict[str, float]
    lineage: dict[str, Any]
    manifest_sha256: str
    signature: str
    public_key: str
    changes: list[dict[str, str]]
