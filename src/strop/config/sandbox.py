"""`sandbox:` where programs run that a model wrote."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from strop.config.base import Auto, NonNegativeInt, PositiveFloat, PositiveInt, StrictModel


class LimitSettings(StrictModel):
    """What a program may use up; whoever takes more is stopped, and that is its own fault."""

    cpu_seconds: PositiveInt = 5
    """Processor time of one process of one run (of one test, say)."""
    wall_seconds: PositiveFloat = 10.0
    """Time that one run may take from its start to its end, without that in which it was ready and other work had
    the processor."""
    total_seconds: PositiveFloat = 60.0
    """Time that all runs of a job (all tests of a completion, say) may take together; runs that come later are not
    started."""
    memory_mib: PositiveInt = 1024
    """Memory in MiB, files included: of each process, and of all together."""
    disk_mib: PositiveInt = 64
    """Size in MiB of everything in its folders, which are in memory; no file can be larger."""
    processes: PositiveInt = 32
    """Processes and threads that exist at the same time."""
    output_kib: PositiveInt = 256
    """What one run may print, in KiB, both channels together; what it returns may be as long."""

    @model_validator(mode="after")
    def _files_are_memory(self) -> Self:
        if self.disk_mib > self.memory_mib:
            raise ValueError(
                f"disk_mib ({self.disk_mib}) is above memory_mib ({self.memory_mib}), and files are kept in memory"
            )
        return self


class SandboxSettings(StrictModel):
    """`sandbox:` where programs run that a model wrote."""

    backend: Literal["auto", "bubblewrap", "remote", "none"] = "auto"
    """`bubblewrap` isolates on this machine (Linux), `remote` asks a sandbox service, `none` does not isolate and
    needs `allow_unsandboxed`. `auto` is `remote` if there is a `url`, else `bubblewrap`, else, if allowed, `none`."""
    allow_unsandboxed: bool = False
    """Let programs of the model run as you, with your files and your network, where nothing can isolate them."""
    url: str | None = None
    """Address of a sandbox service, such as `http://10.0.0.5:8120`."""
    token_variable: str | None = None
    """Environment variable that holds the service's access token; none is sent when not set."""
    python: str | None = None
    """Interpreter of the programs, a path; the one that runs strop when not set."""
    packages: bool = True
    """Let programs import what is installed for that interpreter, beside the standard library."""
    workers: PositiveInt | Auto = "auto"
    """Jobs at the same time; `auto` is one for each core."""
    warm: NonNegativeInt | Auto = "auto"
    """Sandboxes that are kept started and wait for a job; each serves one. `auto` is as many as `workers`; 0 starts
    each when it is needed."""
    limits: LimitSettings = Field(default_factory=LimitSettings)
    """What a program may use up."""
