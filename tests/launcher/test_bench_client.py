"""The client process: its protocol, with a stand-in for vLLM, and what becomes of its results."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from launching import until
from pdlaunch import preparation, recipe_loader
from pdlaunch.bench import client
from pdlaunch.bench.client import Client
from pdlaunch.bench.workload import Load
from pdlaunch.engine import Engine
from pdlaunch.errors import PdError
from pdlaunch.plan import DeploymentPlan

LOAD = Load("short", 200, 2, 3, at_once=2)
SERVE = """
import json, os, sys, time
from pathlib import Path

def add_cli_args(parser):
    for name in ("backend", "model", "tokenizer", "dataset-name", "dataset-path", "num-prompts",
                 "timed-trace-chunk-hash-size", "seed", "base-url", "endpoint", "request-rate",
                 "max-concurrency", "request-id-prefix", "temperature", "extra-body",
                 "result-dir", "result-filename"):
        parser.add_argument(f"--{name}")
    for name in ("no-self-timed", "ignore-eos", "save-result", "save-detailed", "disable-tqdm"):
        parser.add_argument(f"--{name}", action="store_true")

def main(args):
    print("a report for people")
    if args.base_url == "http://refuses":
        raise ValueError("no such server")
    if args.base_url == "http://crashes":
        os._exit(3)
    if args.base_url == "http://hangs":
        time.sleep(600)
    count = int(args.num_prompts)
    found = {
        "duration": 1.5,
        "ttfts": [0.1] * count,
        "latencies": [0.30000004] * count,
        "itls": [[0.2]] * count,
        "output_lens": [2] * count,
        "generated_texts": [args.extra_body] * count,
        "errors": ["", "", "Traceback\\n  more\\nClientError: gone\\n"],
    }
    Path(args.result_dir, args.result_filename).write_text(json.dumps(found))
"""
SAMPLES = """
import json
from pathlib import Path
from types import SimpleNamespace

def get_samples(args, tokenizer):
    lines = Path(args.dataset_path).read_text().splitlines()
    return [SimpleNamespace(prompt=json.loads(line)["hash_ids"]) for line in lines]
"""


@pytest.fixture(scope="module")
def plan() -> DeploymentPlan:
    loaded = recipe_loader.load(recipe_loader.find("tiny-qwen3-cpu"), ())
    return preparation.planned(loaded, None)


@pytest.fixture
def fake(tmp_path: Path) -> Engine:
    modules = {
        "vllm/__init__.py": "",
        "vllm/benchmarks/__init__.py": "",
        "vllm/benchmarks/serve.py": SERVE,
        "vllm/benchmarks/datasets.py": SAMPLES,
        "vllm/tokenizers.py": "get_tokenizer = str",
        "vllm/utils/__init__.py": "",
        "vllm/utils/argparse_utils.py": (
            "from argparse import ArgumentParser as FlexibleArgumentParser"
        ),
    }
    for name, source in modules.items():
        path = tmp_path / "modules" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/modules exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return Engine("cpu", tmp_path, python, python, python, "1", "abc")


@contextmanager
def started(engine: Engine, folder: Path) -> Iterator[Client]:
    with client.client(engine, folder, environ={}) as found:
        yield found
    assert until(lambda: not psutil.Process().children(recursive=True), within_s=10)


async def sent(to: Client, plan: DeploymentPlan, host: str = "answers") -> tuple[float, list[str]]:
    took_s, requests = await to.run(LOAD, f"http://{host}", plan, seed=1, salt="salted")
    return took_s, [each.error for each in requests]


def test_one_process_sends_several_loads(
    fake: Engine, plan: DeploymentPlan, tmp_path: Path
) -> None:
    async def work(to: Client) -> None:
        for _ in range(2):
            took_s, requests = await to.run(LOAD, "http://answers", plan, seed=1, salt="salted")
            assert took_s == 1.5
            assert [each.ok for each in requests] == [True, True, False]
            assert requests[2].error == "ClientError: gone"
            assert requests[0].second_token_s == pytest.approx(0.3)
            assert requests[0].latency_s == 0.3
            assert '"cache_salt": "salted"' in requests[0].text

    with started(fake, tmp_path) as to:
        asyncio.run(work(to))
    assert "a report for people" in (tmp_path / "client.log").read_text()


def test_prompts_are_those_that_would_be_sent(
    fake: Engine, plan: DeploymentPlan, tmp_path: Path
) -> None:
    with started(fake, tmp_path) as to:
        found = asyncio.run(to.prompts(LOAD, plan, seed=1))
    assert len(found) == 3 and len({tuple(each) for each in found}) == 3


@pytest.mark.parametrize(
    ("host", "told"), [("refuses", "ValueError: no such server"), ("crashes", "it ended")]
)
def test_a_load_that_fails_is_an_error_with_the_log(
    fake: Engine, plan: DeploymentPlan, tmp_path: Path, host: str, told: str
) -> None:
    with started(fake, tmp_path) as to, pytest.raises(PdError) as failed:
        asyncio.run(sent(to, plan, host))
    assert told in str(failed.value) and "client.log" in str(failed.value)


def test_the_process_outlives_a_load_that_failed(
    fake: Engine, plan: DeploymentPlan, tmp_path: Path
) -> None:
    async def work(to: Client) -> None:
        with pytest.raises(PdError):
            await sent(to, plan, "refuses")
        assert (await sent(to, plan))[0] == 1.5

    with started(fake, tmp_path) as to:
        asyncio.run(work(to))


def test_a_load_that_is_given_up_ends_at_once(
    fake: Engine, plan: DeploymentPlan, tmp_path: Path
) -> None:
    async def work(to: Client) -> None:
        async with asyncio.timeout(1):
            await sent(to, plan, "hangs")

    began_s = time.monotonic()
    with started(fake, tmp_path) as to, pytest.raises(TimeoutError):
        asyncio.run(work(to))
    assert time.monotonic() - began_s < 30


def test_pace_is_a_number_at_a_time_or_a_rate() -> None:
    closed = client.sending(LOAD, "http://any", Path("result.json"), salt="s")
    rate = replace(LOAD, at_once=None, requests_per_s=0.5)
    opened = client.sending(rate, "http://any", Path("result.json"), salt="s")
    assert closed[closed.index("--max-concurrency") + 1] == "2" and "--request-rate" not in closed
    assert opened[opened.index("--request-rate") + 1] == "0.5" and "--max-concurrency" not in opened


def test_no_two_loads_share_ids_of_requests() -> None:
    prefixes = set()
    for _ in range(20):
        found = client.sending(LOAD, "http://any", Path("result.json"), salt="s")
        prefixes.add(found[found.index("--request-id-prefix") + 1])
    assert len(prefixes) == 20
