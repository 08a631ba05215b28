"""What a benchmark would do: its loads, its order, its deployments, what it refuses."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlaunch import preparation, recipe_loader
from pdlaunch.bench import client, schedule, workload
from pdlaunch.bench.schedule import MODES, ONE_ENGINE, alone, modes_of
from pdlaunch.bench.workload import WORKLOADS, Load
from pdlaunch.errors import UsageError
from pdlaunch.plan import DeploymentPlan
from pdlaunch.recipe_loader import Loaded

EVERYTHING = (*WORKLOADS[0].loads, *(each for one in WORKLOADS[1:] for each in one.loads))


def loaded(*overrides: str) -> Loaded:
    return recipe_loader.load(recipe_loader.find("tiny-qwen3-cpu"), overrides)


def planned(*overrides: str) -> DeploymentPlan:
    return preparation.planned(loaded(*overrides), None)


def test_loads_have_names_of_their_own() -> None:
    for loads in (EVERYTHING, workload.select((), quick=True)):
        assert len({load.name for load in loads}) == len(loads)


@pytest.mark.parametrize("load", EVERYTHING, ids=lambda load: load.name)
def test_a_load_is_a_closed_loop_or_an_open_one(load: Load) -> None:
    assert (load.at_once is None) != (load.requests_per_s is None)
    assert load.requests >= (load.at_once or 1)
    assert (load.cached_by is None) == (load.cached_tokens == 0)
    assert load.cached_tokens < load.prompt_tokens


def test_all_workloads_are_measured_unless_some_are_named() -> None:
    assert workload.select((), quick=False) == EVERYTHING
    named = workload.select(("chat", "short", "chat"), quick=False)
    assert [load.name for load in named] == [
        *("chat x1", "chat x4", "chat x8", "chat x16"),
        *("short x1", "short x4", "short x8", "short x16"),
    ]


def test_an_unknown_workload_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError) as refused:
        workload.select(("shrot",), quick=False)
    assert "did you mean short?" in str(refused.value)


def test_a_workload_without_a_quick_form_is_refused_with_quick() -> None:
    with pytest.raises(UsageError, match="busy has no quick form"):
        workload.select(("busy",), quick=True)


def test_loads_longer_than_the_model_are_refused_before_anything_starts() -> None:
    loads = workload.select(("next-turn",), quick=False)
    workload.check_fits(loads, 2080)
    workload.check_fits(loads, None)
    with pytest.raises(UsageError, match="next-turn x1 needs 2080 tokens"):
        workload.check_fits(loads, 2079)


@given(st.permutations(MODES), st.integers(1, len(MODES)), st.integers(1, 12))
def test_every_round_brings_each_up_once_and_places_rotate(
    order: list[str], count: int, rounds: int
) -> None:
    modes = modes_of(",".join(order[:count]))
    made = schedule.schedule(modes, EVERYTHING, rounds)
    subjects = {ONE_ENGINE, *modes}
    assert len(made.visits) == rounds * len(subjects)
    by_round = [
        [visit.subject for visit in made.visits if visit.round == number]
        for number in range(rounds)
    ]
    assert all(set(each) == subjects for each in by_round)
    places = Counter((subject, place) for each in by_round for place, subject in enumerate(each))
    assert max(places.values()) - min(places.get((s, p), 0) for s in subjects for p in range(
        len(subjects)
    )) <= 1  # fmt: skip


def test_no_two_loads_or_rounds_have_the_same_prompts() -> None:
    made = schedule.schedule(MODES, EVERYTHING, 5)
    seeds = [made.seed(load, number) for number in range(5) for load in EVERYTHING]
    assert len(set(seeds)) == len(seeds)


def test_quick_takes_less_than_ten_minutes_of_two_cores() -> None:
    quick = schedule.schedule(MODES, workload.select((), quick=True), 2)
    assert quick.expected_s < 600


def test_an_open_loop_takes_as_long_as_its_requests_need_to_arrive() -> None:
    assert schedule.expected_s(Load("any", 9, 9, 30, requests_per_s=0.5)) == 60


@given(st.integers(0, 1000), st.integers(0, 1000), st.sampled_from(EVERYTHING))
def test_prompts_come_once(one: int, other: int, load: Load) -> None:
    def numbers(seed: int) -> list[int]:
        lines = client.trace(load, seed).splitlines()
        return [number for line in lines for number in json.loads(line)["hash_ids"]]

    found = numbers(one) + (numbers(other) if other != one else [])
    assert len(set(found)) == len(found)


def test_the_beginning_of_a_prompt_is_that_of_the_whole_one() -> None:
    (load,) = workload.select(("next-turn",), quick=False)
    whole = [json.loads(line) for line in client.trace(load, 7).splitlines()]
    begun = [
        json.loads(line) for line in client.trace(replace(load, prompt_tokens=2000), 7).splitlines()
    ]
    assert [each["hash_ids"][0] for each in whole] == [each["hash_ids"][0] for each in begun]
    arguments = client.arguments(load, planned(), Path("prompts.jsonl"), seed=7)
    at = arguments.index("--timed-trace-chunk-hash-size")
    assert arguments[at + 1] == "2000"


def test_modes_are_named_with_commas() -> None:
    assert modes_of("push, pull,push") == ("push", "pull")
    with pytest.raises(UsageError) as refused:
        modes_of("push,poll")
    assert "'poll'" in str(refused.value) and "pull, push-upstream, push" in str(refused.value)


def test_one_engine_is_prefill_without_a_connector_on_its_cores() -> None:
    plan = planned()
    (engine,) = alone(plan).own
    (prefill,) = plan.of_role("prefill")
    assert engine.cores == prefill.cores and engine.env == prefill.env
    assert not [word for word in engine.argv if "kv-transfer" in word or "Connector" in word]
    assert set(engine.argv) < set(prefill.argv)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("decode.host=203.0.113.9",), "decode-0 belongs to 203.0.113.9"),
        (("router.host=203.0.113.9",), "router belongs to 203.0.113.9"),
        (("decode.replicas=2",), "one prefill and one decode engine"),
    ],
)
def test_what_is_not_one_pair_on_one_machine_is_refused(
    overrides: tuple[str, ...], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        schedule.check_measurable(loaded(*overrides).recipe, planned(*overrides))
