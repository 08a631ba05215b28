"""The docker backend on a real daemon, with an image of a shell and nothing else.

What the stand-in cannot show: that a daemon takes what it is asked for, and does it.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import secrets
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import APIClient

from launching import until
from pdlaunch import docker_daemon, hosts
from pdlaunch.containers import LAUNCH_LABEL, OWNER_LABEL, SECRETS
from pdlaunch.docker_backend import DockerBackend
from pdlaunch.errors import PdError
from pdlaunch.plan import ContainerPlan, Mount, ProcessPlan

pytestmark = pytest.mark.docker
PROGRAMS = ("/bin/sh", "/bin/sleep")
SECRET = "hf_0123456789"
WAITS = "while :; do sleep 0.1; done"


@pytest.fixture(scope="module")
def client() -> Iterator[APIClient]:
    try:
        client = docker_daemon.connect(docker_daemon.here())
    except PdError as error:
        pytest.skip(f"there is no Docker daemon: {error.what}")
    yield client
    client.close()


@pytest.fixture(scope="module")
def image(client: APIClient) -> Iterator[str]:
    """This machine's shell, and the libraries that it needs."""
    files = set(PROGRAMS)
    for program in PROGRAMS:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
        files.update(re.findall(r"(/\S+) \(0x", listed.stdout))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
        for file in sorted(files):
            archive.add(file)
        for folder in ("run", "tmp", "proc", "dev", "etc"):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
    name = f"pdlaunch-test:{secrets.token_hex(4)}"
    repository, _, tag = name.partition(":")
    client.import_image_from_data(packed.getvalue(), repository=repository, tag=tag)
    yield name
    client.remove_image(name, force=True)


@pytest.fixture
def backend(tmp_path: Path, launch: str) -> Iterator[DockerBackend]:
    backend = DockerBackend(launch, tmp_path, {**os.environ, "HF_TOKEN": SECRET})
    yield backend
    assert asyncio.run(backend.stop(5, lambda: False)) == []


@pytest.fixture
def launch() -> str:
    return secrets.token_hex(4)


def process(image: str, launch: str, script: str, folder: Path) -> ProcessPlan:
    endpoint = docker_daemon.here()
    return ProcessPlan(
        name="prefill-0",
        role="prefill",
        host="127.0.0.1",
        is_here=True,
        argv=("/bin/sh", "-c", script),
        env={"GREETING": "it's $HOME"},
        env_prepend={},
        env_unset=(),
        url="http://127.0.0.1:1",
        port=1,
        cores=hosts.cores(),
        container=ContainerPlan(
            endpoint=endpoint,
            image=image,
            name=f"pdlaunch-test-{launch}",
            labels={LAUNCH_LABEL: launch, OWNER_LABEL: launch},
            mounts=(Mount(source=str(folder), target="/model", is_read_only=True),),
            shm_gib=0.5,
            secrets=SECRETS,
        ),
    )


def containers(client: APIClient, launch: str) -> list[str]:
    found = client.containers(all=True, filters={"label": f"{LAUNCH_LABEL}={launch}"})
    return [str(each["Id"]) for each in found]


def test_life_of_a_container(
    client: APIClient, image: str, launch: str, backend: DockerBackend, tmp_path: Path
) -> None:
    script = (
        'trap "echo ends; exit 0" TERM; echo "$GREETING $HF_TOKEN"; while :; do sleep 0.1; done'
    )
    backend.start(process(image, launch, script, tmp_path))
    log = backend.log("prefill-0")
    # Logs hold what a process says; what pdlaunch shows of them is without secrets.
    assert until(lambda: log.read_text() == f"it's $HOME {SECRET}\n")
    (found,) = containers(client, launch)
    inspected = client.inspect_container(found)
    assert SECRET not in json.dumps(inspected)
    assert inspected["HostConfig"]["NetworkMode"] == "host"
    assert inspected["HostConfig"]["ShmSize"] == 2**29
    assert inspected["HostConfig"]["Init"] is True
    assert backend.deaths() == []
    assert asyncio.run(backend.stop(20, lambda: False)) == []
    assert log.read_text().endswith("ends\n")
    assert containers(client, launch) == []


def test_death_is_told_and_a_restart_goes_on_in_its_log(
    client: APIClient, image: str, launch: str, backend: DockerBackend, tmp_path: Path
) -> None:
    backend.start(process(image, launch, "echo dies; exit 7", tmp_path))
    assert until(lambda: bool(backend.deaths()))
    (death,) = backend.deaths()
    assert (death.code, death.how) == (7, None)
    first = containers(client, launch)
    backend.restart(process(image, launch, "echo dies; exit 7", tmp_path))
    assert until(lambda: bool(backend.deaths()))
    assert containers(client, launch) != first
    assert backend.log("prefill-0").read_text() == "dies\ndies\n"


def test_kill_is_told_as_a_signal(
    client: APIClient, image: str, launch: str, backend: DockerBackend, tmp_path: Path
) -> None:
    backend.start(process(image, launch, WAITS, tmp_path))
    client.kill(containers(client, launch)[0], "SIGKILL")
    assert until(lambda: bool(backend.deaths()))
    assert backend.deaths()[0].code == -9


def test_what_cannot_be_is_refused_and_said(
    client: APIClient, image: str, launch: str, backend: DockerBackend, tmp_path: Path
) -> None:
    with pytest.raises(PdError, match="bind source path does not exist") as caught:
        backend.start(process(image, launch, "exit", tmp_path / "none"))
    assert caught.value.next_step == "put the model on that host, at the same path"
    with pytest.raises(PdError, match="there is no image pdlaunch-test:none"):
        docker_daemon.image_labels(docker_daemon.here(), "pdlaunch-test:none")
    backend.start(process(image, launch, "exit", tmp_path))
    with pytest.raises(PdError, match="is there already"):
        backend.start(process(image, launch, "exit", tmp_path))


def test_anybody_can_sweep_a_launch(
    client: APIClient, image: str, launch: str, backend: DockerBackend, tmp_path: Path
) -> None:
    backend.start(process(image, launch, WAITS, tmp_path))
    assert docker_daemon.sweep(docker_daemon.here(), launch) == []
    assert containers(client, launch) == []
    assert until(lambda: bool(backend.deaths()))
