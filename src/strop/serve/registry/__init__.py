"""Models that are kept by name and version: what they were made of, how they scored, who let them out, and proof that
their files are those."""
