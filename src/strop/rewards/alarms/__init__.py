"""Alarms against reward hacking: statistics of a step's completions, and when they are unusual for a run."""
