"""The loops: the only room that joins all others."""
