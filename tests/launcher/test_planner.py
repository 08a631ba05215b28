"""The planner: what each process gets, and that no two processes get the same thing."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlaunch import recipe_loader
from pdlaunch.engine import Engine
from pdlaunch.errors import UsageError
from pdlaunch.paths import recipes_dir
from pdlaunch.plan import DeploymentPlan, ProcessPlan
from pdlaunch.planner import Facts, ModelLocation, plan, ports_needed
from pdlaunch.recipe import Recipe

ENGINE = Engine(
    variant="cpu",
    root=Path("/cache/engine"),
    python=Path("/cache/engine/bin/python"),
    vllm=Path("/cache/engine/bin/vllm"),
    router=Path("/cache/engine/bin/vllm-router"),
    version="0.32.0+pd.1",
    series_hash="abc",
)


def facts(
    recipe: Recipe,
    cores: int = 2,
    gpus: tuple[str, ...] | None = None,
    local: tuple[str, ...] = ("127.0.0.1", "192.0.2.1"),
) -> Facts:
    return Facts(
        launch_id="1234abcd",
        cores=tuple(range(cores)),
        gpus=gpus,
        free_ports=tuple(range(20000, 20000 + ports_needed(recipe) + 16)),
        local_addresses=frozenset(local),
        routable_address="192.0.2.1",
        resolved={"decode.example": "192.0.2.2"},
    )


def recipe(**sections: Any) -> Recipe:
    data = {"name": "small", "model": "random:tiny-qwen3", "engine": {"variant": "cpu"}}
    return Recipe.model_validate_json(json.dumps(data | sections))


def planned(source: Recipe, known: Facts | None = None, is_local: bool = True) -> DeploymentPlan:
    location = ModelLocation("/cache/models/tiny" if is_local else source.model, is_local)
    return plan(source, known or facts(source), ENGINE, location)


def named(deployment: DeploymentPlan, name: str) -> ProcessPlan:
    (process,) = [process for process in deployment.processes if process.name == name]
    return process


def value(process: ProcessPlan, flag: str) -> str:
    assert process.argv.count(flag) == 1
    return process.argv[process.argv.index(flag) + 1]


def transfer(process: ProcessPlan) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(value(process, "--kv-transfer-config"))
    return config


def test_prefill_gets_the_whole_command() -> None:
    process = named(planned(recipe(max_model_len_tokens=4096)), "prefill-0")
    assert process.argv[:3] == ("/cache/engine/bin/vllm", "serve", "/cache/models/tiny")
    assert value(process, "--served-model-name") == "tiny-qwen3"
    assert value(process, "--host") == "127.0.0.1"
    assert value(process, "--port") == str(process.port)
    assert value(process, "--tensor-parallel-size") == "1"
    assert value(process, "--block-size") == "64"
    assert value(process, "--max-model-len") == "4096"
    assert value(process, "--kv-cache-memory-bytes") == str(4 * 2**30)
    assert transfer(process) == {
        "kv_connector": "NixlPushConnector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
    }
    assert dict(process.env) == {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(process.side_channel_port),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
        "VLLM_MQ_BUSY_LOOP_SECONDS": "0.001",
    }
    assert "VLLM_CPU_KVCACHE_SPACE" in process.env_unset


def test_router_knows_every_engine_by_its_role() -> None:
    deployment = planned(recipe(prefill={"replicas": 2}))
    router = named(deployment, "router")
    assert "VLLM_NIXL_SIDE_CHANNEL_SECRET" in router.env_unset
    assert router.argv[:2] == ("/cache/engine/bin/vllm-router", "--vllm-pd-disaggregation")
    given = [router.argv[i : i + 2] for i in range(len(router.argv))]
    for process in deployment.processes[:-1]:
        assert (f"--{process.role}", process.url) in given
    assert value(router, "--policy") == "round_robin"
    assert value(router, "--prometheus-port") == str(router.metrics_port)
    assert deployment.router_url == f"http://127.0.0.1:{router.port}"


@pytest.mark.parametrize(
    ("mode", "connector", "extra"),
    [
        ("push", "NixlPushConnector", {}),
        ("pull", "NixlConnector", {}),
        ("push-upstream", "NixlPushConnector", {"push_impl": "upstream"}),
    ],
)
def test_one_key_changes_the_transfer_mode(
    mode: str, connector: str, extra: dict[str, str]
) -> None:
    deployment = planned(recipe(transfer={"mode": mode}))
    for name, role in (("prefill-0", "kv_producer"), ("decode-0", "kv_consumer")):
        config = transfer(named(deployment, name))
        assert config["kv_connector"] == connector
        assert config["kv_role"] == role
        assert config.get("kv_connector_extra_config", {}) == extra


def test_transfer_settings_reach_both_engines() -> None:
    source = recipe(
        transfer={
            "backends": ["LIBFABRIC"],
            "load_failure_policy": "recompute",
            "extra": {"kv_lease_duration": 3},
        }
    )
    for name in ("prefill-0", "decode-0"):
        config = transfer(named(planned(source), name))
        assert config["kv_load_failure_policy"] == "recompute"
        assert config["kv_connector_extra_config"] == {
            "backends": ["LIBFABRIC"],
            "kv_lease_duration": 3,
        }


def test_role_arguments_and_environment_lie_over_the_engines() -> None:
    source = recipe(
        engine={
            "variant": "cpu",
            "args": {"enforce_eager": True, "seed": 1, "stop-gap": [1, "b"]},
            "env": {"A": "1", "B": "1"},
        },
        decode={
            "args": {"enforce-eager": None, "seed": 2, "async-scheduling": False},
            "env": {"B": 2, "VLLM_NO_USAGE_STATS": "0"},
        },
    )
    prefill, decode = (named(planned(source), name) for name in ("prefill-0", "decode-0"))
    assert prefill.argv[-6:] == ("--enforce-eager", "--seed", "1", "--stop-gap", "1", "b")
    assert "--enforce-eager" not in decode.argv
    assert value(decode, "--seed") == "2"
    assert "--no-async-scheduling" in decode.argv
    assert (decode.env["A"], decode.env["B"]) == ("1", "2")
    assert decode.env["VLLM_NO_USAGE_STATS"] == "0"


def test_mapping_argument_becomes_json() -> None:
    process = named(planned(recipe(prefill={"args": {"x-config": {"a": [1, None]}}})), "prefill-0")
    assert json.loads(value(process, "--x-config")) == {"a": [1, None]}


def test_hub_model_may_use_the_network() -> None:
    process = named(planned(recipe(model="Org/Model"), is_local=False), "prefill-0")
    assert process.argv[2] == "Org/Model"
    assert "HF_HUB_OFFLINE" not in process.env


def test_role_limit_overrides_the_recipes() -> None:
    deployment = planned(recipe(max_model_len_tokens=4096, prefill={"max_model_len_tokens": 512}))
    assert value(named(deployment, "prefill-0"), "--max-model-len") == "512"
    assert value(named(deployment, "decode-0"), "--max-model-len") == "4096"


def test_workers_of_one_engine_get_cores_each() -> None:
    source = recipe(prefill={"tensor_parallel": 2})
    deployment = planned(source, facts(source, cores=6))
    prefill, decode = (named(deployment, name) for name in ("prefill-0", "decode-0"))
    assert prefill.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert decode.env["VLLM_CPU_OMP_THREADS_BIND"] == "4,5"


def test_more_workers_than_cores_share_them_with_a_note() -> None:
    source = recipe(prefill={"tensor_parallel": 2})
    deployment = planned(source)
    assert named(deployment, "prefill-0").env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert named(deployment, "decode-0").env["VLLM_CPU_OMP_THREADS_BIND"] == "0"
    assert "3 engine workers share 2 cores" in deployment.notes[0]


def test_named_cores_are_left_alone_by_the_automatic_ones() -> None:
    deployment = planned(recipe(decode={"cores": [[0]]}))
    assert named(deployment, "decode-0").cores == (0,)
    assert named(deployment, "prefill-0").cores == (1,)


def test_core_that_the_machine_lacks_names_the_key() -> None:
    with pytest.raises(UsageError) as caught:
        planned(recipe(decode={"cores": [[7]]}))
    assert caught.value.where == "decode.cores"


def test_devices_are_assigned_around_the_named_ones() -> None:
    source = recipe(
        engine={"variant": "cuda"},
        prefill={"tensor_parallel": 2},
        decode={"devices": [[1]]},
    )
    deployment = planned(source, facts(source, gpus=("4", "5", "GPU-6")))
    assert named(deployment, "prefill-0").env["CUDA_VISIBLE_DEVICES"] == "4,GPU-6"
    assert named(deployment, "decode-0").env["CUDA_VISIBLE_DEVICES"] == "5"


def test_too_few_devices_names_the_key_and_what_is_there() -> None:
    source = recipe(engine={"variant": "cuda"})
    with pytest.raises(UsageError, match="this machine offers 0") as caught:
        planned(source, facts(source, gpus=("0",)))
    assert caught.value.where == "decode.devices"


def test_machine_without_devices_is_told_of_the_cpu_engine() -> None:
    source = recipe(engine={"variant": "cuda"})
    with pytest.raises(UsageError, match="this machine offers none") as caught:
        planned(source, facts(source, gpus=()))
    assert "--set engine.variant=cpu" in str(caught.value.next_step)


def test_engine_that_spans_nodes_is_sent_to_a_cluster() -> None:
    source = recipe_loader.load(recipes_dir() / "deepseek-v3.1-p5.yaml").recipe
    with pytest.raises(UsageError, match="prefill needs devices 8, 9") as caught:
        planned(source, facts(source, gpus=tuple(map(str, range(8)))))
    assert "pdlaunch render k8s" in str(caught.value.next_step)


def test_two_hosts_get_fixed_ports_and_reachable_addresses() -> None:
    source = recipe(decode={"host": "decode.example"}, prefill={"replicas": 2})
    deployment = planned(source)
    prefill, decode = (named(deployment, name) for name in ("prefill-1", "decode-0"))
    assert (prefill.url, prefill.side_channel_port) == ("http://192.0.2.1:8101", 5601)
    assert (decode.url, decode.side_channel_port) == ("http://192.0.2.2:8200", 5700)
    assert prefill.is_here and not decode.is_here
    assert prefill.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "192.0.2.1"
    assert decode.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "192.0.2.2"
    assert value(decode, "--host") == "192.0.2.2"


def test_host_that_is_this_machine_is_here() -> None:
    assert all(p.is_here for p in planned(recipe(decode={"host": "192.0.2.1"})).processes)


def test_router_on_all_interfaces_is_reached_over_loopback() -> None:
    router = named(planned(recipe(router={"host": "0.0.0.0", "port": 80})), "router")
    assert value(router, "--host") == "0.0.0.0"
    assert router.url == "http://127.0.0.1:80"


def test_ipv6_addresses_get_brackets() -> None:
    process = named(planned(recipe(decode={"host": "2001:db8::7"})), "decode-0")
    assert process.url == "http://[2001:db8::7]:8200"


def test_p5en_recipe_renders_the_right_things_for_each_host() -> None:
    source = recipe_loader.load(recipes_dir() / "qwen3-32b-p5en.yaml").recipe
    deployment = planned(source, is_local=False)
    prefill, decode, router = deployment.processes
    for process, host in ((prefill, "10.0.0.11"), (decode, "10.0.0.12")):
        assert process.host == host
        assert not process.is_here
        assert value(process, "--tensor-parallel-size") == "4"
        assert process.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
        assert process.env["FI_PROVIDER"] == "efa"
        assert process.env["FI_EFA_USE_DEVICE_RDMA"] == "1"
        assert process.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == host
        assert process.env_prepend["LD_LIBRARY_PATH"] == "/opt/amazon/efa/lib"
        assert transfer(process)["kv_connector_extra_config"] == {"backends": ["LIBFABRIC"]}
    assert router.url == "http://10.0.0.11:8000"
    assert value(router, "--decode") == "http://10.0.0.12:8200"


def test_host_buffers_reach_both_engines() -> None:
    source = recipe(engine={"variant": "cuda"}, transfer={"buffer": "host"})
    for process in planned(source).engines:
        assert transfer(process)["kv_buffer_device"] == "cpu"
    assert "kv_buffer_device" not in transfer(planned(recipe()).engines[0])


@pytest.mark.parametrize("name", ["qwen3-32b-trn2", "qwen3-32b-trn2-host-buffer"])
def test_engines_on_trainium_have_cores_of_their_own(name: str) -> None:
    source = recipe_loader.load(recipes_dir() / f"{name}.yaml").recipe
    # GPUs of this machine are none of theirs.
    prefill, decode = planned(source, facts(source, gpus=("GPU-4",))).engines
    assert prefill.env["NEURON_RT_VISIBLE_CORES"] == "0-7"
    assert decode.env["NEURON_RT_VISIBLE_CORES"] == "8-15"
    assert "CUDA_VISIBLE_DEVICES" not in prefill.env
    assert transfer(decode)["kv_connector_extra_config"] == {"backends": ["LIBFABRIC"]}
    assert ("kv_buffer_device" in transfer(decode)) == name.endswith("host-buffer")


def test_plan_survives_its_own_json() -> None:
    deployment = planned(recipe(prefill={"replicas": 2}))
    assert DeploymentPlan.model_validate_json(deployment.model_dump_json()) == deployment


@pytest.mark.parametrize("path", sorted(recipes_dir().glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_can_be_planned(path: Path) -> None:
    source = recipe_loader.load(path).recipe
    deployment = planned(source)
    assert [process.name for process in deployment.processes] == [
        *(f"prefill-{replica}" for replica in range(source.prefill.replicas)),
        *(f"decode-{replica}" for replica in range(source.decode.replicas)),
        "router",
    ]


def test_two_and_two_engines_have_cores_and_ports_of_their_own() -> None:
    source = recipe_loader.load(recipes_dir() / "tiny-qwen3-2p2d-cpu.yaml").recipe
    engines = planned(source, facts(source, cores=4)).engines
    assert [process.cores for process in engines] == [(0,), (1,), (2,), (3,)]
    assert len({(process.port, process.side_channel_port) for process in engines}) == 4


def test_larger_decode_engine_takes_over_from_several_prefill_engines() -> None:
    source = recipe_loader.load(recipes_dir() / "llama-3.3-70b-p5en.yaml").recipe
    first, second, decode = planned(source, is_local=False).engines
    assert (first.env["CUDA_VISIBLE_DEVICES"], second.env["CUDA_VISIBLE_DEVICES"]) == (
        "0,1,2,3",
        "4,5,6,7",
    )
    assert value(decode, "--tensor-parallel-size") == "8"
    assert (first.host, second.host, decode.host) == ("10.0.0.11", "10.0.0.11", "10.0.0.12")


def test_engines_that_share_a_device_are_given_it_both() -> None:
    source = recipe_loader.load(recipes_dir() / "qwen3-0.6b-one-gpu.yaml").recipe
    prefill, decode = planned(source, facts(source, gpus=("GPU-4",))).engines
    assert prefill.env["CUDA_VISIBLE_DEVICES"] == decode.env["CUDA_VISIBLE_DEVICES"] == "GPU-4"


ROLES = st.fixed_dictionaries(
    {"replicas": st.integers(1, 4), "tensor_parallel": st.sampled_from([1, 2, 4])},
    optional={
        "port": st.sampled_from([20000, 20003, 30000]),
        "side_channel_port": st.sampled_from([20001, 20010, 31000]),
    },
)


@settings(max_examples=200, deadline=None)
@given(
    prefill=ROLES,
    decode=ROLES,
    cores=st.integers(1, 64),
    variant=st.sampled_from(["cpu", "cuda"]),
    router=st.fixed_dictionaries({}, optional={"port": st.sampled_from([20002, 8000])}),
)
def test_no_two_processes_share_a_port_a_core_or_a_device(
    prefill: dict[str, int],
    decode: dict[str, int],
    cores: int,
    variant: str,
    router: dict[str, int],
) -> None:
    source = recipe(engine={"variant": variant}, prefill=prefill, decode=decode, router=router)
    deployment = planned(source, facts(source, cores=cores))
    auto = range(20000, 20040)
    ports = [
        port
        for process in deployment.processes
        for port in (process.port, process.side_channel_port, process.metrics_port)
        if port is not None
    ]
    named_by_hand = {
        port + offset
        for role in (prefill, decode)
        for key in ("port", "side_channel_port")
        if (port := role.get(key)) is not None
        for offset in range(role["replicas"])
    } | {router.get("port", 0)}
    chosen = [port for port in ports if port in auto and port not in named_by_hand]
    assert len(chosen) == len(set(chosen))
    workers = sum(role["replicas"] * role["tensor_parallel"] for role in (prefill, decode))
    for left, right in combinations(deployment.processes, 2):
        if variant == "cuda" or workers <= cores:
            assert not set(left.cores) & set(right.cores)
        assert not set(left.devices) & set(right.devices)
    if variant == "cpu":
        for process in deployment.processes[:-1]:
            role = prefill if process.role == "prefill" else decode
            bound = process.env["VLLM_CPU_OMP_THREADS_BIND"].split("|")
            assert len(bound) == role["tensor_parallel"]
            assert all(bound)


@settings(max_examples=50, deadline=None)
@given(prefill=st.integers(1, 8), decode=st.integers(1, 8))
def test_automatic_ports_are_distinct_and_suffice(prefill: int, decode: int) -> None:
    source = recipe(prefill={"replicas": prefill}, decode={"replicas": decode})
    known = facts(source)
    exact = Facts(**{**vars(known), "free_ports": known.free_ports[: ports_needed(source)]})
    ports = [
        port
        for process in planned(source, exact).processes
        for port in (process.port, process.side_channel_port, process.metrics_port)
        if port is not None
    ]
    assert len(ports) == len(set(ports)) == ports_needed(source)
