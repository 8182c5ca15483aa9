"""A tool that runs Python programs of the policy in the sandbox."""

from __future__ import annotations

from strop.config.sandbox import LimitSettings
from strop.environments.tools import CallError, Tool, function_tool
from strop.sandbox.protocol import Job, RunResult, Sandbox

_ENDS = {
    "timeout": "the program took too long",
    "memory": "the program took too much memory",
    "output_limit": "the program printed too much",
    "killed": "the program was ended",
}


def python_tool(sandbox: Sandbox, limits: LimitSettings) -> Tool:
    """A tool `python(program)`: what the program prints, or how it failed; each call is a process of its own.

    A sandbox that fails is no fault of the program: that error goes on to the episode.
    """

    async def python(program: str) -> str:
        """Runs a Python program and shows what it prints.

        Args:
            program: the whole program; nothing is left of earlier ones.
        """
        result = await sandbox.run(Job("script", program, limits=limits))
        return _told(result.runs[0])

    return function_tool(python)


def _told(run: RunResult) -> str:
    if run.ended == "ok":
        return run.stdout.rstrip("\n") or "(nothing was printed)"
    last = run.stderr.rstrip().splitlines()[-1:] if run.ended == "error" else []
    why = _ENDS.get(run.ended) or (last[0] if last else f"the program ended with code {run.code}")
    raise CallError(f"{run.stdout}{why}" if not run.stdout or run.stdout.endswith("\n") else f"{run.stdout}\n{why}")
