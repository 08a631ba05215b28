"""What becomes of a plan as containers: the daemon's words for it, and what is refused."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from fake_docker import CREATE, Refusal, check
from pdlaunch import containers, draining, planner, recipe_loader
from pdlaunch.engine_middleware import pdlaunch_drain
from pdlaunch.errors import UsageError
from pdlaunch.paths import recipes_dir
from pdlaunch.plan import DeploymentPlan, ProcessPlan
from pdlaunch.planner import Facts, ModelLocation
from pdlaunch.render import shell
from rendering import ENGINE

HERE = "unix:///var/run/docker.sock"
# All that can be started.
RECIPES = sorted(
    path.stem
    for path in recipes_dir().glob("*.yaml")
    if recipe_loader.load(path, ()).recipe.engine.variant != "neuron"
)
P5EN = (
    "prefill.host=ssh://ubuntu@10.0.0.11",
    "router.host=ssh://ubuntu@10.0.0.11",
    "decode.host=ssh://ubuntu@10.0.0.12:2222",
)


def planned(name: str, *overrides: str, trace_folder: str | None = None) -> DeploymentPlan:
    settings = ("backend=docker", *overrides)
    recipe = recipe_loader.load(recipe_loader.find(name), settings).recipe
    facts = Facts(
        launch_id="0123abcd",
        cores=(0, 1),
        gpus=None,
        free_ports=tuple(range(20000, 20020)),
        local_addresses=frozenset({"127.0.0.1"}),
        routable_address="192.0.2.1",
        resolved={},
    )
    is_own = ":" in recipe.model
    model = ModelLocation("/cache/models/own" if is_own else recipe.model, is_local=is_own)
    plan = planner.plan(recipe, facts, containers.in_image(ENGINE), model)
    plan = plan.model_copy(update={"trace_folder": trace_folder})
    return containers.containerised(plan, recipe, here=HERE, owner="feed")


def requests(plan: DeploymentPlan) -> dict[str, dict[str, Any]]:
    return {process.name: containers.request(process) for process in plan.processes}


@pytest.mark.parametrize("name", RECIPES)
def test_containers_of_every_recipe_are_asked_for_in_the_words_of_the_api(name: str) -> None:
    plan = planned(name)
    made = requests(plan)
    assert len(made) == len(plan.processes) >= 3
    for process in plan.processes:
        body = made[process.name]
        check(body, CREATE, "body")
        assert body["HostConfig"]["NetworkMode"] == "host"
        words = [*body["Entrypoint"], *body["Cmd"]]
        assert tuple(words[-len(process.argv) :]) == process.argv
        assert body["Env"] == [f"{key}={value}" for key, value in sorted(process.env.items())]


def test_p5en_gets_what_efa_needs_on_two_hosts() -> None:
    plan = planned("qwen3-32b-p5en", *P5EN)
    endpoints = {process.name: process.container.endpoint for process in plan.processes}  # type: ignore[union-attr]
    assert endpoints == {
        "prefill-0": "ssh://ubuntu@10.0.0.11",
        "decode-0": "ssh://ubuntu@10.0.0.12:2222",
        "router": "ssh://ubuntu@10.0.0.11",
    }
    for name in ("prefill-0", "decode-0"):
        body = requests(plan)[name]
        assert body["HostConfig"] == {
            "NetworkMode": "host",
            "IpcMode": "private",
            "Init": True,
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "64m", "max-file": "2"}},
            "ShmSize": 32 * 2**30,
            "Mounts": [
                {
                    "Type": "volume",
                    "Source": "pdlaunch-cache",
                    "Target": "/home/vllm/.cache",
                    "ReadOnly": False,
                }
            ],
            "DeviceRequests": [{"Count": -1, "Capabilities": [["gpu"]]}],
            "Devices": [
                {
                    "PathOnHost": "/dev/infiniband",
                    "PathInContainer": "/dev/infiniband",
                    "CgroupPermissions": "rwm",
                }
            ],
            "CapAdd": ["IPC_LOCK"],
            "Ulimits": [
                {"Name": "memlock", "Soft": -1, "Hard": -1},
                {"Name": "stack", "Soft": 67108864, "Hard": 67108864},
            ],
        }
        assert "FI_PROVIDER=efa" in body["Env"] and "CUDA_VISIBLE_DEVICES=0,1,2,3" in body["Env"]
    prefill, decode, router = plan.processes
    assert prefill.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == prefill.host == "10.0.0.11"
    assert decode.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == decode.host == "10.0.0.12"
    assert router.argv[-6:-4] == ("--decode", "http://10.0.0.12:8200")


def test_router_gets_neither_devices_nor_models_nor_secrets() -> None:
    router = requests(planned("qwen3-32b-p5en", *P5EN))["router"]
    assert set(router["HostConfig"]) == {"NetworkMode", "IpcMode", "Init", "LogConfig"}
    assert router["Entrypoint"] == ["vllm-router"]


def test_engines_of_one_host_share_its_memory_and_others_have_their_own() -> None:
    pair = requests(planned("qwen3-0.6b-gpu"))
    for name in ("prefill-0", "decode-0"):
        assert pair[name]["HostConfig"]["IpcMode"] == "host"
        assert "ShmSize" not in pair[name]["HostConfig"]
    apart = requests(planned("qwen3-32b-p5en", *P5EN, "docker.shm_gib=8"))
    assert apart["decode-0"]["HostConfig"]["ShmSize"] == 8 * 2**30


def test_cpu_engines_are_pinned_and_ask_for_no_rights() -> None:
    made = requests(planned("tiny-qwen3-cpu"))["decode-0"]["HostConfig"]
    assert made["CpusetCpus"] == "1"
    assert not {"Ulimits", "CapAdd", "DeviceRequests", "Devices"} & set(made)
    assert made["Mounts"] == [
        {
            "Type": "bind",
            "Source": "/cache/models/own",
            "Target": "/cache/models/own",
            "ReadOnly": True,
        }
    ]


def test_labels_tell_deployment_process_launch_and_owner() -> None:
    made = requests(planned("tiny-qwen3-cpu"))
    assert made["decode-0"]["Labels"] == {
        "pdlaunch.deployment": "tiny-qwen3-cpu",
        "pdlaunch.process": "decode-0",
        "pdlaunch.launch": "0123abcd",
        "pdlaunch.owner": "feed",
    }
    assert made["decode-0"]["Image"] == "pdlaunch:cpu"


def given(process: ProcessPlan, environ: dict[str, str]) -> dict[str, bytes]:
    """The files that a container gets before it starts, each in a folder that comes with it."""
    packed = containers.handed_over(process, environ)
    assert packed is not None
    files = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.isfile():
                content = archive.extractfile(member)
                assert content is not None and member.mode == 0o444
                assert archive.getmember(str(PurePosixPath(member.name).parent)).isdir()
                files[member.name] = content.read()
    return files


def test_secrets_are_in_a_file_that_the_entry_point_reads_and_nowhere_else() -> None:
    engine = planned("qwen3-0.6b-gpu").processes[0]
    secret = "it's $SECRET"
    handed = given(engine, {"HF_TOKEN": secret, "OTHER_TOKEN": "x"})
    assert handed == {"run/pdlaunch/secrets": b"export HF_TOKEN='it'\"'\"'s $SECRET'\n"}
    body = containers.request(engine)
    assert body["Entrypoint"] == ["/bin/sh", "-c", '. /run/pdlaunch/secrets; exec "$@"', "sh"]
    assert body["Cmd"][:2] == ["vllm", "serve"]


def test_what_takes_an_engine_out_of_service_is_handed_over_where_another_can_stand_in() -> None:
    plan = planned("tiny-qwen3-cpu", "decode.replicas=2", "decode.env.PYTHONPATH=/ours")
    prefill, decode, *_ = draining.drainable(plan).processes
    assert "--middleware" not in prefill.argv
    assert list(given(prefill, {})) == ["run/pdlaunch/secrets"]
    assert decode.argv[-2:] == ("--middleware", "pdlaunch_drain.Drain")
    source = Path(pdlaunch_drain.__file__).read_bytes()
    assert given(decode, {})["run/pdlaunch/middleware/pdlaunch_drain.py"] == source
    body = containers.request(decode)
    assert "PYTHONPATH=/run/pdlaunch/middleware:/ours" in body["Env"]
    assert containers.handed_over(plan.of_role("router")[0], {}) is None


def test_dry_run_shows_each_hosts_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    text = shell.commands(planned("qwen3-32b-p5en", *P5EN))
    assert "# --- 10.0.0.12 (containers at ssh://ubuntu@10.0.0.12:2222) ---" in text
    assert "# pdlaunch-qwen3-32b-p5en-decode-0, in the words of Docker's API" in text
    assert "PathOnHost: /dev/infiniband" in text
    assert "hf_abcdefgh" not in text


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (("backend=process", *P5EN), "is for containers: set backend docker"),
        (("prefill.host=ssh://a/b",), r"write an address, or ssh://"),
        (("prefill.host=tcp://10.0.0.11:2375",), r"write an address, or ssh://"),
        (("prefill.host=ssh://u:secret@a",), r"write an address, or ssh://"),
    ],
)
def test_hosts_that_cannot_be_are_refused(overrides: tuple[str, ...], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        planned("qwen3-32b-p5en", *overrides)


def test_a_model_that_is_made_here_is_not_on_another_host() -> None:
    with pytest.raises(UsageError, match="made on this machine, and decode is on ssh://b"):
        planned("tiny-qwen3-cpu", "decode.host=ssh://b")


def test_traces_are_for_processes() -> None:
    with pytest.raises(UsageError, match="processes of this machine"):
        planned("tiny-qwen3-cpu", trace_folder="/trace")


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        (("Command",), ["vllm"]),
        (("Cmd",), "vllm serve"),
        (("Env",), {"A": "1"}),
        (("HostConfig", "ShmSize"), "32g"),
        (("HostConfig", "Ulimits"), {"memlock": -1}),
        (("HostConfig", "Devices"), ["/dev/infiniband"]),
        (("HostConfig", "IpcMode"), "shared"),
        (("HostConfig", "Init"), 1),
    ],
)
def test_the_stand_in_for_the_api_refuses_what_the_api_has_not(
    path: tuple[str, ...], instead: Any
) -> None:
    body = requests(planned("qwen3-0.6b-gpu"))["prefill-0"]
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = instead
    with pytest.raises(Refusal):
        check(body, CREATE, "body")
