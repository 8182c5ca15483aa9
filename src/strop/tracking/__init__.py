"""Tracking: the run directory, metrics, episodes, progress displays. This room imports config only.

The run directory is the only interface to viewers and tools (`docs/architecture.md`, section 5.5):

    run.json              manifest: versions, hashes, seeds, git commit, status, lineage
    run.lock              held (flock) by the process that trains
    config.yaml           the resolved configuration
    metrics.jsonl         one JSON object for each step or evaluation
    timeline.jsonl        one JSON object for each step: when its phases ran, and who worked
    load.jsonl            one JSON object for each look at a machine: processors, memory, cards
    episodes/             step-000012.parquet: what was sampled in a step, token by token
    checkpoints/          step-000012/model and step-000012/state; `latest` holds the name of the newest
    events/               TensorBoard
"""
