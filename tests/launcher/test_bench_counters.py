"""What a benchmark reads beside its load: engines' counters, CPU seconds."""

from __future__ import annotations

import os
import time

import pytest

from pdlaunch import preparation, recipe_loader
from pdlaunch.bench import counters
from pdlaunch.engine_metrics import Metrics
from pdlaunch.plan import DeploymentPlan


def plan(mode: str) -> DeploymentPlan:
    recipe = recipe_loader.find("tiny-qwen3-cpu")
    return preparation.planned(recipe_loader.load(recipe, (f"transfer.mode={mode}",)), None)


def scraped(prefill: str, decode: str) -> counters.Scraped:
    return {"prefill-0": Metrics.parse(prefill), "decode-0": Metrics.parse(decode)}


def histogram(name: str, count: int, total: float) -> str:
    return (
        f"# TYPE {name} histogram\n"
        f'{name}_bucket{{le="+Inf"}} {count}\n{name}_count {count}\n{name}_sum {total}\n'
    )


E2E = "vllm:e2e_request_latency_seconds"
DESCRIPTORS = "vllm:nixl_num_descriptors"


def test_legs_are_those_of_the_interval() -> None:
    before = scraped(histogram(E2E, 2, 1.0), "")
    after = scraped(histogram(E2E, 6, 3.0), histogram(E2E, 4, 8.0))
    pair = plan("push")
    assert counters.legs(pair, "prefill", before, after).e2e_s == pytest.approx(0.5)
    decode = counters.legs(pair, "decode", before, after)
    assert (decode.count, decode.e2e_s) == (4, pytest.approx(2.0))
    assert counters.legs(pair, "prefill", after, after).e2e_s == 0


@pytest.mark.parametrize(("mode", "expected"), [("pull", 7), ("push-upstream", 40), ("push", 40)])
def test_descriptors_are_those_of_the_side_that_issues_transfers(mode: str, expected: int) -> None:
    none = scraped("", "")
    after = scraped(histogram(DESCRIPTORS, 4, 40), histogram(DESCRIPTORS, 1, 7))
    assert counters.moved(plan(mode), none, after).descriptors == expected


def test_time_after_prefill_is_known_of_push_only() -> None:
    after_prefill = histogram("vllm:nixl_push_after_prefill_seconds", 4, 0.02)
    moved = counters.moved(plan("push"), scraped("", ""), scraped(after_prefill, ""))
    assert moved.after_prefill_s == pytest.approx(0.005)
    assert counters.moved(plan("pull"), scraped("", ""), scraped("", "")).after_prefill_s is None


def test_a_cache_tells_its_size() -> None:
    text = (
        "# TYPE vllm:cache_config_info gauge\n"
        'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="2048"} 1\n'
    )
    assert counters.cache_size(Metrics.parse(text)) == (32, 2048)
    assert counters.cache_size(Metrics()) == (0, 0)


def test_work_of_ours_is_no_work_of_others() -> None:
    every_s, ours_s = counters.all_cpu_s(), counters.cpu_s_of((os.getpid(),))
    until_s = time.process_time() + 0.3
    while time.process_time() < until_s:
        pass
    took_s = counters.cpu_s_of((os.getpid(),)) - ours_s
    assert took_s == pytest.approx(0.3, abs=0.1)
    # The kernel counts in hundredths, core by core.
    assert counters.all_cpu_s() - every_s >= took_s - 0.1


def test_processes_that_are_gone_count_nothing() -> None:
    assert counters.cpu_s_of((2**22 + 1,)) == 0
    assert counters.cpu_since({"prefill": 3.0}, {"prefill": 2.0, "decode": 1.0}) == {
        "prefill": 0.0,
        "decode": 1.0,
    }
