"""Sampling: episodes, sampler engines, admission, the collector and its window."""
