"""Records what a running deployment exports, for the tests of the dashboard.

    pdlaunch up tiny-qwen3-cpu --detach
    pdlaunch ask tiny-qwen3-cpu "$(head -c 1800 README.md)" --max-tokens 12    # a few times
    python tests/launcher/record_metrics.py tiny-qwen3-cpu

Kept are the metrics of vLLM and of the router, and of a histogram's buckets the last.
"""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

from pdlaunch import deployments
from pdlaunch.plan import ProcessPlan
from pdlaunch.planner import url

RECORDED = Path(__file__).parent / "recorded_metrics"


def trimmed(page: str) -> str:
    """The samples that count, with their types, without the help texts."""
    lines = [
        line
        for line in page.splitlines()
        if line.removeprefix("# TYPE ").startswith("vllm")
        # Has settings of the machine.
        and "vllm:cache_config_info" not in line
        and ("_bucket{" not in line or 'le="+Inf"' in line)
        and "_created" not in line
    ]
    return "\n".join(lines) + "\n"


def page_of(process: ProcessPlan) -> str:
    address = url(process.host, process.metrics_port or process.port)
    return httpx.get(f"{address}/metrics").raise_for_status().text


def main(name: str) -> None:
    record = deployments.read(name)
    if record is None:
        sys.exit(f"no deployment named {name}")
    RECORDED.mkdir(exist_ok=True)
    for process in record.plan.processes:
        text = trimmed(page_of(process))
        (RECORDED / f"{process.role}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
