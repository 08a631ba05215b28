"""`pdlaunch up --backend docker` and the rest of a deployment's life, on a stand-in for daemons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from docker import APIClient

from launching import Command, Launcher, fake_processes, load, until
from pdlaunch import deployments, docker_backend, docker_daemon, models, recipe_loader
from pdlaunch.containers import VERSION_LABEL
from pdlaunch.docker_backend import _copy
from pdlaunch.engine import Engine
from pdlaunch.paths import recipes_dir
from pdlaunch.recipe import LOCAL_HOST
from pdlaunch.recipe_checks import workers_per_engine

FAKE = Path(__file__).with_name("fake_docker.py")
ALL = {path.stem: recipe_loader.load(path, ()).recipe for path in recipes_dir().glob("*.yaml")}
# All that can be started on hosts.
RECIPES = sorted(
    name
    for name, recipe in ALL.items()
    if recipe.engine.variant != "neuron"
    and all(workers_per_engine(section) <= 8 for section in (recipe.prefill, recipe.decode))
)
IMAGE = "pdlaunch:cpu"
SECRET = "side-channel-0123456789"


@dataclass
class FakeDocker:
    """A daemon that stands in for Docker's, in a process of its own."""

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def endpoint(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    def set(self, name: str, value: Any) -> None:
        (self.folder / name).write_text(json.dumps(value))

    def client(self) -> APIClient:
        return APIClient(base_url=self.endpoint, version="auto")

    def containers(self) -> list[str]:
        found = self.client().containers(all=True)
        return sorted(each["Names"][0].lstrip("/") for each in found)

    def requests(self) -> list[dict[str, Any]]:
        text = (self.folder / "requests.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait()


def started(folder: Path, version: str) -> FakeDocker:
    folder.mkdir(parents=True)
    daemon = FakeDocker(folder, subprocess.Popen([sys.executable, "-S", str(FAKE), str(folder)]))
    images = (IMAGE, "pdlaunch:latest")
    daemon.set("images.json", {image: {VERSION_LABEL: version} for image in images})
    assert until((folder / "ready").exists)
    return daemon


@pytest.fixture(autouse=True)
def surroundings(
    tmp_path: Path, launcher: Launcher, fake_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """An image's programs on the path, a model's folder, and nothing left at the end."""
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(models, "planned_embedded", lambda name: tmp_path / "model")
    monkeypatch.setattr(models, "ensure_embedded", lambda *_: tmp_path / "model")
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {sys.executable} -S {FAKE} ssh {tmp_path}/hosts "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake_engine.root}:{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    yield
    for command in launcher.started:
        if command.code is None:
            command.kill(signal.SIGINT)
            command.wait()
    assert until(lambda: not fake_processes()), fake_processes()


@pytest.fixture
def daemon(
    tmp_path: Path, fake_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeDocker]:
    """This machine's daemon."""
    daemon = started(tmp_path / "d", fake_engine.version)
    monkeypatch.setenv("DOCKER_HOST", daemon.endpoint)
    yield daemon
    daemon.end()


@pytest.fixture
def two_hosts(tmp_path: Path, fake_engine: Engine) -> Iterator[tuple[FakeDocker, FakeDocker]]:
    """Daemons of two other hosts, which ssh reaches."""
    names = ("127.0.0.2", "127.0.0.3")
    first, second = (started(tmp_path / "hosts" / name, fake_engine.version) for name in names)
    yield first, second
    first.end()
    second.end()


HOSTS = (
    *("--set", "prefill.host=ssh://ubuntu@127.0.0.2"),
    *("--set", "router.host=ssh://ubuntu@127.0.0.2"),
    *("--set", "decode.host=ssh://ubuntu@127.0.0.3"),
)


def names(deployment: str) -> list[str]:
    return [f"pdlaunch-{deployment}-{each}" for each in ("decode-0", "prefill-0", "router")]


def kill_launcher(command: Command) -> None:
    """Kill a supervisor and whatever would clean up after it."""
    guardians = [each for each in psutil.Process(command.pid).children() if "python" in each.name()]
    for each in guardians:
        each.kill()
    command.kill(signal.SIGKILL)
    command.wait()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_lives_in_containers(
    launcher: Launcher,
    daemon: FakeDocker,
    two_hosts: tuple[FakeDocker, FakeDocker],
    recipe: str,
) -> None:
    settings: tuple[str, ...] = ()
    places: tuple[FakeDocker, ...] = (daemon,)
    if ALL[recipe].prefill.host != LOCAL_HOST:
        ports = ("prefill.port", "prefill.side_channel_port", "decode.port")
        ports += ("decode.side_channel_port", "router.port", "router.metrics_port")
        settings = (*HOSTS, *(word for port in ports for word in ("--set", f"{port}=null")))
        places = two_hosts
    ready = ("--set", "timeouts.ready_s=60", "--set", "timeouts.stop_s=3")
    code, out, err = launcher.run(
        "up", recipe, "--backend", "docker", "--detach", "--json", *ready, *settings
    )
    assert code == 0, err
    assert json.loads(out)["name"] == recipe
    assert "KV moved by push" in err

    code, out, _ = launcher.run("status", recipe, "--json")
    status = json.loads(out)
    assert status["is_healthy"] is True
    found = sorted(process["container"] for process in status["processes"])
    assert found == sorted(f"pdlaunch-{recipe}-{each['name']}" for each in status["processes"])
    assert sorted(name for place in places for name in place.containers()) == found
    assert "pdlaunch-" in launcher.run("status", recipe)[1]

    code, out, _ = launcher.run("ask", recipe, "What is the capital of France?")
    assert (code, out) == (0, "Paris\n")
    code, out, _ = launcher.run("logs", recipe)
    for name in ("prefill-0", "decode-0", "router"):
        assert f"{name} | INFO 11-29 10:00:00 [api.py:1] serving on" in out
    for place in places:
        for each in place.client().containers(all=True):
            inspected = place.client().inspect_container(each["Id"])
            assert inspected["State"]["Running"]
            assert inspected["Config"]["Labels"]["pdlaunch.deployment"] == recipe

    assert launcher.run("down", recipe)[0] == 0
    assert all(place.containers() == [] for place in places)
    # Logs are read when all is over.
    assert "serving on" in launcher.run("logs", recipe, "decode-0")[1]


def test_recipe_may_say_it_and_ctrl_c_takes_all_down(
    launcher: Launcher, daemon: FakeDocker
) -> None:
    command = launcher.begin("up", launcher.recipe("a", "backend: docker\n"))
    command.until("a is ready: http://127.0.0.1:")
    assert daemon.containers() == names("a")
    command.kill(signal.SIGINT)
    assert command.wait() == 130
    assert daemon.containers() == []
    assert deployments.read("a") is None


def test_one_command_starts_both_hosts_and_a_failure_on_one_clears_the_other(
    launcher: Launcher, two_hosts: tuple[FakeDocker, FakeDocker]
) -> None:
    first, second = two_hosts
    # A model of this machine is on no other.
    recipe = launcher.folder / "a.yaml"
    recipe.write_text(
        "name: a\nmodel: Org/Model\nbackend: docker\nengine: {variant: cpu}\n"
        "timeouts: {ready_s: 60, stop_s: 3}\n"
    )
    command = launcher.begin("up", str(recipe), *HOSTS)
    command.until("a is ready: http://127.0.0.2:")
    assert first.containers() == ["pdlaunch-a-prefill-0", "pdlaunch-a-router"]
    assert second.containers() == ["pdlaunch-a-decode-0"]
    command.kill(signal.SIGINT)
    assert command.wait() == 130
    assert first.containers() == second.containers() == []

    second.set("broken.json", {"decode-0": "error mounting /dev/infiniband: no such file"})
    code, _, err = launcher.run("up", str(recipe), *HOSTS)
    assert code == 1
    assert "cannot start decode-0" in err and "where: ssh://ubuntu@127.0.0.3" in err
    assert "next:  install EFA's driver on that host" in err
    assert any("prefill-0" in each["call"] for each in first.requests())
    assert first.containers() == second.containers() == []


def test_two_endpoints_may_be_one_daemon(
    launcher: Launcher, tmp_path: Path, fake_engine: Engine
) -> None:
    daemon = started(tmp_path / "hosts" / "127.0.0.2", fake_engine.version)
    (tmp_path / "hosts" / "127.0.0.3").symlink_to(daemon.folder)
    # A model of this machine is on no other.
    engine = ("--set", "model=Org/Model", "--set", "timeouts.stop_s=3")
    command = launcher.begin("up", launcher.recipe("a", "backend: docker\n"), *engine, *HOSTS)
    command.until("a is ready: http://127.0.0.2:")
    assert daemon.containers() == names("a")
    command.kill(signal.SIGINT)
    assert command.wait() == 130
    assert daemon.containers() == []
    daemon.end()


def test_a_host_that_ssh_cannot_reach_is_named(
    launcher: Launcher, two_hosts: tuple[FakeDocker, FakeDocker]
) -> None:
    settings = [word.replace("127.0.0.3", "127.0.0.9") for word in HOSTS]
    code, _, err = launcher.run(
        "up", "reference", "--backend", "docker", *settings, "--set", "engine.variant=cuda"
    )
    assert code == 1
    assert "the Docker daemon at ssh://ubuntu@127.0.0.9 does not answer" in err
    assert "docker -H ssh://ubuntu@127.0.0.9 version" in err
    assert "Traceback" not in err
    assert two_hosts[0].containers() == []


def test_a_secret_reaches_the_engines_and_can_be_read_nowhere(
    launcher: Launcher, daemon: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_SECRET", SECRET)
    command = launcher.begin("up", launcher.recipe("a", "backend: docker\n"))
    command.until("a is ready")
    client = daemon.client()
    inspected = [client.inspect_container(name) for name in names("a")]
    assert SECRET not in json.dumps(inspected) + json.dumps(daemon.requests())
    knows = {}
    for process in fake_processes():
        line = process.cmdline()
        assert SECRET not in " ".join(line)
        knows["vllm-router" if "vllm-router" in line else "vllm"] = (
            process.environ().get("VLLM_NIXL_SIDE_CHANNEL_SECRET") == SECRET
        )
    # The launcher's own guardian is a process of this machine and inherits all.
    assert knows["vllm"] is True and knows["vllm-router"] is False
    assert SECRET not in (deployments.folder("a") / "deployment.json").read_text()
    command.kill(signal.SIGINT)
    command.wait()


def test_second_role_that_cannot_start_takes_the_first_with_it(
    launcher: Launcher, daemon: FakeDocker
) -> None:
    daemon.set(
        "broken.json",
        {"decode-0": 'could not select device driver "" with capabilities: [[gpu]]'},
    )
    code, _, err = launcher.run("up", launcher.recipe("a", "backend: docker\n"))
    assert code == 1
    assert "cannot start decode-0: could not select device driver" in err
    assert "install the NVIDIA container toolkit" in err
    assert daemon.containers() == []
    assert deployments.read("a") is None


def test_container_that_dies_at_start_is_reported_with_cause_code_and_log(
    launcher: Launcher, daemon: FakeDocker
) -> None:
    extra = "backend: docker\ndecode: {env: {FAKE_ENGINE: dies=7}}\n"
    code, _, err = launcher.run("up", launcher.recipe("a", extra))
    assert code == 7
    assert "decode-0 exited with code 7" in err
    assert "ValueError: no such model" in err
    assert f"where: {deployments.log_dir('a') / 'decode-0.log'}" in err
    assert daemon.containers() == []


def test_interrupted_while_a_container_starts(launcher: Launcher, daemon: FakeDocker) -> None:
    daemon.set("slow", 1)
    command = launcher.begin("up", launcher.recipe("a", "backend: docker\n"))
    assert until(lambda: len(daemon.containers()) == 2)
    command.kill(signal.SIGTERM)
    assert command.wait() == 143
    assert daemon.containers() == []


def test_containers_go_with_a_launcher_that_is_killed(
    launcher: Launcher, daemon: FakeDocker
) -> None:
    command = launcher.begin("up", launcher.recipe("a", "backend: docker\n"))
    command.until("a is ready")
    command.kill(signal.SIGKILL)
    command.wait()
    assert until(lambda: daemon.containers() == [])
    # The record waits for whoever asks.
    assert launcher.run("down", "a")[0] == 0


@pytest.mark.parametrize("has_record", [True, False])
def test_what_a_dead_launcher_left_is_removed_by_the_next(
    launcher: Launcher, daemon: FakeDocker, has_record: bool
) -> None:
    recipe = launcher.recipe("a", "backend: docker\n")
    command = launcher.begin("up", recipe, "--set", "decode.replicas=2")
    command.until("a is ready")
    kill_launcher(command)
    assert len(daemon.containers()) == 4
    if not has_record:
        deployments.remove_record("a")
    other = launcher.begin("up", recipe)
    other.until("a is ready")
    assert daemon.containers() == names("a")
    other.kill(signal.SIGINT)
    other.wait()


def test_replicas_in_containers_restart_without_a_failed_request(
    launcher: Launcher, daemon: FakeDocker
) -> None:
    recipe = launcher.recipe(
        "a",
        "backend: docker\nprefill: {replicas: 2, env: {FAKE_ENGINE: slow=0.3}}\n",
    )
    assert launcher.run("up", recipe, "--detach")[0] == 0
    try:
        with load("a") as answers:
            code, _, err = launcher.run("restart", "a", "--role", "prefill")
        assert code == 0, err
        assert set(answers) == {200}
        assert err.index("prefill-0: back in service") < err.index("prefill-1: taking it out")
    finally:
        launcher.run("down", "a")
    assert daemon.containers() == []


def test_down_removes_what_a_dead_launcher_left(launcher: Launcher, daemon: FakeDocker) -> None:
    command = launcher.begin("up", launcher.recipe("a", "backend: docker\n"))
    command.until("a is ready")
    kill_launcher(command)
    assert launcher.run("status", "a")[1].startswith("a: crashed")
    assert launcher.run("down", "a")[0] == 0
    assert daemon.containers() == []


def test_a_container_of_somebody_else_is_left_alone(launcher: Launcher, daemon: FakeDocker) -> None:
    theirs = {"Image": IMAGE, "Cmd": ["sleep", "600"], "Labels": {"pdlaunch.deployment": "a"}}
    daemon.client().create_container_from_config(theirs, "pdlaunch-a-decode-0")
    code, _, err = launcher.run("up", launcher.recipe("a", "backend: docker\n"))
    assert code == 1
    assert "a container pdlaunch-a-decode-0 is there already" in err
    assert f"docker -H {daemon.endpoint} rm -f pdlaunch-a-decode-0" in err
    assert daemon.containers() == ["pdlaunch-a-decode-0"]


def test_deployments_side_by_side_do_not_touch_each_other(
    launcher: Launcher, daemon: FakeDocker
) -> None:
    for name in ("a", "b"):
        recipe = launcher.recipe(name, "backend: docker\n")
        assert launcher.run("up", recipe, "--detach")[0] == 0
    assert launcher.run("down", "a")[0] == 0
    assert daemon.containers() == names("b")
    assert launcher.run("down", "--all")[0] == 0
    assert daemon.containers() == []


def test_image_that_is_missing_says_how_to_bring_it(launcher: Launcher, daemon: FakeDocker) -> None:
    recipe = launcher.recipe("a", "backend: docker\ndocker: {image: mine:1}\n")
    code, _, err = launcher.run("up", recipe)
    assert code == 1
    assert f"there is no image mine:1\n  where: {daemon.endpoint}" in err
    assert "pdlaunch build image --tag mine:1" in err and "pull mine:1" in err
    assert daemon.containers() == []


def test_image_of_another_series_is_told(launcher: Launcher, daemon: FakeDocker) -> None:
    daemon.set("images.json", {IMAGE: {VERSION_LABEL: "0.31.0+cpu.pd.old"}})
    command = launcher.begin("up", launcher.recipe("a", "backend: docker\n"))
    command.until("the image pdlaunch:cpu holds vLLM 0.31.0+cpu.pd.old")
    command.until("a is ready")
    command.kill(signal.SIGINT)
    command.wait()


def test_images_of_two_series_are_refused(
    launcher: Launcher, two_hosts: tuple[FakeDocker, FakeDocker]
) -> None:
    two_hosts[1].set("images.json", {"pdlaunch:latest": {VERSION_LABEL: "0.31.0+pd.old"}})
    code, _, err = launcher.run("up", "reference", "--backend", "docker", *HOSTS)
    assert code == 2
    assert "the image pdlaunch:latest is not the same on all hosts" in err


def test_no_daemon_and_one_elsewhere(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    recipe = launcher.recipe("a", "backend: docker\n")
    code, _, err = launcher.run("up", recipe)
    assert code == 1
    assert f"the Docker daemon at unix://{tmp_path}/none.sock does not answer" in err
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    code, _, err = launcher.run("up", recipe)
    assert code == 2
    assert "which is no socket of this machine" in err
    # Without settings, docker's own default.
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    assert docker_daemon.here({}) == "unix:///var/run/docker.sock"


def test_daemon_that_goes_ends_the_deployment_and_says_what_may_be_left(
    launcher: Launcher, daemon: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_backend, "_LOST_AFTER_S", 1.0)
    command = launcher.begin("up", launcher.recipe("a", "backend: docker\n"))
    command.until("a is ready")
    daemon.end(signal.SIGKILL)
    assert command.wait() == 1
    err = command.errors.read_text()
    assert "is out of reach: the Docker daemon at" in err
    assert f"could not kill: containers at {daemon.endpoint}, which does not answer" in err
    assert "Traceback" not in err
    code, _, err = launcher.run("down", "a")
    assert code == 1
    assert f"delete {deployments.folder('a') / 'deployment.json'}" in err
    deployments.remove_record("a")
    for process in fake_processes():
        process.kill()


def test_container_that_dies_in_a_running_deployment_is_made_anew(
    launcher: Launcher, daemon: FakeDocker
) -> None:
    assert launcher.run("up", launcher.recipe("a", "backend: docker\n"), "--detach")[0] == 0
    client = daemon.client()
    before = client.inspect_container("pdlaunch-a-prefill-0")["Id"]
    client.kill(before, "SIGKILL")
    assert until(lambda: daemon.containers() == names("a") and before not in ids(client))
    assert until(lambda: json.loads(launcher.run("status", "a", "--json")[1])["is_healthy"])
    restarts = json.loads(launcher.run("status", "a", "--json")[1])["processes"][0]["restarts"]
    assert restarts == 1
    log = (deployments.log_dir("a") / "prefill-0.log").read_text()
    assert log.count("serving on") == 2
    assert launcher.run("down", "a")[0] == 0


def test_container_is_restarted_when_told_to_with_nothing_of_the_old_one(
    launcher: Launcher, daemon: FakeDocker
) -> None:
    assert launcher.run("up", launcher.recipe("a", "backend: docker\n"), "--detach")[0] == 0
    client = daemon.client()
    before = set(ids(client))
    code, _, err = launcher.run("restart", "a", "--process", "decode-0")
    assert code == 0, err
    assert "requests fail until decode-0 is back" in err
    assert daemon.containers() == names("a")
    assert len(before - set(ids(client))) == 1
    assert json.loads(launcher.run("status", "a", "--json")[1])["is_healthy"]
    assert launcher.run("ask", "a", "Capital?")[1] == "Paris\n"
    assert launcher.run("down", "a")[0] == 0
    assert daemon.containers() == []


def ids(client: APIClient) -> list[str]:
    return [each["Id"] for each in client.containers(all=True)]


def test_container_that_somebody_removes_is_told(launcher: Launcher, daemon: FakeDocker) -> None:
    recipe = launcher.recipe("a", "backend: docker\nrestarts_per_hour: 0\n")
    command = launcher.begin("up", recipe)
    command.until("a is ready")
    daemon.client().remove_container("pdlaunch-a-decode-0", force=True)
    assert command.wait() == 1
    assert "decode-0 was removed by somebody else" in command.errors.read_text()
    assert daemon.containers() == []


def test_container_that_ignores_the_signal_is_killed(
    launcher: Launcher, daemon: FakeDocker
) -> None:
    extra = "backend: docker\ndecode: {env: {FAKE_ENGINE: deaf}}\n"
    command = launcher.begin("up", launcher.recipe("a", extra))
    command.until("a is ready")
    began_s = time.monotonic()
    command.kill(signal.SIGINT)
    assert command.wait() == 130
    assert time.monotonic() - began_s < 30
    assert daemon.containers() == []
    kills = [each["call"] for each in daemon.requests() if "/kill" in each["call"]]
    assert len(kills) == 3 and all("signal=SIGTERM" in call for call in kills)


def test_host_that_is_not_here_is_reached_through_ssh_only(
    launcher: Launcher, daemon: FakeDocker
) -> None:
    recipe = launcher.recipe("a", "backend: docker\ndecode: {host: 192.0.2.7}\n")
    code, _, err = launcher.run("up", recipe)
    assert code == 2
    assert "decode.host ssh://USER@192.0.2.7" in err


def test_bench_measures_processes(launcher: Launcher, daemon: FakeDocker) -> None:
    code, _, err = launcher.run("bench", launcher.recipe("a", "backend: docker\n"), "--quick")
    assert code == 2
    assert "--set backend=process" in err


def test_doctor_looks_for_daemon_and_image(launcher: Launcher, daemon: FakeDocker) -> None:
    recipe = launcher.recipe("a", "backend: docker\n")

    def found() -> list[dict[str, Any]]:
        out = launcher.run("doctor", recipe, "--json")[1]
        return [each for each in json.loads(out)["findings"] if each["check"] == "docker"]

    assert [each["state"] for each in found()] == ["ok"]
    daemon.set("images.json", {})
    (missing,) = found()
    assert missing["state"] == "error" and "there is no image pdlaunch:cpu" in missing["evidence"]
    assert "pdlaunch build image" in missing["remedy"]


def test_without_the_extra_it_is_named(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("docker_daemon", "docker_backend"):
        monkeypatch.setitem(sys.modules, f"pdlaunch.{name}", None)
        monkeypatch.delattr(f"pdlaunch.{name}", raising=False)
    code, _, err = launcher.run("up", launcher.recipe("a", "backend: docker\n"))
    assert code == 1
    assert "pip install 'pdlaunch[docker]'" in err


class Interrupted:
    """A client whose stream breaks off, and which then begins with what was said before."""

    entries = (
        b"2026-11-29T10:00:00.000000001Z one\n",
        b"2026-11-29T10:00:00.000000002Z two\n",
        b"2026-11-29T10:00:00.000000010Z three\n",
    )
    asked: list[int | None]

    def __init__(self) -> None:
        self.asked = []

    def logs(self, container: str, *, since: int | None, **_: Any) -> Iterator[bytes]:
        self.asked.append(since)
        yield from self.entries[: 2 if since is None else 3]


def test_a_log_that_broke_off_goes_on_without_a_line_twice(tmp_path: Path) -> None:
    client: Any = Interrupted()
    with (tmp_path / "log").open("wb") as log:
        last = _copy(client, "id", b"", log)
        assert _copy(client, "id", last, log) == b"2026-11-29T10:00:00.000000010Z"
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\nthree\n"
    assert client.asked == [None, 1795946400]
