"""Environments that misbehave: each costs its own episode, and says why, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from test_player import CONTEXT, Asked, Factory, RandomPolicy, Script
from test_self_play import Debate
from tokenizers_for_chat import tokenizer_of

from strop.config.data import DataSettings, DataSource
from strop.config.environment import PythonEnvironment, SelfPlayEnvironment
from strop.config.rollout import TreeSettings
from strop.data.rendering import Renderer
from strop.environments.build import PythonFactory
from strop.environments.driven import Driven, Path, Policy
from strop.environments.own_loop import OwnLoop
from strop.environments.protocol import Done, Observation, PolicyTurn
from strop.environments.self_play import Move
from strop.errors import RunFailure, UserError
from strop.rollout import calls
from strop.rollout.engine import SampleSettings
from strop.rollout.episode import Episode, Status
from strop.rollout.player import Player, World

SAID = [{"role": "user", "content": "Go on."}]
BROKEN = {
    "None": (None, "None, and no list"),
    "a text": ("Go on.", "a str, and no list"),
    "texts": (["Go on."], "item 0 is a str, and no message"),
    "no role": ([{"content": "Go on."}], "without `role`"),
    "no content": ([{"role": "user"}], "without `content`"),
    "content None": ([{"role": "user", "content": None}], "content is None, and no text"),
    "role 3": ([{"role": 3, "content": ""}], "role is an int, and no text"),
    "assistant": ([*SAID, {"role": "assistant", "content": "Yes."}], "the assistant's"),
    "half a character": ([{"role": "user", "content": "a\ud800"}], "half of a character"),
    "half a name": ([{"role": "tool", "content": "a", "calls": [{"b": "\udfff"}]}], "half of a character"),
}
NO_NUMBERS = [float("nan"), float("inf"), "x", "1.0", b"1", [1.0], {}, object(), 10**400]


def world_of(factory: Any, **limits: Any) -> World:
    tokenizer = tokenizer_of("qwen2_5")
    settings = {"kind": "python", "factory": "a:B", "step_timeout": 5.0, **limits}
    return World(
        factory,
        PythonEnvironment.model_validate(settings),
        Renderer(DataSettings(train=DataSource(path="unused"), render="chat"), tokenizer),
        frozenset([tokenizer.eos_token_id]),
        CONTEXT,
    )


async def played(factory: Any, row: Any = None, tree: TreeSettings | None = None, **limits: Any) -> list[Episode]:
    tokenizer = tokenizer_of("qwen2_5")
    policy = RandomPolicy(len(tokenizer), tokenizer.eos_token_id)
    player = Player(policy, tokenizer, world_of(factory, **limits))  # type: ignore[arg-type]
    prompt = Asked([{"role": "user", "content": "?"}], tokens=(1, 2, 3), row={} if row is None else row)
    return await player.play(Episode(0, 0), prompt, SampleSettings(200), (3, 1, 0), tree=tree)


def play(world: Any, roles: tuple[str, ...] = (), **others: Any) -> list[Episode]:
    async def bounded() -> list[Episode]:
        return await asyncio.wait_for(played(Factory(world, roles=roles), **others), 60)

    return asyncio.run(bounded())


def check_failed(episodes: list[Episode], detail: str, status: str = "environment_error") -> None:
    assert episodes
    for episode in episodes:
        assert episode.status == status
        assert episode.failed == "environment"
        assert detail in episode.detail
        assert not any(value != value for value in episode.turn_rewards.values())
        episode.detail.encode("utf-8")


@dataclass
class Says(Script):
    """Returns what it is told to, or raises it."""

    begin: Any = None
    then: Any = None
    forked: Any = None

    async def reset(self, row: Mapping[str, Any]) -> Any:
        return _said(self.begin)

    async def step(self, turn: PolicyTurn) -> Any:
        return _said(self.then)

    async def fork(self) -> Any:
        return _said(self.forked)


@dataclass
class Claims(Debate):
    begin: Any = None
    then: Any = None
    end: Any = None

    async def reset(self, row: Mapping[str, Any]) -> Any:
        return _said(self.begin) if self.begin != "well" else await super().reset(row)

    async def step(self, role: str, turn: PolicyTurn) -> Any:
        return _said(self.then) if self.then != "well" else await super().step(role, turn)

    async def rewards(self) -> Any:
        return _said(self.end)


def _said(what: Any) -> Any:
    if isinstance(what, BaseException):
        raise what
    return what


@pytest.mark.parametrize("answer", [None, "Go on.", {"messages": []}, 3, Done, Move("a", SAID)], ids=repr)
def test_a_step_that_returns_no_answer(answer: Any) -> None:
    world = Says([], then=answer)
    check_failed(play(world), "Says.step returned ")
    assert world.closed == 1
    check_failed(play(Claims(then=answer, begin=Move("pro", SAID)), roles=("pro", "con")), "Claims.step returned ")


@pytest.mark.parametrize(("messages", "says"), BROKEN.values(), ids=BROKEN)
def test_messages_that_are_none(messages: Any, says: str) -> None:
    check_failed(play(Says([], then=Observation(messages))), says)
    check_failed(play(Claims(begin=Move("pro", messages)), roles=("pro", "con")), says)
    check_failed(play(Claims(begin="well", then=Move("pro", messages)), roles=("pro", "con")), says)
    if messages is not None:
        check_failed(play(Says([], begin=messages)), says)


@pytest.mark.parametrize("begin", [3, "Begin.", {"role": "user"}, Observation(SAID), []], ids=repr)
def test_a_reset_that_returns_no_messages(begin: Any) -> None:
    check_failed(play(Says([], begin=begin)), "Says.reset returned")


@pytest.mark.parametrize("begin", [None, "pro", {}, Done(), Move("judge", SAID), Move(None, SAID)], ids=repr)  # type: ignore[arg-type]
def test_a_match_that_begins_with_no_move(begin: Any) -> None:
    check_failed(play(Claims(begin=begin), roles=("pro", "con")), "Claims.reset returned")


@pytest.mark.parametrize("reward", NO_NUMBERS, ids=lambda reward: repr(reward)[:12])
def test_rewards_that_are_no_numbers(reward: Any) -> None:
    check_failed(play(Says([], then=Done(reward=reward))), "Says.step returned a Done whose reward is")
    check_failed(play(Says([], then=Observation(SAID, reward))), "Says.step returned an Observation whose reward is")
    match = Claims(begin="well", then=Move("con", SAID, reward))
    check_failed(play(match, roles=("pro", "con")), "Claims.step returned a Move whose reward is")
    match = Claims(begin="well", then="well", end={"pro": reward})
    check_failed(play(match, roles=("pro", "con")), "Claims.rewards returned for 'pro'")


@pytest.mark.parametrize("end", [None, 1.0, [1.0], {"pro": None}, {"judge": 1.0}], ids=repr)
def test_rewards_of_a_match_that_are_none(end: Any) -> None:
    check_failed(play(Claims(begin="well", then="well", end=end), roles=("pro", "con")), "Claims.rewards returned")


def test_numbers_of_other_kinds_are_rewards() -> None:
    class Own:
        def __float__(self) -> float:
            return 0.5

    for reward in (True, 1, Own()):
        [episode] = play(Says([], then=Done(reward=reward)))  # type: ignore[arg-type]
        assert list(episode.turn_rewards.values()) == [float(reward)]  # type: ignore[arg-type]


def test_an_opening_may_hold_turns_of_the_assistant_as_examples() -> None:
    [episode] = play(Says([], begin=[*SAID, {"role": "assistant", "content": "So."}, *SAID], then=Done()))
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "user", "assistant"]


def test_an_error_may_be_the_exception_itself() -> None:
    check_failed(play(Says([], then=Done(error=OSError("no server")))), "OSError: no server")  # type: ignore[arg-type]
    check_failed(play(Says([], then=Done(error="half \udc80"))), "half \\udc80")


RAISED = [
    ValueError("mine"),
    ValueError("half \udc80 of mine"),
    TimeoutError("mine"),
    SystemExit("mine"),
    KeyboardInterrupt("mine"),
    asyncio.CancelledError("mine"),
]


@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_whatever_is_raised_is_the_episodes_error(error: BaseException) -> None:
    """With its type, and the line of the user's file."""
    kind = type(error).__name__
    for made, method in ((Says([], begin=error), "reset"), (Says([], then=error), "step")):
        [episode] = play(made)
        check_failed([episode], f"Says.{method} raised ")
        assert kind in episode.detail
        assert "mine" in episode.detail
        assert f"({__file__}:{_said.__code__.co_firstlineno + 2})" in episode.detail
    roles = ("pro", "con")
    check_failed(play(Claims(begin=error), roles=roles), "Claims.reset raised")
    check_failed(play(Claims(begin="well", then=error), roles=roles), "Claims.step raised")
    check_failed(play(Claims(begin="well", then="well", end=error), roles=roles), "Claims.rewards raised")
    check_failed(play(Says([], then=Observation(SAID), forked=error), tree=TreeSettings(at=[1])), "Says.fork raised")


@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_whatever_close_raises_undoes_nothing(error: BaseException) -> None:
    class Shuts(Says):
        async def close(self) -> None:
            raise error

    [episode] = play(Shuts([], then=Done(reward=1.0)))
    assert episode.status is not None
    assert episode.status.trainable


def test_errors_of_the_run_are_not_the_episodes_alone() -> None:
    with pytest.raises(RunFailure, match="gone"):
        play(Says([], then=RunFailure("gone")))


def test_a_line_of_a_library_is_shown_at_the_line_that_called_it() -> None:
    class Parses(Says):
        async def step(self, turn: PolicyTurn) -> Any:
            import json

            return json.loads("no json")

    [episode] = play(Parses([]))
    assert f"({__file__}:" in episode.detail


@pytest.mark.parametrize("forked", [None, 3, SAID], ids=repr)
def test_a_fork_that_is_no_environment(forked: Any) -> None:
    found = play(Says([], then=Observation(SAID), forked=forked), tree=TreeSettings(at=[1]))
    check_failed(found, "Says.fork returned")


def test_forks_are_closed_if_a_later_one_fails() -> None:
    first = Script([])

    class Once(Says):
        async def fork(self) -> Any:
            self.forked = None if self.forked else first
            return self.forked

    check_failed(
        play(Once([], then=Observation(SAID)), tree=TreeSettings(at=[1], branches=3)), "Once.fork returned None"
    )
    assert first.closed == 1


class Whims:
    """Does not always let itself be made."""

    made = 0

    def __init__(self) -> None:
        Whims.made += 1
        if Whims.made == 2:
            raise RuntimeError("no place left")

    async def reset(self, row: Any) -> None: ...

    async def step(self, turn: PolicyTurn) -> Done:
        return Done(reward=1.0)

    async def close(self) -> None: ...


def gives_none() -> None:
    """A factory that forgot its `return`."""


def gives_half() -> Any:
    class Half:
        async def reset(self, row: Any) -> None: ...

    return Half()


def test_an_environment_that_cannot_be_made_costs_its_episode() -> None:
    Whims.made = 0
    factory = PythonFactory(PythonEnvironment(kind="python", factory=f"{__name__}:Whims"))
    statuses = [asyncio.run(played(factory))[0] for _ in range(3)]
    assert [episode.failed for episode in statuses] == ["", "environment", ""]
    check_failed(statuses[1:2], f"{__name__}:Whims raised RuntimeError: no place left ({__file__}:")


@pytest.mark.parametrize(
    ("name", "says"),
    [("gives_none", "gives_none returned None, which has no"), ("gives_half", "returned a Half, which has no method")],
)
def test_a_factory_that_gives_no_environment(name: str, says: str) -> None:
    factory = PythonFactory(PythonEnvironment(kind="python", factory=f"{__name__}:{name}"))
    check_failed(asyncio.run(played(factory)), says)


def gives_riddles() -> Any:
    class Riddle(Script):
        def __getattr__(self, name: str) -> Any:
            raise KeyError(name)

    return Riddle([])


def test_an_environment_whose_attributes_raise() -> None:
    factory = PythonFactory(PythonEnvironment(kind="python", factory=f"{__name__}:gives_riddles"))
    check_failed(asyncio.run(played(factory)), "gives_riddles raised KeyError: 'ready'")


class SyncStep(Whims):
    def __init__(self) -> None: ...

    def step(self, turn: PolicyTurn) -> Done:  # type: ignore[override]
        return Done()


def gives_sync() -> Any:
    return SyncStep()


def test_a_method_that_is_not_async() -> None:
    factory = PythonFactory(PythonEnvironment(kind="python", factory=f"{__name__}:gives_sync"))
    check_failed(asyncio.run(played(factory)), "SyncStep.step is not `async`")


class ResetAlone(Whims):
    async def reset(self) -> None: ...  # type: ignore[override]


class StepAlone(Whims):
    async def step(self) -> Done:  # type: ignore[override]
        return Done()


class StepOfTwo(Whims):
    async def step(self, turn: PolicyTurn, more: int) -> Done:  # type: ignore[override]
        return Done()


class ForkOfTwo(Whims):
    async def fork(self, other: Any) -> Any: ...


class StaticStep(Whims):
    @staticmethod
    async def step(turn: PolicyTurn, more: int = 3) -> Done:  # type: ignore[override]
        return Done()


class StepOfOne(Debate):
    async def step(self, turn: PolicyTurn) -> Done:  # type: ignore[override]
        return Done()


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("ResetAlone", "async def reset(self, row)"),
        ("StepAlone", "async def step(self, turn)"),
        ("StepOfTwo", "async def step(self, turn)"),
        ("ForkOfTwo", "async def fork(self)"),
    ],
)
def test_methods_that_take_other_arguments_are_refused_before_the_run(name: str, mend: str) -> None:
    with pytest.raises(UserError, match="takes other arguments") as found:
        PythonFactory(PythonEnvironment(kind="python", factory=f"{__name__}:{name}"))
    assert mend in str(found.value.mend)


def test_arguments_of_matches_and_of_static_methods() -> None:
    with pytest.raises(UserError, match=r"`step` of .* takes other arguments"):
        PythonFactory(SelfPlayEnvironment(kind="self_play", factory=f"{__name__}:StepOfOne"))
    PythonFactory(PythonEnvironment(kind="python", factory=f"{__name__}:StaticStep"))


def test_what_an_environment_does_to_its_row_stays_with_it() -> None:
    class Eats(Says):
        async def reset(self, row: Any) -> Any:
            assert row == {"answer": ["3"], "more": {"a": 1}}
            row["answer"].append("4")
            row["more"].clear()
            del row["more"]

    class EatsToo(Debate):
        async def reset(self, row: Any) -> Move:
            row["answer"].clear()
            return await super().reset(row)

    class Drives:
        async def drive(self, policy: Policy) -> Driven:
            policy.row["answer"].clear()
            return Driven(error="none")

        async def close(self) -> None: ...

    row = {"answer": ["3"], "more": {"a": 1}}
    for _ in range(2):
        play(Eats([], then=Done(error="none")), row=row)
        for episode in play(EatsToo(), roles=("pro", "con"), row=row):
            assert episode.row["answer"] == ["3"]
        play(Drives(), row=row)
        assert row == {"answer": ["3"], "more": {"a": 1}}


def test_a_row_that_cannot_be_copied_is_given_as_it_is() -> None:
    class Alone:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is only one")

    seen: list[Any] = []

    class Looks(Says):
        async def reset(self, row: Any) -> Any:
            seen.append(row["a"])
            row["b"] = 1

    row = {"a": Alone()}
    play(Looks([], then=Done(error="none")), row=row)
    assert seen == [row["a"]]
    assert list(row) == ["a"]


@dataclass
class Deaf(Says):
    """Does not hear that it is cancelled, for longer than any limit here."""

    where: str = "step"
    running: bool = False

    async def _hang(self) -> None:
        self.running = True
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    async def reset(self, row: Any) -> Any:
        if self.where == "reset":
            await self._hang()

    async def step(self, turn: PolicyTurn) -> Any:
        if self.where == "step":
            await self._hang()
        return Done(reward=1.0)

    async def close(self) -> None:
        self.closed += 1
        if self.where == "close":
            await self._hang()


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("limit", ["step_timeout", "episode_timeout"])
def test_code_that_does_not_hear_its_cancellation_is_left_behind(
    where: str, limit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calls, "GRACE", 0.05)
    world = Deaf([], where=where)
    check_failed(play(world, **{limit: 0.05}), "longer than 0.05 s", "timeout")
    assert world.closed == 1
    assert capsys.readouterr().err == ""


def test_a_close_that_hangs_undoes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE", 0.05)
    [episode] = play(Deaf([], where="close"), step_timeout=0.05)
    assert list(episode.turn_rewards.values()) == [1.0]


def test_a_run_that_is_cancelled_ends_whatever_the_environment_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE", 0.05)
    world = Deaf([])

    async def run() -> None:
        task = asyncio.ensure_future(played(Factory(world)))
        while not world.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(run(), 60))
    assert world.closed == 1


def test_a_cancelled_step_has_cleaned_up_before_it_is_closed() -> None:
    order: list[str] = []

    class Cleans(Says):
        async def step(self, turn: PolicyTurn) -> Any:
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.01)
                order.append("cleaned")

        async def close(self) -> None:
            order.append("closed")

    check_failed(play(Cleans([]), step_timeout=0.05), "longer than 0.05 s for one answer", "timeout")
    assert order == ["cleaned", "closed"]


def test_a_step_that_cancels_its_own_task() -> None:
    class Cancels(Says):
        async def step(self, turn: PolicyTurn) -> Any:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(1)

    check_failed(play(Cancels([])), "Cancels.step raised")


def test_one_that_misbehaves_does_not_disturb_others() -> None:
    async def both() -> list[list[Episode]]:
        bad = Factory(Says([], then=SystemExit(3)))
        return list(await asyncio.gather(played(bad), played(Factory(Script([SAID] * 3)))))

    bad, good = asyncio.run(both())
    check_failed(bad, "SystemExit: 3")
    assert good[0].status in (Status.STOP, Status.LENGTH)


@dataclass
class Drives:
    """Drives itself, and says or raises what it is told to."""

    said: Any

    async def drive(self, policy: Policy) -> Any:
        found = await policy.sample(policy.tokens)
        told = _said(self.said)
        if isinstance(told, Driven) and not told.paths:
            tokens = [*policy.tokens, *found.tokens]
            told = replace(told, paths=[Path(tokens, len(policy.tokens), [True] * len(found.tokens))])
        return told

    async def close(self) -> None: ...


DRIVEN = [
    (None, "returned None, and no Driven"),
    ("x", "returned a str, and no Driven"),
    (Driven(reward=float("nan")), "returned a reward that is nan"),
    (Driven(reward="x"), "and no number"),  # type: ignore[arg-type]
    (Driven(finish="done"), "which is neither stop nor length"),  # type: ignore[arg-type]
    (Driven(text="\ud800"), "half of a character"),
    (Driven(messages=["a"]), "and no message"),  # type: ignore[list-item]
    (Driven(paths=[Path(["a"], 1, [])]), "Drives.drive raised ValueError"),  # type: ignore[list-item]
    *((error, "Drives.drive raised") for error in RAISED),
]


@pytest.mark.parametrize(("said", "says"), DRIVEN, ids=lambda value: repr(value)[:40])
def test_one_that_drives_itself_and_misbehaves(said: Any, says: str) -> None:
    check_failed(play(Drives(said)), says)


def test_one_that_drives_itself_well_is_believed() -> None:
    [episode] = play(Drives(Driven(reward=0.5)))
    assert (episode.status, list(episode.turn_rewards.values())) == (Status.STOP, [0.5])


def test_a_loop_of_its_own_outlives_an_exit() -> None:
    async def leaves() -> None:
        sys.exit(3)

    async def stays() -> int:
        return 1

    async def run() -> int:
        loop = OwnLoop("test")
        try:
            with pytest.raises(RuntimeError, match="SystemExit: 3"):
                await asyncio.wait_for(loop.run(leaves()), 30)
            return await asyncio.wait_for(loop.run(stays()), 30)
        finally:
            loop.stop()

    assert asyncio.run(run()) == 1
