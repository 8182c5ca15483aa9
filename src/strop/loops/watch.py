"""The alarms of a run: what they are shown, whom the second opinion is asked about, and what becomes of an alarm."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from strop.config import Config
from strop.config.rewards import VerifierSettings
from strop.data.order import hashed, stream_key
from strop.data.rows import row_number
from strop.errors import RunFailure
from strop.loops.prepare import Prepared, second_rewards
from strop.loops.step_record import PromptTexts
from strop.rewards.alarms.monitor import Alarm, Monitor
from strop.rewards.alarms.statistics import Outcome
from strop.rewards.combination import held, is_for
from strop.rewards.composition import check_errors
from strop.rollout.collector import completed_of
from strop.rollout.episode import Episode, Group
from strop.tracking.display import Display
from strop.tracking.episodes import episodes_file
from strop.tracking.run_directory import RunDirectory

_STREAM = 22
"""Keeps the draws of this file apart from others of the same seed."""


class Watch:
    """Looks at every step of a run for signs that its reward is being hacked.

    Args:
        prepared: the recipe; with `offline` or `alarms.action: off` nothing is looked at.
        texts: of the prompts. display, directory: where alarms are told.
    """

    def __init__(self, prepared: Prepared, texts: PromptTexts, display: Display, directory: RunDirectory) -> None:
        self._prepared = prepared
        self._config: Config = prepared.config
        self._texts = texts
        self._display = display
        self._directory = directory
        self._monitor = Monitor(self._config.alarms)
        self._new: list[Alarm] = []
        self.looks = self._config.alarms.action != "off" and self._config.offline is None

    async def look(
        self, step: int, groups: Sequence[Group], evaluations: Sequence[tuple[int, Mapping[str, float]]]
    ) -> dict[str, float]:
        """Look at a step that is done; returns metrics. Alarms are shown and noted in the run's manifest.

        Args:
            groups: everything that was sampled for the step. evaluations: steps with their scores so far.

        Raises:
            RunFailure: the second opinion could not be had of too many completions.
        """
        if not self.looks:
            return {}
        assert self._config.rewards is not None
        by_name = {verifier.name or verifier.kind: verifier for verifier in self._config.rewards.verifiers}
        pairs = [pair for group in groups for pair in outcomes_of(group.episodes, self._texts, by_name)]
        outcomes = [outcome for _, outcome in pairs]
        opinions = await self._second_opinions(step, pairs)
        every = self._config.evaluation.every
        # The evaluation at the end of a shorter run says nothing that a longer one would know.
        held_out = [(at, scores.get("accuracy", math.nan)) for at, scores in evaluations if every and at % every == 0]
        looked = self._monitor.look(step, outcomes, held_out=held_out, opinions=opinions)
        self._new = looked.raised
        for alarm in looked.raised:
            self._display.message(f"{alarm.name} at step {step}: {alarm.what}{self._where(alarm)}", "alarm")
        if looked.raised:
            self._note()
        return looked.metrics

    def stop_if_asked(self) -> None:
        """End the run if `alarms.action` says so and the last look raised an alarm.

        Raises:
            RunFailure: it does.
        """
        if self._new and self._config.alarms.action == "stop":
            alarm = self._new[0]
            where = f"alarms.{alarm.name}, step {alarm.step}{self._where(alarm)}"
            raise RunFailure(
                f"alarm: {alarm.what}",
                where=where,
                mend="look at what was rewarded; with alarms.action=warn the same command goes on from the last "
                "checkpoint",
            )

    def go_on(self) -> None:
        """Show the last alarm of the steps that were trained before, and forget those of later ones."""
        if len(self._directory.manifest.alarms) != len(self._monitor.raised):
            self._note()
        if lines := self.lines():
            self._display.message(f"{lines[-1]} (so far {len(lines)})", "alarm")

    def lines(self) -> list[str]:
        """The alarms of the run so far, a line each."""
        return [f"{alarm.name} at step {alarm.step}: {alarm.what}" for alarm in self._monitor.raised]

    def state(self) -> dict[str, Any]:
        """What `load` needs, as JSON-ready values."""
        return self._monitor.state()

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go to where `state` was taken, None in checkpoints of a time without alarms."""
        if state is not None:
            self._monitor.load(state)

    async def close(self) -> None:
        if self._prepared.second_scorer is not None:
            await self._prepared.second_scorer.close()

    async def _second_opinions(self, step: int, pairs: Sequence[tuple[Episode, Outcome]]) -> list[tuple[Outcome, bool]]:
        """A sample of what counts as correct, with whether the second opinion agrees; without what it does not apply
        to or failed on."""
        scorer, settings = self._prepared.second_scorer, self._config.alarms.second_opinion
        if scorer is None or settings is None:
            return []
        right = [(episode, outcome) for episode, outcome in pairs if episode.correct]
        seed = self._config.run.seed
        chosen = [pair for place, pair in enumerate(right) if is_drawn(settings.share, seed, step, place)]
        if not chosen:
            return []
        self._display.phase("second opinion")
        rewards = await scorer.score([completed_of(e, self._prompt(e)) for e, _ in chosen])
        key = "alarms.second_opinion.verifiers"
        check_errors(rewards, first_step=step == 1, settings=second_rewards(self._config), key=key)
        pairs_of = zip(chosen, rewards, strict=True)
        return [(outcome, reward.correct) for (_, outcome), reward in pairs_of if reward.correct is not None]

    def _prompt(self, episode: Episode) -> Any:
        return self._prepared.train.prompt(row_number(episode.prompt_id))

    def _where(self, alarm: Alarm) -> str:
        """The completion that shows it, where it was kept."""
        every = self._config.tracking.episodes_every
        if alarm.group is None or not every or alarm.step % every:
            return ""
        path = episodes_file(self._directory.episodes_folder, alarm.step)
        return f" ({path.parent.name}/{path.name}, group {alarm.group}, sample {alarm.sample})"

    def _note(self) -> None:
        self._directory.update(alarms=[dataclasses.asdict(alarm) for alarm in self._monitor.raised])


def outcomes_of(
    episodes: Sequence[Episode], texts: PromptTexts, by_name: Mapping[str, VerifierSettings]
) -> list[tuple[Episode, Outcome]]:
    """The scored ones among the episodes of a group, which are of one row but for their role, as the alarms see them.
    by_name: the verifiers."""
    if not episodes:
        return []
    answer = texts.answer(episodes[0])
    deciders = {role: _decider(by_name, e.row) for role, e in {e.role: e for e in episodes}.items()}
    counts = {name: (verifier.weight, verifier.clip) for name, verifier in by_name.items()}
    return [
        (
            e,
            Outcome(
                e.group,
                e.sample,
                e.prompt_id,
                e.completion,
                e.sampled_ids(),
                e.reward,
                answer,
                e.correct,
                {
                    name: counts[name][0] * held(score, counts[name][1])
                    for name, score in e.components.items()
                    if name in counts
                },
                deciders[e.role],
            ),
        )
        for e in episodes
        if not math.isnan(e.reward)
    ]


def is_drawn(share: float, *key: int) -> bool:
    """Whether something is in a sample of this share, by its key alone."""
    *parts, place = key
    drawn = hashed(np.array([place], dtype=np.uint64), stream_key(_STREAM, *parts))
    return float(drawn[0]) < share * 2**64


def _decider(verifiers: Mapping[str, VerifierSettings], row: Mapping[str, Any]) -> str:
    """Name of the verifier that says what is correct."""
    for name, verifier in verifiers.items():
        if is_for(verifier, row):
            return name
    return ""
