"""What runs in an environment worker: the environments of a recipe, made from its settings once more.

It imports no torch: such a process is small and starts quickly.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from strop.cluster.environment_host import EnvironmentHost
from strop.config.adapted_environments import EnvironmentSettings, OpenEnvEnvironment
from strop.config.sandbox import SandboxSettings
from strop.environments.build import build_environments
from strop.rollout.asking import InProcess
from strop.sandbox.build import SharedSandbox


@dataclass(frozen=True)
class EnvironmentTask:
    """What of a prepared recipe an environment worker needs.

    template: the tokenizer's chat template. folder: the driver's working folder, where paths of the recipe begin and
    modules of the user's lie. workers: how many of them there are.
    """

    settings: EnvironmentSettings
    sandbox: SandboxSettings
    template: str | None
    folder: str
    workers: int

    def share(self, index: int) -> EnvironmentSettings:
        """The settings of one worker: what a server allows in all is divided."""
        if not isinstance(self.settings, OpenEnvEnvironment):
            return self.settings
        sessions = self.settings.sessions // self.workers + (index < self.settings.sessions % self.workers)
        return self.settings.model_copy(update={"sessions": sessions})


async def make_environments(*, task: EnvironmentTask, index: int) -> EnvironmentHost:
    """The host of environments of one worker, opened.

    Raises:
        UserError: as `build_environments`.
    """
    if os.path.isdir(task.folder):
        os.chdir(task.folder)
    sandbox = SharedSandbox(task.sandbox)

    async def close_sandbox() -> None:
        sandbox.close()

    try:
        factory = build_environments(task.share(index), task.template, sandbox)
        await factory.open()
    except BaseException:
        sandbox.close()
        raise
    return EnvironmentHost(InProcess(factory, task.settings), [factory.close, close_sandbox])
