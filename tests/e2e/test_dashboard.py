"""The dashboard's queries, put to a Prometheus that watches a deployment by our configuration."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from answers import new_id
from pdlaunch.hosts import free_ports
from questions import Question, words
from serving import TINY, Connection, Deployment, deployed, pdlaunch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="Prometheus is not on the path (Debian's package prometheus has it); that engines "
        "export what the queries name is tested on recorded pages",
    ),
]
SCRAPE_EVERY_S = 1
ANSWERS_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(TINY, "e2e-dashboard", tmp_path_factory.mktemp("dashboard")) as deployment:
        yield deployment


@contextmanager
def prometheus(folder: Path, configuration: Path) -> Iterator[str]:
    """Its address, with that configuration but for the interval: a test does not last minutes."""
    settings = yaml.safe_load(configuration.read_text())
    for job in settings["scrape_configs"]:
        job["scrape_interval"] = f"{SCRAPE_EVERY_S}s"
    own = folder / "prometheus.yaml"
    own.write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={own}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


async def query(client: httpx.AsyncClient, address: str, expression: str) -> list[dict[str, Any]]:
    response = await client.get(f"{address}/api/v1/query", params={"query": expression})
    assert response.status_code == httpx.codes.OK, f"{expression}: {response.text}"
    found: list[dict[str, Any]] = response.json()["data"]["result"]
    return found


async def watched(client: httpx.AsyncClient, address: str, processes: int) -> None:
    """Wait until Prometheus has read every process."""
    async with asyncio.timeout(ANSWERS_WITHIN_S):
        while True:
            try:
                up = await query(client, address, "up")
            except httpx.TransportError:
                up = []
            if [each["value"][1] for each in up] == ["1"] * processes:
                return
            await asyncio.sleep(SCRAPE_EVERY_S)


def test_every_query_returns_data_from_a_running_deployment(
    pair: Deployment, tmp_path: Path
) -> None:
    name = pair.plan.name
    pdlaunch(pair.state, "render", "monitoring", name, "--out", str(tmp_path))
    dashboard = json.loads((tmp_path / "grafana-dashboard.json").read_text())
    expressions = {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        .replace("$deployment", name)
        .replace("$__rate_interval", "1m")
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    }

    async def work(connection: Connection) -> dict[str, list[float]]:
        client = connection.client
        await watched(client, address, len(pair.plan.processes))
        for _ in range(3):
            # Of several chunks: a part of the KV moves while prefill runs.
            await connection.ask_all(
                Question(f"{number}", prompt=words(1000, new_id()), answer_tokens=8)
                for number in range(4)
            )
            await asyncio.sleep(2 * SCRAPE_EVERY_S)
        return {
            title: [float(each["value"][1]) for each in await query(client, address, expression)]
            for title, expression in expressions.items()
        }

    with prometheus(tmp_path, tmp_path / "prometheus.yaml") as address:
        found = pair.run(work)
    assert len(found) > 30
    without = [
        title
        for title, values in found.items()
        if not values or not all(math.isfinite(each) for each in values)
    ]
    assert without == []
