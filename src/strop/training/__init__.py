"""Updating weights: batches, micro-batches, optimizers, the trainer and its checkpoints."""
