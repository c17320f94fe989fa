"""Requests beside one another in virtual time: each gets the tokens of its run alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kits.cases import strategies
from kits.hypothesis_examples import examples
from kits.requests import SAMPLINGS, SMALL, own_text, prompt, some, text

from flowspec_edge.d0.models import DraftModels
from flowspec_edge.d0.request import Request, SchedulingPolicy
from flowspec_edge.d0.scheduler import Scheduler
from flowspec_edge.device_profile import load_profile
from flowspec_edge.drivers.virtual.cluster import VirtualCluster
from flowspec_edge.errors import UsageError
from flowspec_edge.messages import MAX_BATCH, Batch, Credit, Segment, parts_of
from flowspec_edge.strategies.registry import STRATEGIES

PROFILE = load_profile("paper-7b")
PIPELINED = [name for name, cls in STRATEGIES.items() if cls.parallelism == "pipeline"]


@cache
def virtual(model: Path, stages: int, policy: SchedulingPolicy = "fair") -> VirtualCluster:
    return VirtualCluster(model, stages, PROFILE, scheduling_policy=policy)


# ---- virtual time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", strategies(*PIPELINED))
def test_the_same_request_three_times(tiny_model: Path, name: str) -> None:
    """The same prompt with other noise, at other times: caches and draft models are each one's own."""
    requests = [Request(prompt(1), name, 10, sampling, SMALL) for sampling in SAMPLINGS]
    results = virtual(tiny_model, 3).generate_many(requests, [0.0, 0.7, 1.1])
    for request, result in zip(requests, results, strict=True):
        assert result.tokens == own_text(tiny_model, request)


@examples(12, quick=4)
@given(names=st.lists(st.sampled_from(PIPELINED), min_size=1, max_size=8), stages=st.integers(1, 4),
       policy=st.sampled_from(["fair", "fcfs"]), choice=st.data())
def test_requests_that_come_and_go_at_any_time(tiny_model: Path, names: list[str], stages: int,
                                               policy: SchedulingPolicy, choice: st.DataObject) -> None:
    """Any strategies, parameters, noise and priorities beside one another."""
    requests = [replace(request, priority=choice.draw(st.integers(-2, 2)),
                        params=replace(SMALL, segment=choice.draw(st.integers(1, 8)),
                                       prefill_chunk=choice.draw(st.integers(1, 20))))
                for request in some(len(names), names)]
    moments = st.floats(0, 3)
    arrivals = [choice.draw(moments) for _ in names]
    leaves = [at + choice.draw(moments) if choice.draw(st.integers(0, 3)) == 0 else None for at in arrivals]
    results = virtual(tiny_model, stages, policy).generate_many(requests, arrivals, leaves=leaves)
    for request, result, leave in zip(requests, results, leaves, strict=True):
        expected = own_text(tiny_model, request)
        assert result.tokens == expected[: len(result.tokens)], request.strategy
        assert (result.tokens, result.finish_reason) == (expected, "length") or leave is not None


@pytest.mark.parametrize("kind", ["megatron", "galaxy"])
def test_a_tensor_parallel_group_takes_several(tiny_model: Path, kind: str) -> None:
    requests = some(3, [kind])
    results = virtual(tiny_model, 2).generate_many(requests)
    assert [result.tokens for result in results] == [own_text(tiny_model, request) for request in requests]


def test_one_ends_early_and_one_goes_away(tiny_model: Path) -> None:
    """The others do not notice; of the one that went away there is what it had."""
    requests = some(4, ["flowspec", "chunk_pp", "autoregressive"])
    whole = own_text(tiny_model, requests[1])
    stop = next(token for i, token in enumerate(whole) if i and token not in whole[:i])
    requests[1] = Request(requests[1].prompt, "chunk_pp", 11, requests[1].sampling, SMALL, frozenset({stop}))
    alone = virtual(tiny_model, 3).generate(requests[2])
    leave = alone.stats.ttft_s + alone.stats.decode_s / 2
    cluster = VirtualCluster(tiny_model, 3, PROFILE)  # which counts its sessions from 1
    results = cluster.generate_many(requests, leaves=[None, None, leave, None])
    assert results[1].tokens == whole[: whole.index(stop)]
    assert results[1].finish_reason == "stop"
    assert results[2].finish_reason == "cancelled"
    expected = own_text(tiny_model, requests[2])
    assert results[2].tokens == expected[: len(results[2].tokens)]
    assert len(results[2].tokens) < len(expected)
    for i in (0, 3):
        assert results[i].tokens == own_text(tiny_model, requests[i])
    late = [span for span in cluster.spans if span.session == 3 and span.start > leave + 0.5]
    assert not late  # what it had in the pipeline is given up


def test_alone_means_alone(tiny_model: Path) -> None:
    """A request that others follow when it is over has the figures of its run alone, and they theirs."""
    requests = some(2, ["flowspec"])
    cluster = virtual(tiny_model, 3)
    alone = [cluster.generate(request) for request in requests]
    apart = cluster.generate_many(requests, [0.0, 100.0])
    assert apart[0] == alone[0]
    assert apart[1].tokens == alone[1].tokens
    assert apart[1].stats.ttft_s == pytest.approx(alone[1].stats.ttft_s)
    assert apart[1].stats.bytes == pytest.approx(alone[1].stats.bytes, rel=0.01)


def test_two_clients_who_ask_again_when_they_are_answered(tiny_model: Path) -> None:
    """The first asks three times, the second, from 0.5 s on, twice."""
    requests = some(5, ["flowspec", "autoregressive"])
    cluster = virtual(tiny_model, 2)
    results = cluster.generate_many(requests, [0.0, 9.0, 9.0, 0.5, 9.0], follows=[None, 0, 1, None, 3])
    assert [result.tokens for result in results] == [own_text(tiny_model, request) for request in requests]
    seconds = [result.stats.ttft_s + result.stats.decode_s for result in results]
    end = max(span.end for span in cluster.spans)
    assert end == pytest.approx(max(sum(seconds[:3]), 0.5 + sum(seconds[3:])), rel=0.02)
    assert end < sum(seconds)  # not one after the other


def test_others_fill_the_bubbles_of_the_oldest(tiny_model: Path) -> None:
    requests = [Request(prompt(i), "autoregressive", 12, params=SMALL) for i in range(3)]
    cluster = virtual(tiny_model, 4)
    alone = cluster.generate(requests[0])
    together = cluster.generate_many(requests)
    first, *others = [result.stats.ttft_s + result.stats.decode_s for result in together]
    one = alone.stats.ttft_s + alone.stats.decode_s
    assert first < 1.25 * one
    assert max(others) < 1.5 * one  # three one after the other: 3
    for result in together:
        rows = [stage["rows"] for stage in result.stats.stages]
        assert rows == [stage["rows"] for stage in alone.stats.stages]


@pytest.mark.parametrize("name", [
    "flowspec", *(pytest.param(name, marks=pytest.mark.soak) for name in ("chunk_pp", "autoregressive"))])
def test_two_at_once_give_more_tokens_a_second(demo_model: Path, demo_prompts: list[list[int]], name: str
                                               ) -> None:
    requests = [Request(tokens, name, 20) for tokens in demo_prompts[:2]]
    cluster = virtual(demo_model, 4)
    alone = [cluster.generate(request) for request in requests]
    together = cluster.generate_many(requests)
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    seconds = [[r.stats.ttft_s + r.stats.decode_s for r in results] for results in (alone, together)]
    assert max(seconds[1]) < 0.95 * sum(seconds[0])


def demo_speeds(model: Path, prompts: list[list[int]], policy: SchedulingPolicy, priorities: tuple[int, ...]
                ) -> list[float]:
    """Tokens/s of requests beside one another, whose texts are those of their runs alone."""
    cluster = virtual(model, 4, policy)
    requests = [Request(tokens, "flowspec_plus", 24, priority=priority)
                for tokens, priority in zip(prompts, priorities, strict=False)]
    results = cluster.generate_many(requests)
    expected = [text(model, tuple(request.prompt), 24, request.sampling) for request in requests]
    assert [result.tokens for result in results] == expected
    return [result.stats.tokens_per_second for result in results]


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, pytest.param(3, marks=pytest.mark.soak)])
def test_a_higher_priority_gives_more_tokens_a_second(demo_model: Path, demo_prompts: list[list[int]],
                                                      place: int) -> None:
    """To the oldest as to the youngest of four that are asked the same."""
    same, priorities = [demo_prompts[0]] * 4, [0, 0, 0, 0]
    equal = demo_speeds(demo_model, same, "fair", tuple(priorities))
    priorities[place] = -1
    urgent = demo_speeds(demo_model, same, "fair", tuple(priorities))
    assert urgent[place] > equal[place]
    assert urgent[place] == max(urgent)


@pytest.mark.slow
def test_in_order_of_arrival_the_oldest_is_as_fast_as_alone(demo_model: Path, demo_prompts: list[list[int]]
                                                            ) -> None:
    prompts = demo_prompts[1:]
    [alone] = demo_speeds(demo_model, prompts, "fcfs", (0,))
    together = demo_speeds(demo_model, prompts, "fcfs", (0, 0, 0))
    assert together[0] > 0.9 * alone
    assert together[0] > demo_speeds(demo_model, prompts, "fair", (0, 0, 0))[0]
    overtaken = demo_speeds(demo_model, demo_prompts, "fcfs", (0, 0, -1))
    assert overtaken[2] > together[2]


def test_a_prompt_of_a_higher_priority_is_read_first(tiny_model: Path) -> None:
    """Three prompts, of more rows than a batch has."""
    requests = [Request(prompt(i, 500), "autoregressive", 2, params=replace(SMALL, prefill_chunk=256))
                for i in range(3)]
    urgent = [*requests[:2], replace(requests[2], priority=-1)]
    for policy in ("fair", "fcfs"):
        cluster = virtual(tiny_model, 2, policy)
        equal, first = (cluster.generate_many(some)[2].stats.ttft_s for some in (requests, urgent))
        assert first < equal


def test_what_cannot_be_beside_one_another_is_refused(tiny_model: Path) -> None:
    cluster = virtual(tiny_model, 2)
    with pytest.raises(UsageError, match="one kind of parallelism, not galaxy and pipeline"):
        cluster.generate_many([Request(prompt(1), "flowspec", 4), Request(prompt(1), "galaxy", 4)])
    assert cluster.generate_many([]) == []


# ---- who goes next ---------------------------------------------------------------------------------


def scheduled(model: Path, count: int, strategy: str = "autoregressive", length: int = 40,
              priorities: tuple[int, ...] = (0, 0, 0)) -> Scheduler:
    device0, scheduler = DraftModels(model), Scheduler()
    for number in range(1, count + 1):
        request = Request(prompt(number, length), strategy, 4, params=SMALL, priority=priorities[number - 1])
        opening = scheduler.add(device0.draft_session(request, 2, lambda: 0.0, number, lambda kind: 1.0))
        assert opening.concurrent == tuple(range(1, number))
    return scheduler


def sent(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Session, run and rows of each segment that goes to V1."""
    return [(part.session, part.run, len(part.numbers)) for message in scheduler.take_messages()
            if isinstance(message, Segment | Batch) for part in parts_of(message)]


@examples(30, quick=12)
@given(removed=st.integers(1, 3), order=st.permutations([1, 2, 3]))
def test_one_batch_at_v1_with_rows_of_all(tiny_model: Path, removed: int, order: list[int]) -> None:
    sessions = scheduled(tiny_model, 3)
    assert sent(sessions) == [(1, 0, 16), (2, 0, 16), (3, 0, 16)]
    assert sessions.remove(removed).session == removed
    assert sent(sessions) == []  # the removed request's rows are at V1 still
    for number in order:  # what does not name the batch frees nothing
        sessions.receive(Credit(number, 0, 7))
        sessions.receive(Credit(number, 0, 0)) if number > 1 else None
    assert sent(sessions) == []
    sessions.receive(Credit(1, 0, 0))
    assert sent(sessions) == [(number, 1, 16) for number in (1, 2, 3) if number != removed]


def test_who_found_no_room_in_a_batch_is_in_the_next(tiny_model: Path) -> None:
    count = MAX_BATCH + 9
    everyone = {*range(1, count + 1)}
    sessions = scheduled(tiny_model, count, priorities=(0,) * count)
    first = {session for session, _, _ in sent(sessions)}
    assert first < everyone
    sessions.receive(Credit(1, 0, 0))
    assert first | {session for session, _, _ in sent(sessions)} == everyone


def test_ranks_of_a_tensor_parallel_group_get_one_segment(tiny_model: Path) -> None:
    sessions = scheduled(tiny_model, 2, "galaxy", 16)
    assert sent(sessions) == [(1, 0, 16)]
    sessions.receive(Credit(1, 0, 0))
    assert sent(sessions) == [(2, 0, 16)]


def test_a_group_computes_the_segment_of_the_highest_priority(tiny_model: Path) -> None:
    sessions = scheduled(tiny_model, 3, "galaxy", 16, priorities=(1, 0, 0))
    assert sent(sessions) == [(2, 0, 16)]
