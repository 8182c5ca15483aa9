"""The maths of post-training as pure functions of tensors, and the named algorithms that combine them.

This room imports torch and nothing else: no files, no processes, no engines, no configuration.
"""
