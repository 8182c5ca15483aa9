"""What a sandbox is: it runs a program that nobody trusts, and says how that went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol

from strop.config.sandbox import LimitSettings

Mode = Literal["script", "command", "call", "serve", "check"]
Ended = Literal["ok", "error", "timeout", "memory", "output_limit", "killed", "not_run"]


class SandboxError(Exception):
    """The sandbox itself failed: nothing is known of the program. Never the program's fault."""


@dataclass(frozen=True)
class Job:
    """A program and what it is run on. Each run is a new process in empty folders; one job never meets another.

    mode: `script` runs `source` as Python's main program, `command` runs `argv`; each of `inputs` is what a run reads
    on its standard input. `call` loads `source` as a module and calls a function of it: each of `inputs` is one call
    (`calls.call_input`). `check` runs tests, each of `inputs` one (`calls.check_input`), against the program in
    `partner`, whose mode is `serve`; that one is in a sandbox of its own. files: more files in the working folder, by
    relative path. limits: no higher than those that the sandbox was made with, which hold in any case.
    stop_at_failure: start no further run after one that did not end with `ok`.
    """

    mode: Mode
    source: str = ""
    argv: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ("",)
    files: Mapping[str, bytes] = field(default_factory=dict)
    limits: LimitSettings = field(default_factory=LimitSettings)
    stop_at_failure: bool = False
    partner: Job | None = None

    def __post_init__(self) -> None:
        if (self.mode == "check") != (self.partner is not None):
            raise ValueError("a job of mode `check`, and no other, has a partner")
        if self.partner is not None and self.partner.mode != "serve":
            raise ValueError("the partner of a check serves")
        if self.partner is not None and len(self.partner.inputs) != len(self.inputs):
            raise ValueError(f"there are {len(self.inputs)} tests, and the partner has {len(self.partner.inputs)} runs")
        if (self.mode == "command") != bool(self.argv):
            raise ValueError("a job of mode `command`, and no other, has an argv")
        for name in self.files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"{name!r} is not a path inside of the working folder")

    def to_json(self) -> dict[str, Any]:
        """As plain data; the bytes of files are characters of Latin-1."""
        data = {one.name: getattr(self, one.name) for one in fields(self)}
        data["files"] = {name: content.decode("latin-1") for name, content in self.files.items()}
        data["limits"] = self.limits.model_dump()
        data["partner"] = None if self.partner is None else self.partner.to_json()
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Job:
        """The job of plain data.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is no job.
        """
        given = dict(data)
        given["files"] = {str(name): text.encode("latin-1") for name, text in (given.get("files") or {}).items()}
        given["limits"] = LimitSettings.model_validate(given.get("limits") or {})
        given["argv"], given["inputs"] = (tuple(given.get(key) or ()) for key in ("argv", "inputs"))
        if given.get("partner") is not None:
            given["partner"] = Job.from_json(given["partner"])
        return Job(**given)


@dataclass(frozen=True)
class RunResult:
    """How one run ended and what it said.

    ended: `ok` (exit code 0), `error` (another exit code, or a signal of its own making), `timeout`, `memory`,
    `output_limit`, `killed` (SIGKILL, by itself or for its number of processes), `not_run`. code, signal: the exit
    code, or the signal that ended it; None where the sandbox ended it. stdout, stderr: what it printed, cut at the
    limit. value: what it returned, for `call` and `check`. seconds: from start to end. cpu: processor seconds of its
    first process.
    """

    ended: Ended
    code: int | None = None
    signal: int | None = None
    stdout: str = ""
    stderr: str = ""
    value: str = ""
    seconds: float = 0.0
    cpu: float = 0.0

    @property
    def truncated(self) -> bool:
        """Whether more was printed than is kept."""
        return self.ended == "output_limit"


@dataclass(frozen=True)
class SandboxResult:
    """One result for each of a job's inputs, in order; the partner's too, if there is one."""

    runs: tuple[RunResult, ...]
    partner: tuple[RunResult, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"runs": [asdict(run) for run in self.runs], "partner": [asdict(run) for run in self.partner]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> SandboxResult:
        """The result of plain data.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        return SandboxResult(
            tuple(RunResult(**run) for run in data["runs"]),
            tuple(RunResult(**run) for run in data.get("partner") or ()),
        )


class Sandbox(Protocol):
    """Runs jobs, as many at a time as it has workers; used from any number of threads and event loops."""

    name: str
    workers: int

    def start(self) -> None:
        """Show that it works, by running something, and get warm.

        Raises:
            UserError: it does not work here; the error says how to mend that.
        """
        ...

    async def run(self, job: Job) -> SandboxResult:
        """Run a job to its end.

        Raises:
            SandboxError: the sandbox failed; nothing is known of the program.
        """
        ...

    def close(self) -> None:
        """End every process that it started."""
        ...
