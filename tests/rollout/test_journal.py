"""The journal: what was sampled of groups that no step has trained is told again, and never sampled twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.rollout.admission import Admission
from strop.rollout.engine import SampleRequest, SampleResult, SampleSettings, WeightUpdate
from strop.rollout.engines.local import LocalEngine
from strop.rollout.episode import Group
from strop.rollout.journal import ENDS, Journal, Note, as_arrays, from_arrays
from strop.rollout.windows import Admitted, Windows

SETTINGS = SampleSettings(6)
Make = Callable[..., Any]


def request(stream: tuple[int, ...] = (0, 0, 0), prompt: Sequence[int] = (5, 6), new: int = 6) -> SampleRequest:
    return SampleRequest(tuple(prompt), SampleSettings(new), stream)


def result(count: int, finish: Any = "length", version: int = 0, first: int = 10) -> SampleResult:
    return SampleResult([first + at for at in range(count)], [-0.5] * count, [version] * count, finish)


class Slow:
    """An engine that adds a token to each request whenever `step` is called; tokens count up from 10."""

    def __init__(self) -> None:
        self.asked: list[SampleRequest] = []
        self.version = 0
        self._open: dict[tuple[int, ...], tuple[SampleRequest, SampleResult, asyncio.Future[SampleResult]]] = {}

    async def generate(self, request: SampleRequest) -> SampleResult:
        self.asked.append(request)
        future: asyncio.Future[SampleResult] = asyncio.get_running_loop().create_future()
        self._open[request.stream] = (request, request.begun or result(0), future)
        try:
            return await future
        finally:
            if self._open[request.stream][0] is request:
                del self._open[request.stream]

    async def under_way(self) -> dict[tuple[int, ...], SampleResult]:
        await asyncio.sleep(0)
        return {
            stream: SampleResult(found.tokens, found.logprobs, found.versions, "aborted")
            for stream, (_, found, future) in self._open.items()
            if len(found.tokens) and not future.done()
        }

    async def step(self, times: int = 1) -> None:
        await turns()
        for _ in range(times):
            for stream, (asked, found, future) in list(self._open.items()):
                if future.done():
                    continue
                size = len(found.tokens)
                more = SampleResult(
                    [*found.tokens, 10 + size], [*found.logprobs, -0.5], [*found.versions, self.version], "length"
                )
                self._open[stream] = (asked, more, future)
                if size + 1 == asked.settings.max_new_tokens:
                    future.set_result(more)
            await turns()


async def turns(count: int = 5) -> None:
    """Let the event loop go round."""
    for _ in range(count):
        await asyncio.sleep(0)


def ask(journal: Journal, asked: SampleRequest) -> asyncio.Task[SampleResult]:
    return asyncio.get_running_loop().create_task(journal.generate(asked))


# Notes in a file.

STREAMS = st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=5).map(tuple)
TOKENS = st.integers(0, 2**31 - 1)


@st.composite
def some_notes(draw: st.DrawFn) -> dict[tuple[int, ...], Note]:
    prompts = draw(st.lists(st.lists(TOKENS, max_size=4).map(tuple), min_size=1, max_size=3))
    found = {}
    for stream in draw(st.lists(STREAMS, max_size=6, unique=True)):
        size = draw(st.integers(0, 5))
        tokens, versions = (draw(st.lists(TOKENS, min_size=size, max_size=size)) for _ in range(2))
        logprobs = draw(st.lists(st.floats(-100, 0, width=32), min_size=size, max_size=size))
        finish = draw(st.sampled_from(ENDS))
        found[stream] = Note(draw(st.sampled_from(prompts)), SampleResult(tokens, logprobs, versions, finish))
    return found


def plain(notes: dict[tuple[int, ...], Note]) -> dict[tuple[int, ...], Any]:
    return {stream: (note.prompt, note.result.plain()) for stream, note in notes.items()}


@settings(deadline=None)
@given(some_notes())
def test_notes_come_back_from_arrays_as_they_were(notes: dict[tuple[int, ...], Note]) -> None:
    arrays = as_arrays(notes)
    back = from_arrays(arrays)
    assert list(back) == list(notes)
    assert plain(back) == plain(notes)
    # Completions of one prompt share it.
    assert len(arrays["prompts_lengths"]) == len({note.prompt for note in notes.values()})


@settings(deadline=None)
@given(some_notes())
def test_and_through_a_file(notes: dict[tuple[int, ...], Note]) -> None:
    from safetensors.numpy import load, save

    assert plain(from_arrays(load(save(as_arrays(notes))))) == plain(notes)


# Answering, and going on.


async def test_of_a_group_what_has_ended_is_noted_before_the_rest_has() -> None:
    slow, told = Slow(), dict[int, SampleResult]()
    journal = Journal(slow)  # type: ignore[arg-type]
    asked = [request((3, sample, 0), new=2 + 3 * sample) for sample in range(3)]
    group = asyncio.create_task(journal.generate_all(asked, told.__setitem__))
    await slow.step(3)
    assert list(told) == [0]
    assert not group.done()
    notes = await journal.notes()
    assert {stream: (len(note.result.tokens), note.ended) for stream, note in notes.items()} == {
        (3, 0, 0): (2, True), (3, 1, 0): (3, False), (3, 2, 0): (3, False)
    }  # fmt: skip
    group.cancel()
    await asyncio.gather(group, return_exceptions=True)
    assert not (await journal.notes()).keys() - {(3, 0, 0)}

    # Another run goes on from there: what had ended is told at once, and the rest goes on behind what there was.
    other, again = Slow(), dict[int, SampleResult]()
    after = Journal(other)  # type: ignore[arg-type]
    after.take_back(notes)
    going = asyncio.create_task(after.generate_all(asked, again.__setitem__))
    await other.step(1)
    assert list(again) == [0]
    assert [(one.stream, len(one.begun.tokens)) for one in other.asked if one.begun] == [((3, 1, 0), 3), ((3, 2, 0), 3)]
    await other.step(4)
    await going
    assert [list(again[at].tokens) for at in range(3)] == [list(range(10, 10 + 2 + 3 * at)) for at in range(3)]
    assert after.gone_on == 3


async def test_what_has_ended_is_answered_by_its_note_and_not_sampled() -> None:
    engine = Slow()
    journal = Journal(engine)
    task = ask(journal, request())
    await engine.step(6)
    first = await task
    assert first.tokens == [10, 11, 12, 13, 14, 15]
    journal.forget([1])
    assert (await journal.generate(request())) is first
    assert len(engine.asked) == 1
    assert (journal.gone_on, journal.begun_anew) == (1, 0)


async def test_what_was_under_way_goes_on_behind_its_last_token() -> None:
    engine = Slow()
    before = Journal(engine)
    lost = ask(before, request())
    await engine.step(2)
    notes = from_arrays(as_arrays(await before.notes()))
    assert plain(notes) == {(0, 0, 0): ((5, 6), result(2, "aborted").plain())}
    lost.cancel()

    again = Slow()
    again.version = 3
    journal = Journal(again)
    journal.take_back(notes)
    task = ask(journal, request())
    await again.step(4)
    found = await task
    assert list(found.tokens) == [10, 11, 12, 13, 14, 15]
    assert list(found.versions) == [0, 0, 3, 3, 3, 3]
    [asked] = again.asked
    assert asked.begun is not None
    assert (asked.begun.finish, len(asked.begun.tokens)) == ("aborted", 2)
    assert (journal.gone_on, journal.begun_anew) == (1, 0)
    # It is noted as a whole now.
    assert (await journal.notes())[0, 0, 0].result is found


@pytest.mark.parametrize("finish", ["stop", "aborted"])
async def test_another_prompt_than_noted_begins_anew_and_is_counted(finish: Any) -> None:
    engine = Slow()
    journal = Journal(engine)
    journal.take_back({(0, 0, 0): Note((5, 7), result(2, finish))})
    task = ask(journal, request())
    await turns()
    [asked] = engine.asked
    assert asked.begun is None
    # The old note is gone even before the new one is there.
    assert await journal.notes() == {}
    await engine.step(6)
    assert (await task).tokens == [10, 11, 12, 13, 14, 15]
    assert (journal.gone_on, journal.begun_anew) == (0, 1)
    assert journal.metrics() == {"resumed/gone_on": 0.0, "resumed/begun_anew": 1.0}


async def test_what_was_gone_on_with_is_noted_with_what_came_since() -> None:
    """A second checkpoint must not fall back to what the first one had."""
    engine = Slow()
    journal = Journal(engine)
    journal.take_back({(0, 0, 0): Note((5, 6), result(2, "aborted"))})
    task = ask(journal, request())
    await turns()
    assert len((await journal.notes())[0, 0, 0].result.tokens) == 2
    await engine.step(2)
    note = (await journal.notes())[0, 0, 0]
    assert (len(note.result.tokens), note.ended) == (4, False)
    await engine.step(2)
    await task


async def test_what_ends_while_notes_are_gathered_is_there_as_a_whole() -> None:
    class Ends(Slow):
        async def under_way(self) -> dict[tuple[int, ...], SampleResult]:
            found = await super().under_way()
            await self.step(6)
            return found

    engine = Ends()
    journal = Journal(engine)
    tasks = [ask(journal, request((0, sample, 0), new=new)) for sample, new in enumerate([6, 20])]
    await engine.step(1)
    notes = await journal.notes()
    assert (notes[0, 0, 0].result.finish, len(notes[0, 0, 0].result.tokens)) == ("length", 6)
    assert (notes[0, 1, 0].result.finish, len(notes[0, 1, 0].result.tokens)) == ("aborted", 1)
    tasks[1].cancel()


async def test_a_request_that_begins_while_notes_are_gathered_is_left_out() -> None:
    """Its prompt is not known when the engine is asked, and a checkpoint can do without."""

    class Begins(Slow):
        async def under_way(self) -> dict[tuple[int, ...], SampleResult]:
            late.append(ask(journal, request((0, 0, -1))))
            await self.step(2)
            return await super().under_way()

    late: list[asyncio.Task[SampleResult]] = []
    engine = Begins()
    journal = Journal(engine)
    tasks = [ask(journal, request())]
    await engine.step(1)
    assert list(await journal.notes()) == [(0, 0, 0)]
    for task in tasks + late:
        task.cancel()


async def test_evaluations_are_not_noted_and_what_is_trained_is_forgotten() -> None:
    engine = Slow()
    journal = Journal(engine)
    tasks = [ask(journal, request(stream)) for stream in [(-1, 0, 0), (0, 0, 0), (1, 0, 0), (1, 1, 0, -1)]]
    await engine.step(1)
    assert set(await journal.notes()) == {(0, 0, 0), (1, 0, 0), (1, 1, 0, -1)}
    await engine.step(5)
    await asyncio.gather(*tasks)
    assert set(await journal.notes()) == {(0, 0, 0), (1, 0, 0), (1, 1, 0, -1)}
    journal.forget([1])
    assert set(await journal.notes()) == {(0, 0, 0)}


async def test_a_request_that_was_given_up_does_not_take_its_successor_with_it() -> None:
    """An episode that is played again, its environment being lost, asks for what it had asked for."""
    engine = Slow()
    journal = Journal(engine)
    first = ask(journal, request())
    await turns()
    second = ask(journal, request(new=7))
    await turns()
    first.cancel()
    await engine.step(3)
    assert len((await journal.notes())[0, 0, 0].result.tokens) == 3
    second.cancel()


async def test_an_aborted_request_is_no_end() -> None:
    class Aborts(Slow):
        async def generate(self, request: SampleRequest) -> SampleResult:
            return result(2, "aborted")

    journal = Journal(Aborts())
    assert (await journal.generate(request())).finish == "aborted"
    assert await journal.notes() == {}


# Holding.


async def test_hold_waits_for_what_has_begun_and_lets_nothing_begin() -> None:
    engine = Slow()
    journal = Journal(engine)
    begun = ask(journal, request())
    await engine.step(1)
    held = asyncio.create_task(journal.hold())
    late = ask(journal, request((0, 1, 0)))
    await engine.step(4)
    assert not held.done()
    await engine.step(1)
    await held
    assert begun.done()
    await turns()
    assert [asked.stream for asked in engine.asked] == [(0, 0, 0)]
    # Held once more before those that wait have moved: they still wait.
    journal.go_on()
    await journal.hold()
    await turns()
    assert [asked.stream for asked in engine.asked] == [(0, 0, 0)]
    journal.go_on()
    await engine.step(6)
    assert (await late).tokens == [10, 11, 12, 13, 14, 15]


async def test_hold_is_not_waited_for_by_what_fails_or_is_cancelled() -> None:
    class Breaks(Slow):
        async def generate(self, request: SampleRequest) -> SampleResult:
            await asyncio.sleep(0)
            raise RuntimeError("the engine broke")

    journal = Journal(Breaks())
    task = ask(journal, request())
    await asyncio.sleep(0)
    await asyncio.wait_for(journal.hold(), 5)
    with pytest.raises(RuntimeError, match="broke"):
        await task
    slow = Journal(Slow())
    task = ask(slow, request())
    await turns()
    held = asyncio.create_task(slow.hold())
    await turns()
    task.cancel()
    await asyncio.wait_for(held, 5)


async def test_a_note_answers_while_requests_are_held() -> None:
    journal = Journal(Slow())
    journal.take_back({(0, 0, 0): Note((5, 6), result(2, "stop"))})
    await journal.hold()
    assert (await asyncio.wait_for(journal.generate(request()), 5)).finish == "stop"


# Going on in the local engine.

EOS = 1


def engine_of(model: Any, tokenizer: Any = None, **options: Any) -> LocalEngine:
    return LocalEngine(model, tokenizer, **{"eos_ids": (EOS,), "seed": 11, "context": 512, **options})


def cut(whole: SampleResult, at: int) -> SampleResult:
    return SampleResult(whole.tokens[:at], whole.logprobs[:at], whole.versions[:at], "aborted")


async def gone_on_anywhere(make: Callable[[], LocalEngine], asked: SampleRequest) -> SampleResult:
    """The completion, which is the same wherever it was cut."""
    whole = await make().generate(asked)
    for at in range(len(whole.tokens)):
        there = SampleRequest(asked.tokens, asked.settings, asked.stream, cut(whole, at))
        found = await make().generate(there)
        assert found.tokens == whole.tokens, at
        assert found.finish == whole.finish
        np.testing.assert_array_equal(found.logprobs[:at], whole.logprobs[:at])
        # A prefill of what was there rounds otherwise than the steps that made it.
        np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=1e-4)
        assert len(found.versions) == len(whole.tokens)
    return whole


async def test_a_completion_that_was_cut_anywhere_goes_on_as_the_whole(tiny_model: Make) -> None:
    model = tiny_model()
    ends = set()
    for number in range(6):
        asked = SampleRequest((5, 9, 12, 7), SampleSettings(9 + number), (number, 0, 0))
        ends.add((await gone_on_anywhere(lambda: engine_of(model), asked)).finish)
    assert "length" in ends


async def test_stop_texts_are_found_across_a_cut(tiny_model: Make, character_tokenizer: Any) -> None:
    model = tiny_model()
    # Some stream whose tokens four to seven are a text of four characters, which comes only there.
    for number in range(20):
        free = await engine_of(model).generate(SampleRequest((5, 9, 12), SampleSettings(12), (number, 0, 0)))
        text = character_tokenizer.decode(list(free.tokens)[3:7])
        if min(free.tokens[3:7], default=0) > 2 and len(free.tokens) > 8:
            break
    assert len(text) == 4
    asked = SampleRequest((5, 9, 12), SampleSettings(12, stop=(text,)), (number, 0, 0))
    whole = await gone_on_anywhere(lambda: engine_of(model, character_tokenizer), asked)
    assert (whole.finish, whole.tokens) == ("stop", list(free.tokens)[:7])


async def test_one_token_before_its_longest_it_gets_that_one_and_ends(tiny_model: Make) -> None:
    model = tiny_model()
    asked = SampleRequest((5, 9, 12, 7), SampleSettings(5), (0, 0, 0))
    whole = await engine_of(model).generate(asked)
    assert len(whole.tokens) == 5
    engine = engine_of(model)
    found = await engine.generate(SampleRequest(asked.tokens, asked.settings, asked.stream, cut(whole, 4)))
    assert (found.tokens, found.finish) == (whole.tokens, "length")
    assert engine.take_stats().sampled_tokens == 1


async def sampled(engine: LocalEngine, count: int) -> None:
    async with asyncio.timeout(60):
        while engine._stats.sampled_tokens < count:
            await asyncio.sleep(0)


async def test_under_way_is_what_there_is_of_each_and_nothing_of_what_has_not_begun(tiny_model: Make) -> None:
    engine = engine_of(tiny_model(), max_sequences=2)
    asked = [SampleRequest((5, 9, 12), SampleSettings(40), (0, sample, 0)) for sample in range(3)]
    tasks = [asyncio.create_task(engine.generate(one)) for one in asked]
    await sampled(engine, 12)
    found = await engine.under_way()
    assert set(found) == {(0, 0, 0), (0, 1, 0)}
    assert all(one.finish == "aborted" for one in found.values())
    kept = {stream: list(one.tokens) for stream, one in found.items()}
    ended = await asyncio.gather(*tasks)
    # What was told does not grow with the request.
    assert {stream: list(one.tokens) for stream, one in found.items()} == kept
    for one, whole in zip(asked[:2], ended, strict=False):
        assert list(whole.tokens)[: len(kept[one.stream])] == kept[one.stream]
    assert await engine.under_way() == {}


@pytest.mark.parametrize("recomputes", [False, True])
async def test_after_an_update_a_completion_goes_on_with_old_or_new_keys(tiny_model: Make, recomputes: bool) -> None:
    import copy

    import torch

    from strop.models.forward import score_streams

    model = tiny_model()
    old = copy.deepcopy(model)
    engine = engine_of(model, recomputes=recomputes, pack_weights=False)
    asked = SampleRequest((5, 9, 12, 7, 8), SampleSettings(24), (2, 0, 0))
    task = asyncio.create_task(engine.generate(asked))
    await sampled(engine, 6)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    await engine.update_weights(WeightUpdate(1))
    found = await task
    before = list(found.versions).count(0)
    assert list(found.versions) == [0] * before + [1] * (len(found.tokens) - before)
    assert 0 < before < len(found.tokens)
    stream = np.asarray([*asked.tokens, *found.tokens])
    [theirs], [new] = (score_streams(one, [stream], temperature=1.0) for one in (old, model))
    logprobs, at = np.asarray(found.logprobs), len(asked.tokens)
    assert np.abs(theirs[at:][:before] - logprobs[:before]).max() < 1e-4
    gap = np.abs(new[at:][before:] - logprobs[before:]).max()
    # With keys and values of the old weights it is neither model's.
    assert gap < 1e-4 if recomputes else gap > 1e-3


# Windows that go on.


class Makes(Windows[str]):
    """Groups that are there at once."""

    def __init__(self, admission: Admission, prompts: Sequence[str] = ()) -> None:
        left = iter(prompts)
        super().__init__(lambda count: [next(left) for _ in range(count)], per_group=1, admission=admission)
        self.made: list[tuple[int, str, int | None]] = []

    async def make_group(self, number: int, prompt: str, attempt: int = 0) -> Group:
        self.made.append((number, prompt, self._version))
        return Group(number, prompt, [])


def names(windows: Windows[str]) -> list[tuple[int, str]]:
    return [(number, one.prompt) for number, one in windows.under_way.items()]


async def test_windows_begin_with_the_version_and_say_what_is_under_way() -> None:
    windows = Makes(Admission(2, 1), "abcdefgh")
    assert windows.under_way == {}
    windows.serve(0)
    await turns()
    assert [number for number, _, _ in windows.made] == [0, 1, 2, 3]
    assert [group.prompt_id for group in await windows.next_window(0)] == ["a", "b"]
    assert names(windows) == [(2, "c"), (3, "d")]
    assert all(one.version == 0 for one in windows.under_way.values())
    # The version is the same: nothing more may begin.
    windows.serve(0)
    assert names(windows) == [(2, "c"), (3, "d")]
    windows.serve(1)
    assert names(windows) == [(2, "c"), (3, "d"), (4, "e"), (5, "f")]
    assert windows.under_way[4].version == 1
    await windows.close()


async def test_windows_make_again_what_was_taken_back_before_anything_new() -> None:
    windows = Makes(Admission(2, 1, started=6), "gh")
    windows.take_back({4: Admitted("e", 1), 5: Admitted("f", 1), 2: Admitted("c", 0), 3: Admitted("d", 0)})
    windows.serve(1)
    assert [group.prompt_id for group in await windows.next_window(1)] == ["c", "d"]
    windows.serve(2)
    assert [group.prompt_id for group in await windows.next_window(2)] == ["e", "f"]
    assert names(windows) == [(6, "g"), (7, "h")]
    await windows.close()


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
async def test_what_was_taken_back_begins_no_earlier_than_a_smaller_bound_allows(bound: int) -> None:
    """Six groups were begun within a bound of 2; with another one none may be older than that when it is trained."""
    windows = Makes(Admission(2, bound, started=10), "klmnopqrstuvw")
    windows.take_back({number: Admitted("abcdefghij"[number], 2) for number in range(4, 10)})
    trained = []
    for step in range(2, 8):
        windows.serve(step)
        trained += [(group.number, group.prompt_id) for group in await windows.next_window(step)]
    assert trained == [(number, "abcdefghijklmnop"[number]) for number in range(4, 16)]
    assert [number for number, _, _ in windows.made] == list(range(4, 4 + len(windows.made)))
    for number, _, version in windows.made:
        assert number // 2 - version <= bound
    await windows.close()


async def test_a_group_of_a_later_window_that_fails_is_told_at_once() -> None:
    class Fails(Makes):
        async def make_group(self, number: int, prompt: str, attempt: int = 0) -> Group:
            if number == 3:
                raise RuntimeError("group 3 broke")
            return await super().make_group(number, prompt, attempt)

    windows = Fails(Admission(2, 1), "abcd")
    windows.serve(0)
    with pytest.raises(RuntimeError, match="group 3"):
        await windows.next_window(0)
