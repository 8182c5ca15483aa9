"""A taskset of `verifiers` for the tests, with rewards and a tool: `taskset: tiny_taskset`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import verifiers.v1 as vf


class WordData(vf.TaskData):
    """A word that is wanted."""

    answer: str


class WordTaskConfig(vf.TaskConfig):
    """Whether there is a tool, and how long scoring takes."""

    tools: bool = False
    pause: float = 0.0


class Words(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """One tool."""

    @vf.tool
    async def twice(self, text: str) -> str:
        """Says it twice."""
        return text + text


class WordTask(vf.Task[WordData, vf.State, WordTaskConfig]):
    """Say the word."""

    @vf.reward(weight=2.0)
    async def said(self, trace: vf.Trace) -> float:
        # It takes a moment, which tests of time-outs need.
        await asyncio.sleep(self.config.pause)
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @classmethod
    def toolsets(cls, config: WordTaskConfig) -> list[vf.Toolset]:
        return [Words(vf.ToolsetConfig())] if config.tools else []


class SharedWords(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    """The same tool, one server for all episodes."""

    twice = Words.twice


class WordTasksetConfig(vf.TasksetConfig):
    """How many words, and whether all episodes share a tool."""

    count: int = 4
    shared: bool = False
    task: WordTaskConfig = WordTaskConfig()


class WordTaskset(vf.Taskset[WordTask, WordTasksetConfig]):
    """A few words."""

    def load(self) -> Iterable[WordTask]:
        for number in range(self.config.count):
            yield WordTask(WordData(prompt=f"{number}=", answer=str(number)), self.config.task)

    @classmethod
    def toolsets(cls, config: WordTasksetConfig) -> list[vf.Toolset]:
        return [SharedWords(vf.SharedToolsetConfig())] if config.shared else []


__all__ = ["WordTaskset"]

if __name__ == "__main__":  # The package runs tools in a process of their own.
    Words.run()
