"""Rendered Compose files: valid, for one host, on loopback alone."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from compose_spec import PyCompose

from pdlaunch import containers, planner, recipe_loader
from pdlaunch.cli import cli
from pdlaunch.errors import UsageError
from pdlaunch.paths import recipes_dir
from pdlaunch.planner import Facts, ModelLocation
from pdlaunch.recipe import LOCAL_HOST
from pdlaunch.render import compose, documents
from rendering import ENGINE

# All but those whose roles are on hosts of their own, or that there is no image of ours for.
RECIPES = sorted(
    path.stem
    for path in recipes_dir().glob("*.yaml")
    if (recipe := recipe_loader.load(path, ()).recipe).prefill.host == LOCAL_HOST
    and recipe.engine.variant != "neuron"
)


def rendered(name: str, *overrides: str, image: str = "registry.example/pdlaunch:1") -> str:
    overrides = (f"docker.image={image}", *overrides)
    recipe = recipe_loader.load(recipe_loader.find(name), overrides).recipe
    fixed = compose.with_fixed_ports(recipe)
    facts = Facts(
        launch_id="compose",
        cores=(0, 1),
        gpus=None,
        free_ports=(),
        local_addresses=frozenset({"127.0.0.1"}),
        routable_address="192.0.2.1",
        resolved={},
    )
    is_own = ":" in recipe.model
    model = ModelLocation("/cache/models/own" if is_own else recipe.model, is_local=is_own)
    plan = planner.plan(fixed, facts, containers.in_image(ENGINE), model)
    return documents.dump(compose.documents(fixed, plan))


def services(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def command(service: dict[str, Any], flag: str) -> str:
    words = service["command"]
    assert words.count(flag) == 1
    word: str = words[words.index(flag) + 1]
    return word


@pytest.mark.parametrize("name", RECIPES)
def test_files_of_recipes_for_one_host_hold(name: str) -> None:
    text = rendered(name)
    made = services(text)
    assert set(PyCompose.from_yaml(text).service_names()) == set(made)
    for service in made.values():
        for other in service.get("depends_on", ()):
            assert other in made
        for volume in service.get("volumes", ()):
            if volume["type"] == "volume":
                assert volume["source"] in yaml.safe_load(text)["volumes"]


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        (("services", "prefill-0", "surprise"), 1),
        (("services", "prefill-0", "command"), {"serve": 1}),
        (("services", "prefill-0", "ulimits", "memlock"), "plenty"),
        (("services", "prefill-0", "deploy", "resources", "reservations", "devices"), 1),
        (("services", "prefill-0", "healthcheck", "interval"), "often"),
        (("services", "router", "depends_on", "prefill-0", "condition"), "is fine"),
        (("services", "router", "environment"), 1),
        (("volumes",), 1),
    ],
)
def test_broken_files_are_refused(path: tuple[str, ...], instead: Any) -> None:
    body = yaml.safe_load(rendered("qwen3-0.6b-gpu"))
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = instead
    with pytest.raises(ValueError):
        PyCompose.from_yaml(yaml.safe_dump(body))


def test_all_servers_listen_on_loopback() -> None:
    text = rendered("qwen3-0.6b-gpu")
    for service in services(text).values():
        assert service["network_mode"] == "host"
        assert command(service, "--host") == "127.0.0.1"
    assert command(services(text)["router"], "--prometheus-host") == "127.0.0.1"
    assert "0.0.0.0" not in text


def test_ports_are_the_same_each_time_and_none_twice() -> None:
    text = rendered("tiny-qwen3-cpu")
    assert text == rendered("tiny-qwen3-cpu")
    made = services(text)
    ports = [command(service, "--port") for service in made.values()]
    ports += [
        service["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"]
        for name, service in made.items()
        if name != "router"
    ]
    assert len(set(ports)) == len(ports) == 5


def test_a_named_port_stays() -> None:
    made = services(rendered("tiny-qwen3-cpu", "router.port=9123"))
    assert command(made["router"], "--port") == "9123"


def test_router_waits_for_every_engine() -> None:
    made = services(rendered("tiny-qwen3-cpu", "prefill.replicas=2"))
    assert made["router"]["depends_on"] == {
        name: {"condition": "service_healthy"} for name in ("prefill-0", "prefill-1", "decode-0")
    }


def test_engines_are_given_their_load_time() -> None:
    made = services(rendered("tiny-qwen3-cpu", "timeouts.ready_s=77"))
    assert made["prefill-0"]["healthcheck"]["start_period"] == "77s"


def test_devices_are_those_of_the_plan() -> None:
    made = services(rendered("qwen3-0.6b-gpu"))
    for name, devices in (("prefill-0", "0"), ("decode-0", "1")):
        assert made[name]["environment"]["CUDA_VISIBLE_DEVICES"] == devices
        assert made[name]["ipc"] == "host"
        assert made[name]["ulimits"] == {"memlock": -1, "stack": 67108864}
    assert "deploy" not in made["router"]
    cpu = services(rendered("tiny-qwen3-cpu"))
    assert (cpu["prefill-0"]["cpuset"], cpu["decode-0"]["cpuset"]) == ("0", "1")
    assert "deploy" not in cpu["prefill-0"]


def test_efa_brings_its_device() -> None:
    made = services(
        rendered(
            "qwen3-32b-p5en",
            "prefill.host=local",
            "decode.host=local",
            "router.host=local",
            "decode.side_channel_port=5700",
            "decode.devices=[[4,5,6,7]]",
        )
    )
    for name in ("prefill-0", "decode-0"):
        assert made[name]["devices"] == ["/dev/infiniband:/dev/infiniband"]
        assert made[name]["cap_add"] == ["IPC_LOCK"]
        assert made[name]["environment"]["FI_PROVIDER"] == "efa"


def test_secrets_come_from_the_shell_and_the_router_gets_none() -> None:
    made = services(rendered("qwen3-0.6b-gpu"))
    for name in ("VLLM_NIXL_SIDE_CHANNEL_SECRET", "HF_TOKEN"):
        assert made["decode-0"]["environment"][name] is None
        assert name not in made["router"]["environment"]


def test_a_model_of_this_machine_is_mounted_where_it_is() -> None:
    text = rendered("tiny-qwen3-cpu")
    engine = services(text)["prefill-0"]
    (volume,) = engine["volumes"]
    assert volume["source"] == volume["target"] == engine["command"][1] == "/cache/models/own"
    assert volume["read_only"]
    assert "volumes" not in yaml.safe_load(text)


def test_dollars_are_not_taken_for_variables() -> None:
    made = services(rendered("tiny-qwen3-cpu", "engine.args.chat-template=$HOME"))
    assert command(made["prefill-0"], "--chat-template") == "$$HOME"


def test_all_that_keeps_a_recipe_from_one_host_is_told_at_once() -> None:
    with pytest.raises(UsageError, match="one host") as caught:
        rendered("qwen3-32b-p5en")
    told = str(caught.value)
    for name in ("prefill", "decode", "router"):
        assert f"{name}.host: 10.0.0.1" in told
        assert f"--set {name}.host=local" in told
    assert "decode.side_channel_port: port 5600 is already taken" in told
    assert "decode.devices: 0 is already given to prefill" in told


def test_port_that_is_fixed_for_one_role_and_named_for_another_is_refused() -> None:
    with pytest.raises(UsageError, match="port 8200 is already taken"):
        rendered("tiny-qwen3-cpu", "prefill.port=8200")


def test_command_prints_the_file() -> None:
    result = CliRunner().invoke(cli, ["render", "compose", "tiny-qwen3-cpu", "--image", "mine"])
    assert result.exit_code == 0, result.output
    assert services(result.stdout)["decode-0"]["image"] == "mine"


def test_each_engine_has_an_image_of_its_own_by_default() -> None:
    for name, image in (
        ("tiny-qwen3-cpu", "pdlaunch:cpu"),
        ("qwen3-0.6b-gpu", "pdlaunch:latest"),
    ):
        result = CliRunner().invoke(cli, ["render", "compose", name])
        assert result.exit_code == 0, result.output
        assert services(result.stdout)["router"]["image"] == image
        command = "pdlaunch build image" + (" --variant cpu" if image == "pdlaunch:cpu" else "")
        assert f"`{command}` makes it" in result.stderr
