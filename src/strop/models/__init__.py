"""Hugging Face causal models: making, loading, saving them, and the two things that strop does to their forward pass.

`attention` runs one model over packed token streams or over a key/value cache; `logprobs` turns hidden states into
log-probabilities without ever holding all logits. Both the trainer and the engines stand on this room.
"""
