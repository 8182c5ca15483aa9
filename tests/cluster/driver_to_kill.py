"""Starts two workers, prints their process ids, and waits to be killed: ADDRESS FOLDER busy|idle."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from strop.cluster.group import WorkerGroup
from strop.cluster.placement import Ask, place
from strop.cluster.session import open_session
from strop.cluster.supervision import Supervisor
from strop.config.cluster import SupervisionSettings


async def main(address: str, folder: str, state: str) -> None:
    open_session(address or None, cpus=4, store_mb=100)
    placement = await place([Ask("trainer", 2, "cpu")], wait=60)
    supervisor = Supervisor(SupervisionSettings())
    group = await WorkerGroup.start(
        placement.roles["trainer"], supervisor, run="killed", logs=Path(folder) / "logs", threads=0
    )
    await group.make("toys:make_toy")
    asked = asyncio.ensure_future(group.call("sleep", 600)) if state == "busy" else None
    await asyncio.sleep(0.5)
    print(json.dumps([worker.pid for worker in group.workers]), flush=True)
    await (asked or asyncio.sleep(600))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
