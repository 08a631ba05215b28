"""Rendered Kubernetes manifests: that they hold, and that broken ones would be noticed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

import manifests
from manifests import Invalid, check_together, pod_templates, validate
from pdlaunch import planner, recipe_loader
from pdlaunch.cli import cli
from pdlaunch.errors import UsageError
from pdlaunch.paths import recipes_dir
from pdlaunch.planner import ModelLocation
from pdlaunch.recipe import Recipe
from pdlaunch.render import cluster, documents, kubernetes
from rendering import ENGINE, settings

# All but those of engines that there is no image of ours for.
RECIPES = sorted(
    path.stem
    for path in recipes_dir().glob("*.yaml")
    if recipe_loader.load(path, ()).recipe.engine.variant != "neuron"
)


def loaded(name: str, *overrides: str) -> Recipe:
    return recipe_loader.load(recipe_loader.find(name), overrides).recipe


def rendered(recipe: Recipe, chosen: cluster.Settings) -> list[dict[str, Any]]:
    is_own = ":" in recipe.model
    model = ModelLocation("/cache/models/own" if is_own else recipe.model, is_local=is_own)
    plan = cluster.planned(recipe, chosen, ENGINE, model)
    text = documents.dump(kubernetes.documents(recipe, plan, chosen))
    return list(yaml.safe_load_all(text))


def of_kind(objects: list[dict[str, Any]], kind: str, component: str = "") -> dict[str, Any]:
    (found,) = (
        each
        for each in objects
        if each["kind"] == kind
        and component in ("", each["metadata"]["labels"]["app.kubernetes.io/component"])
    )
    return found


def container(objects: list[dict[str, Any]], role: str) -> dict[str, Any]:
    (template,) = pod_templates(of_kind(objects, "Deployment", role))
    (found,) = template["spec"]["containers"]
    return dict(found)


def flag(args: list[str], name: str) -> str:
    assert args.count(name) == 1
    return args[args.index(name) + 1]


def environment(of: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in of["env"] if "value" in each}


def p5en(**chosen: Any) -> list[dict[str, Any]]:
    return rendered(loaded("qwen3-32b-p5en"), settings("qwen3-32b-p5en", **chosen))


def two_nodes(**chosen: Any) -> list[dict[str, Any]]:
    recipe = loaded(
        "qwen3-32b-p5en",
        "prefill.tensor_parallel=16",
        "decode.tensor_parallel=16",
        "prefill.devices=null",
        "decode.devices=null",
        "prefill.efa_interfaces=32",
        "decode.efa_interfaces=32",
        "prefill.replicas=2",
        "model_shape.kv_heads=16",
    )
    return rendered(recipe, settings("large", **chosen))


@pytest.mark.parametrize("version", manifests.KUBERNETES)
@pytest.mark.parametrize("name", RECIPES)
def test_manifests_of_every_recipe_hold(name: str, version: str) -> None:
    recipe = loaded(name)
    chosen = settings(
        cluster.name_of(recipe), model_claim="models", scale_to={"prefill": 4, "decode": 4}
    )
    objects = rendered(recipe, chosen)
    for each in objects:
        validate(each, version)
    check_together(objects)


@pytest.mark.parametrize("version", manifests.KUBERNETES)
def test_manifests_of_engines_over_two_nodes_hold(version: str) -> None:
    objects = two_nodes(scale_to={"prefill": 4})
    for each in objects:
        validate(each, version)
    check_together(objects)


def mutations(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Paths into an object, each with what must not stand there."""
    if isinstance(value, dict):
        yield (*path, "surprise"), {"with": ["a list"]}
        for key, inner in value.items():
            yield from mutations(inner, (*path, key))
    elif isinstance(value, list):
        yield path, {"a mapping": "for a list"}
        for index, inner in enumerate(value):
            yield from mutations(inner, (*path, index))
    else:
        yield path, [value]


def broken(body: dict[str, Any], path: tuple[str | int, ...], instead: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    place: Any = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = instead
    return changed


def test_schemas_refuse_every_mutation() -> None:
    objects = [
        *p5en(scale_to={"decode": 4}, node_selector={"a": "b"}),
        of_kind(two_nodes(), "LeaderWorkerSet", "prefill"),
    ]
    count = 0
    for body in objects:
        for path, instead in mutations(body):
            with pytest.raises(Invalid):
                validate(broken(body, path, instead))
                pytest.fail(f"{body['kind']}: {path} may be {instead}")
            count += 1
    assert count > 800


@pytest.mark.parametrize(
    ("kind", "component", "path"),
    [
        ("Deployment", "router", ("spec", "selector", "matchLabels")),
        ("Deployment", "prefill", ("spec", "template", "spec", "containers")),
        ("Service", "decode", ("spec", "selector")),
        ("HorizontalPodAutoscaler", "decode", ("spec", "maxReplicas")),
        ("RoleBinding", "router", ("roleRef",)),
    ],
)
def test_what_a_mutation_leaves_out_is_missed(
    kind: str, component: str, path: tuple[str, ...]
) -> None:
    objects = p5en(scale_to={"decode": 4})
    place: Any = of_kind(objects, kind, component)
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    with pytest.raises((Invalid, KeyError)):
        for each in objects:
            validate(each)
        check_together(objects)


def test_a_selector_that_selects_nothing_is_noticed() -> None:
    objects = p5en()
    of_kind(objects, "Service", "prefill")["spec"]["selector"]["app.kubernetes.io/component"] = "x"
    with pytest.raises(Invalid, match="selects nothing"):
        check_together(objects)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_p5en_pods_get_what_efa_needs(role: str) -> None:
    objects = p5en()
    engine = container(objects, role)
    limits = engine["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "4"
    # Two a GPU on this instance type.
    assert limits["vpc.amazonaws.com/efa"] == "8"
    assert limits["hugepages-2Mi"] == "5120Mi"
    assert engine["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    env = environment(engine)
    wanted = {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_ENABLE_SHM_TRANSFER": "0",
        "FI_EFA_ENABLE_SHM": "0",
        "FI_EFA_FORK_SAFE": "0",
        "FI_EFA_USE_HUGE_PAGE": "1",
        "FI_EFA_MR_MAX_CACHED_COUNT": "524288",
        "FI_EFA_MR_MAX_CACHED_SIZE": "0",
        "NCCL_SOCKET_IFNAME": "^lo,docker,veth",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "$(POD_IP)",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
    }
    assert wanted.items() <= env.items()
    assert "CUDA_VISIBLE_DEVICES" not in env
    transfer = json.loads(flag(engine["args"], "--kv-transfer-config"))
    assert "engine_id" not in transfer
    assert transfer["kv_connector_extra_config"]["backends"] == ["LIBFABRIC"]
    (template,) = pod_templates(of_kind(objects, "Deployment", role))
    (term,) = template["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert term["topologyKey"] == "topology.kubernetes.io/zone"
    shm = next(each for each in template["spec"]["volumes"] if each["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}


def test_without_efa_nothing_of_it_is_asked_for() -> None:
    objects = rendered(loaded("qwen3-0.6b-gpu"), settings("small"))
    text = json.dumps(objects)
    for word in ("/efa", "FI_", "hugepages", "IPC_LOCK", "zone"):
        assert word not in text


def test_image_has_the_libraries_that_a_plan_puts_first() -> None:
    dockerfile = (Path(__file__).parents[2] / "Dockerfile").read_text()
    assert f"ENV LD_LIBRARY_PATH={planner.EFA_LIBRARIES}:" in dockerfile


def test_servers_listen_on_their_pod_s_address_alone() -> None:
    objects = p5en()
    for component in ("prefill", "decode", "router"):
        args = container(objects, component)["args"]
        assert flag(args, "--host") == "$(POD_IP)"
    assert flag(container(objects, "router")["args"], "--prometheus-host") == "$(POD_IP)"
    assert "0.0.0.0" not in json.dumps(objects)
    for each in objects:
        assert each["kind"] != "Service" or each["spec"].get("type") in (None, "ClusterIP")
        assert "hostNetwork" not in json.dumps(each)


def test_engines_hear_only_their_own_deployment_and_monitoring() -> None:
    policy = of_kind(p5en(monitoring_namespace="watch"), "NetworkPolicy")["spec"]
    own, watching = policy["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": policy["podSelector"]["matchLabels"]}}]}
    assert "watch" in json.dumps(watching["from"])
    assert watching["ports"] == [{"port": "http"}]


def test_router_finds_engines_by_the_labels_that_they_have() -> None:
    objects = p5en()
    args = container(objects, "router")["args"]
    assert flag(args, "--service-discovery-namespace") == "qwen3-32b-p5en"
    assert "--prefill" not in args and "--decode" not in args
    for role in ("prefill", "decode"):
        at = args.index(f"--{role}-selector")
        labels = dict(word.split("=") for word in args[at + 1 : at + 3])
        (template,) = pod_templates(of_kind(objects, "Deployment", role))
        assert labels.items() <= template["metadata"]["labels"].items()
        assert flag(args, "--service-discovery-port") == flag(
            container(objects, role)["args"], "--port"
        )
    rules = of_kind(objects, "Role")["rules"]
    assert rules == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def test_router_is_ready_only_with_engines_and_alive_without() -> None:
    router = container(p5en(), "router")
    assert router["readinessProbe"]["httpGet"]["path"] == "/readiness"
    assert router["livenessProbe"]["httpGet"]["path"] == "/liveness"


def test_probes_wait_as_long_as_the_recipe_lets_the_model_load() -> None:
    recipe = loaded("qwen3-32b-p5en", "timeouts.ready_s=7201")
    objects = rendered(recipe, settings("slow"))
    for role in ("prefill", "decode"):
        probe = container(objects, role)["startupProbe"]
        assert probe["failureThreshold"] * probe["periodSeconds"] >= 7201
        assert of_kind(objects, "Deployment", role)["spec"]["progressDeadlineSeconds"] > 7201


def test_pods_end_after_their_requests() -> None:
    recipe = loaded("qwen3-32b-p5en", "timeouts.stop_s=90")
    engine = container(rendered(recipe, settings("slow")), "prefill")
    assert flag(engine["args"], "--shutdown-timeout") == "90"
    (template,) = pod_templates(
        of_kind(rendered(recipe, settings("slow")), "Deployment", "prefill")
    )
    before = engine["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert template["spec"]["terminationGracePeriodSeconds"] > before + 90


def test_a_recipe_s_own_word_on_shutdown_stands() -> None:
    recipe = loaded("qwen3-32b-p5en", "engine.args.shutdown-timeout=7")
    engine = container(rendered(recipe, settings("slow")), "prefill")
    assert flag(engine["args"], "--shutdown-timeout") == "7"


def test_secrets_are_named_and_never_written() -> None:
    objects = p5en(side_channel_secret="side", hub_token_secret="hub")
    for role in ("prefill", "decode"):
        env = {each["name"]: each for each in container(objects, role)["env"]}
        assert env["VLLM_NIXL_SIDE_CHANNEL_SECRET"]["valueFrom"] == {
            "secretKeyRef": {"name": "side", "key": "secret"}
        }
        assert env["HF_TOKEN"]["valueFrom"] == {
            "secretKeyRef": {"name": "hub", "key": "token", "optional": True}
        }
    router = {each["name"] for each in container(objects, "router")["env"]}
    assert router == {"POD_IP"}
    assert not any(each["kind"] == "Secret" for each in objects)


def test_replicas_are_the_recipe_s_unless_they_scale() -> None:
    recipe = loaded("qwen3-32b-p5en", "decode.replicas=3", "decode.devices=null")
    fixed = rendered(recipe, settings("three"))
    assert of_kind(fixed, "Deployment", "decode")["spec"]["replicas"] == 3
    assert not any(each["kind"] == "HorizontalPodAutoscaler" for each in fixed)
    scaled = rendered(recipe, settings("three", scale_to={"decode": 5}))
    assert "replicas" not in of_kind(scaled, "Deployment", "decode")["spec"]
    scaler = of_kind(scaled, "HorizontalPodAutoscaler")["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 5)


def test_roles_scale_by_what_they_lack_first() -> None:
    objects = p5en(scale_to={"prefill": 2, "decode": 2})
    metrics = {
        role: of_kind(objects, "HorizontalPodAutoscaler", role)["spec"]["metrics"][0]["pods"]
        for role in ("prefill", "decode")
    }
    assert metrics["prefill"]["metric"]["name"] == "vllm_requests_waiting_for_capacity"
    assert metrics["decode"]["metric"]["name"] == "vllm_kv_cache_usage"


def test_an_engine_over_two_nodes_is_one_group() -> None:
    objects = two_nodes()
    group = of_kind(objects, "LeaderWorkerSet", "prefill")["spec"]
    assert group["replicas"] == 2
    template = group["leaderWorkerTemplate"]
    assert template["size"] == 2
    leader, worker = (
        template[key]["spec"]["containers"][0] for key in ("leaderTemplate", "workerTemplate")
    )
    for each in (leader, worker):
        limits = each["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == "8" and limits["vpc.amazonaws.com/efa"] == "16"
        assert flag(each["args"], "--tensor-parallel-size") == "16"
        assert flag(each["args"], "--nnodes") == "2"
        assert flag(each["args"], "--node-rank") == "$(LWS_WORKER_INDEX)"
        assert flag(each["args"], "--master-addr") == "$(LWS_LEADER_ADDRESS)"
        assert environment(each)["VLLM_HOST_IP"] == "$(POD_IP)"
    # Each node would draw one of its own, and peers would refuse the ranks of the second.
    ids = {
        json.loads(flag(each["args"], "--kv-transfer-config"))["engine_id"]
        for each in (leader, worker)
    }
    assert ids == {"$(LWS_LEADER_ADDRESS)"}
    assert "--headless" in worker["args"] and "--headless" not in leader["args"]
    assert "startupProbe" in leader and "startupProbe" not in worker
    assert "ports" not in worker


def test_router_and_service_see_the_first_node_of_a_group_alone() -> None:
    objects = two_nodes()
    only = "leaderworkerset.sigs.k8s.io/worker-index"
    assert f"{only}=0" in container(objects, "router")["args"]
    assert of_kind(objects, "Service", "prefill")["spec"]["selector"][only] == "0"


def test_nodes_say_whether_an_engine_spans_them() -> None:
    recipe = loaded("qwen3-32b-p5en")
    objects = rendered(recipe, settings("small", gpus_per_node=2))
    assert of_kind(objects, "LeaderWorkerSet", "decode")
    assert not any(
        each["kind"] == "LeaderWorkerSet"
        for each in rendered(recipe, settings("small", gpus_per_node=4))
    )


def test_help_tells_what_a_claim_holds() -> None:
    told = " ".join(CliRunner().invoke(cli, ["render", "k8s", "--help"]).output.split())
    assert f"in pods it is {cluster.MODELS}." in told
    assert "hub/models--Org--Name" in told


def test_model_of_this_machine_is_looked_for_on_the_claim() -> None:
    objects = rendered(loaded("tiny-qwen3-cpu"), settings("tiny", model_claim="models"))
    engine = container(objects, "prefill")
    assert engine["args"][:2] == ["serve", "/models/own"]
    assert environment(engine)["HF_HUB_OFFLINE"] == "1"
    (template,) = pod_templates(of_kind(objects, "Deployment", "prefill"))
    volume = template["spec"]["volumes"][0]
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}
    assert "HF_TOKEN" not in {each["name"] for each in engine["env"]}


def test_only_the_pod_s_address_is_replaced_in_arguments() -> None:
    recipe = loaded("qwen3-32b-p5en", "engine.args.chat-template=$(HOME) $(POD_IP)")
    engine = container(rendered(recipe, settings("odd")), "prefill")
    assert flag(engine["args"], "--chat-template") == "$$(HOME) $(POD_IP)"


TP8 = tuple(
    f"{role}.{key}"
    for role in ("prefill", "decode")
    for key in ("tensor_parallel=8", "devices=null")
)
EFA = "prefill.efa_interfaces"


@pytest.mark.parametrize(
    ("name", "overrides", "chosen", "where"),
    [
        ("qwen3-32b-p5en", (), {"name": "Upper"}, "--name"),
        ("qwen3-32b-p5en", (), {"name": "1-digit-first"}, "--name"),
        ("qwen3-32b-p5en", (), {"name": "x" * 50}, "--name"),
        ("qwen3-32b-p5en", (), {"namespace": "a.b"}, "--namespace"),
        ("qwen3-32b-p5en", (), {"hub_token_secret": "my token"}, "--hub-token-secret"),
        ("qwen3-32b-p5en", (), {"model_claim": "Models"}, "--model-claim"),
        ("qwen3-32b-p5en", TP8, {"gpus_per_node": 3}, "prefill.tensor_parallel"),
        ("qwen3-32b-p5en", (*TP8, "prefill.efa_interfaces=9"), {"gpus_per_node": 4}, EFA),
        ("qwen3-32b-p5en", (), {"scale_to": {"decode": 1}}, "--scale-decode-to"),
        ("tiny-qwen3-cpu", (), {}, "model"),
    ],
)
def test_what_does_not_go_together_is_refused(
    name: str, overrides: tuple[str, ...], chosen: dict[str, Any], where: str
) -> None:
    recipe = loaded(name, *overrides)
    with pytest.raises(UsageError) as caught:
        rendered(recipe, replace(settings("fine"), **chosen))
    assert caught.value.where == where


def test_command_prints_the_manifests() -> None:
    result = CliRunner().invoke(
        cli, ["render", "k8s", "qwen3-32b-p5en", "--image", "registry.example/pdlaunch:1"]
    )
    assert result.exit_code == 0, result.output
    objects = list(yaml.safe_load_all(result.stdout))
    assert container(objects, "router")["image"] == "registry.example/pdlaunch:1"
    for each in objects:
        validate(each)
