"""The quickstart with its loop in sight: `python examples/quickstart.py [KEY=VALUE ...]`; run it again to go on."""

import asyncio
import sys
from pathlib import Path

import strop

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"


async def main() -> None:
    config = strop.load_config(RECIPE, ["run.name=loop", *sys.argv[1:]])
    async with strop.open_run(config) as run:
        await run.begin()  # the warm-up, and the score before
        while not run.done:
            groups = await run.collect()  # completions, scored
            batch = await run.build_batch(groups)  # advantages
            stats = await run.update(batch)  # gradients
            run.step += 1
            await run.publish()  # the engine serves the new weights, and proves it
            await run.look(groups)  # alarms against reward hacking
            run.record(groups, batch, stats)
            await run.evaluate_and_save_if_due()
        print("model:", await run.finish())


asyncio.run(main())
