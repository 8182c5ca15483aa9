"""Submit the quickstart to `strop serve`, follow it, fetch the model: `python examples/client.py [KEY=VALUE ...]`."""

import sys
from pathlib import Path

from strop.serve.client import Client

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"

client = Client()  # STROP_URL and STROP_TOKEN say where, and who asks
job = client.submit(RECIPE, *sys.argv[1:])
for event in client.follow(job["id"]):
    if event.name == "metrics" and "accuracy" in event.data["metrics"]:
        print(f"step {event.data['step']}: accuracy {event.data['metrics']['accuracy']:.1%}")
    elif event.name == "end":
        print(f"{job['run']}: {event.data['state']}")
print("model:", client.download_model(job["run"], "quickstart-model"))
