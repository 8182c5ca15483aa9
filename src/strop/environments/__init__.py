"""Environments: what answers the policy's turns. This room may import data and rewards, and knows no engine."""

from strop.environments.protocol import Done, Environment, Observation, PolicyTurn
from strop.environments.self_play import Match, Move

__all__ = ["Done", "Environment", "Match", "Move", "Observation", "PolicyTurn"]
