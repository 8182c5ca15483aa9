"""Sampler engines, one file each."""
