"""Turns a recipe and facts into a deployment plan. Pure: no files, sockets, clocks or processes."""

from __future__ import annotations

import ipaddress
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import JsonValue

from pdlaunch.engine import Engine
from pdlaunch.errors import UsageError
from pdlaunch.plan import DeploymentPlan, ProcessPlan, ProcessRole, RestartPolicy
from pdlaunch.recipe import LOCAL_HOST, Recipe, RoleSection, TransferSection, overlay
from pdlaunch.recipe_checks import ROLES, Role, is_loopback, named_ports, workers_per_engine
from pdlaunch.trace import SETTING as TRACE_SETTING
from pdlaunch.transport import DEFAULT_BACKENDS, LIBFABRIC

LOOPBACK = "127.0.0.1"
DEFAULT_CPU_KV_CACHE_GIB = 4.0

# On other hosts nobody here can see which ports are free, and each host plans for itself: both must
# come to the same numbers.
FIXED_PORTS: Mapping[tuple[str, str], int] = {
    ("prefill", "port"): 8100,
    ("prefill", "side_channel_port"): 5600,
    ("decode", "port"): 8200,
    ("decode", "side_channel_port"): 5700,
    ("router", "port"): 8000,
    ("router", "metrics_port"): 29000,
}

# The router sends every other request to a dead engine until three checks of its health have
# failed; by its own defaults, for minutes. At start it would look for its workers every 30 s.
ROUTER_ARGS: Mapping[str, JsonValue] = {
    "worker-startup-check-interval": 1,
    "health-check-interval-secs": 1,
}

# The router keeps connections longer than vLLM's 5 s, and asks for health all the time: a request
# on one that the engine is just closing is lost, and sent again one leg after the other.
KEEP_ALIVE_S = 120

# Asked every few seconds by the router; a log of nothing else tells nothing.
ENGINE_ARGS: Mapping[str, JsonValue] = {"disable-access-log-for-endpoints": "/health,/metrics"}

# Made for pdlaunch's own interpreter, not for the engine's.
PYTHON_ENV = ("PYTHONHOME", "PYTHONPATH")
# Engines prove it to each other; the router takes no part in that.
ENGINES_ONLY_ENV = ("VLLM_NIXL_SIDE_CHANNEL_SECRET",)
# vLLM's older name for the size of the KV cache; an inherited value would override the plan's.
OLD_KV_CACHE_ENV = "VLLM_CPU_KVCACHE_SPACE"

EFA_ENV: Mapping[str, str] = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_ENABLE_SHM": "0",
    "FI_EFA_ENABLE_SHM_TRANSFER": "0",
    "FI_EFA_FORK_SAFE": "0",
    "FI_EFA_MR_MAX_CACHED_COUNT": "524288",
    "FI_EFA_MR_MAX_CACHED_SIZE": "0",
    "NCCL_SOCKET_IFNAME": "^lo,docker,veth",
}
# By variant, what tells an engine its devices.
DEVICES_ENV: Mapping[str, str] = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "neuron": "NEURON_RT_VISIBLE_CORES",
}
# Another libfabric on the path would not know EFA, or not this version of it.
EFA_LIBRARIES = "/opt/amazon/efa/lib"


@dataclass(frozen=True)
class Facts:
    """What a plan needs to know about this machine and this launch."""

    launch_id: str
    cores: tuple[int, ...]
    # None where nobody could tell.
    gpus: tuple[str, ...] | None
    free_ports: tuple[int, ...]
    local_addresses: frozenset[str]
    routable_address: str
    # Names of hosts in the recipe, resolved where that was possible.
    resolved: Mapping[str, str]


@dataclass(frozen=True)
class ModelLocation:
    """What `vllm serve` gets for a model, and whether that is on this machine."""

    argument: str
    is_local: bool


def ports_needed(recipe: Recipe) -> int:
    """Free ports that a plan of the recipe may ask for."""
    return 2 * (recipe.prefill.replicas + recipe.decode.replicas) + 2


def plan(
    recipe: Recipe,
    facts: Facts,
    engine: Engine,
    model: ModelLocation,
    *,
    discovery: Mapping[str, JsonValue] | None = None,
    engine_ids: Mapping[Role, str] | None = None,
) -> DeploymentPlan:
    """The deployment that a recipe describes, on a machine with these facts.

    discovery: flags by which the router finds its engines. None: by their addresses.
    engine_ids: for roles whose engines are started in several parts, which must agree on one.
    """
    planner = _Planner(recipe, facts, engine, model, engine_ids or {})
    engines = tuple(planner.engines())
    return DeploymentPlan(
        name=recipe.name,
        launch_id=facts.launch_id,
        model=model.argument,
        served_name=recipe.client_model_name,
        mode=recipe.transfer.mode,
        engine_version=engine.version,
        largest_block_tokens=max(recipe.prefill.block_size_tokens, recipe.decode.block_size_tokens),
        processes=(*engines, planner.router(engines, discovery)),
        ready_s=recipe.timeouts.ready_s,
        request_s=recipe.timeouts.request_s,
        stop_s=recipe.timeouts.stop_s,
        drain_s=recipe.timeouts.drain_s,
        restart={
            role: RestartPolicy.model_validate(recipe.restart(role).model_dump())
            for role in get_args(ProcessRole)
        },
        notes=tuple(planner.notes),
        trace_folder=_trace_folder(recipe.transfer),
    )


def transfer_config(
    transfer: TransferSection, role: Role, engine_id: str | None = None
) -> dict[str, Any]:
    """The value of --kv-transfer-config for one engine.

    It names no engine id where it can: vLLM draws one at each start, and an engine that was
    restarted must not be taken for the one before it.
    """
    extra: dict[str, Any] = dict(transfer.extra)
    if transfer.backends is not None:
        extra["backends"] = list(transfer.backends)
    if transfer.mode == "push-upstream":
        extra["push_impl"] = "upstream"
    config: dict[str, Any] = {
        "kv_connector": "NixlConnector" if transfer.mode == "pull" else "NixlPushConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": transfer.load_failure_policy,
    }
    if transfer.buffer == "host":
        config["kv_buffer_device"] = "cpu"
    if engine_id is not None:
        config["engine_id"] = engine_id
    if extra:
        config["kv_connector_extra_config"] = extra
    return config


def flags(args: Mapping[str, JsonValue]) -> Iterator[str]:
    """Command-line flags from a mapping: how a recipe's `args` are read."""
    for name, value in args.items():
        if value is None:
            continue
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
            continue
        yield f"--{name}"
        if isinstance(value, list):
            yield from (_text(item) for item in value)
        else:
            yield _text(value)


def url(host: str, port: int) -> str:
    """An http URL; IPv6 addresses get their brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _trace_folder(transfer: TransferSection) -> str | None:
    folder = transfer.extra.get(TRACE_SETTING) if transfer.mode == "push" else None
    return folder if isinstance(folder, str) and folder else None


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value)


class _Planner:
    def __init__(
        self,
        recipe: Recipe,
        facts: Facts,
        engine: Engine,
        model: ModelLocation,
        engine_ids: Mapping[Role, str],
    ) -> None:
        self._recipe = recipe
        self._facts = facts
        self._engine = engine
        self._model = model
        self._engine_ids = engine_ids
        self.notes: list[str] = []
        hosts = [recipe.prefill.address, recipe.decode.address]
        self._all_here = all(self._is_here(host) for host in [*hosts, recipe.router.address])
        self._loopback_only = all(host == LOCAL_HOST or is_loopback(host) for host in hosts)
        self._named_ports = {
            (section, key): getattr(getattr(recipe, section), key) for section, key in FIXED_PORTS
        }
        taken = {
            port
            for _, _, first, count in named_ports(recipe)
            for port in range(first, first + count)
        }
        self._free_ports = iter([port for port in facts.free_ports if port not in taken])
        self._cores = self._assign_cores()
        self._devices = self._assign_devices()

    def engines(self) -> Iterator[ProcessPlan]:
        for role in ROLES:
            for replica in range(self._recipe.role(role).replicas):
                yield self._engine_process(role, replica)

    def router(
        self, engines: Sequence[ProcessPlan], discovery: Mapping[str, JsonValue] | None
    ) -> ProcessPlan:
        section = self._recipe.router
        host = LOOPBACK if section.host == LOCAL_HOST else self._resolve(section.address)
        port = self._port("router", "port", 0)
        metrics_port = self._port("router", "metrics_port", 0)
        argv = [
            str(self._engine.router),
            "--vllm-pd-disaggregation",
            *("--policy", section.policy),
            *("--host", host),
            *("--port", str(port)),
            *("--prometheus-host", host),
            *("--prometheus-port", str(metrics_port)),
        ]
        if discovery is None:
            for process in engines:
                argv += [f"--{process.role}", process.url]
        else:
            argv += flags(discovery)
        argv += flags(overlay(ROUTER_ARGS, section.args))
        # An address to listen on everywhere is none to connect to.
        reached_at = LOOPBACK if _is_unspecified(host) else host
        return ProcessPlan(
            name="router",
            role="router",
            host=reached_at,
            is_here=self._is_here(section.address),
            argv=tuple(argv),
            env=dict(section.env),
            env_prepend={},
            env_unset=(*PYTHON_ENV, *ENGINES_ONLY_ENV),
            url=url(reached_at, port),
            port=port,
            metrics_port=metrics_port,
            # Its /health fails while any engine's does, which another engine may make good.
            health_path="/readiness",
        )

    def _engine_process(self, role: Role, replica: int) -> ProcessPlan:
        section = self._recipe.role(role)
        name = f"{role}-{replica}"
        host = self._role_address(section)
        port = self._port(role, "port", replica)
        side_channel_port = self._port(role, "side_channel_port", replica)
        cores = self._cores.get(name, ())
        devices = self._devices.get(name, ())
        env = self._base_env(section)
        env |= {**self._recipe.engine.env, **section.env}
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_port)
        if cores:
            env["VLLM_CPU_OMP_THREADS_BIND"] = _bind(cores, workers_per_engine(section))
        if devices:
            env[DEVICES_ENV[self._recipe.engine.variant]] = self._device_names(devices)
        return ProcessPlan(
            name=name,
            role=role,
            host=host,
            is_here=self._is_here(section.address),
            argv=tuple(self._engine_argv(role, host, port)),
            env=env,
            env_prepend={"LD_LIBRARY_PATH": EFA_LIBRARIES} if section.efa_interfaces else {},
            env_unset=tuple(name for name in (*PYTHON_ENV, OLD_KV_CACHE_ENV) if name not in env),
            url=url(host, port),
            port=port,
            side_channel_port=side_channel_port,
            cores=cores,
            devices=devices,
            nixl_backends=self._recipe.transfer.backends or DEFAULT_BACKENDS,
        )

    def _engine_argv(self, role: Role, host: str, port: int) -> Iterator[str]:
        recipe, section = self._recipe, self._recipe.role(role)
        yield from (str(self._engine.vllm), "serve", self._model.argument)
        yield from ("--served-model-name", recipe.client_model_name)
        yield from ("--host", host, "--port", str(port))
        yield from ("--tensor-parallel-size", str(section.tensor_parallel))
        if role == "prefill" and recipe.prefill.pipeline_parallel > 1:
            yield from ("--pipeline-parallel-size", str(recipe.prefill.pipeline_parallel))
        yield from ("--block-size", str(section.block_size_tokens))
        longest = section.max_model_len_tokens or recipe.max_model_len_tokens
        if longest is not None:
            yield from ("--max-model-len", str(longest))
        cache_gib = section.kv_cache_gib
        if cache_gib is None and recipe.engine.variant == "cpu":
            cache_gib = DEFAULT_CPU_KV_CACHE_GIB
        if cache_gib is not None:
            yield from ("--kv-cache-memory-bytes", str(int(cache_gib * 2**30)))
        if section.gpu_memory_fraction is not None:
            yield from ("--gpu-memory-utilization", str(section.gpu_memory_fraction))
        config = transfer_config(recipe.transfer, role, self._engine_ids.get(role))
        yield from ("--kv-transfer-config", json.dumps(config))
        yield from flags(overlay(ENGINE_ARGS, recipe.engine.args, section.args))

    def _base_env(self, section: RoleSection) -> dict[str, str]:
        env = {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        }
        if self._recipe.engine.variant == "cpu":
            # Engines compute on the cores that looking for messages in a loop would take.
            env["VLLM_MQ_BUSY_LOOP_SECONDS"] = "0.001"
        if self._model.is_local:
            env["HF_HUB_OFFLINE"] = "1"
        if section.efa_interfaces:
            env |= EFA_ENV
        if LIBFABRIC in (self._recipe.transfer.backends or ()):
            # Otherwise it takes TCP where it finds nothing better, and does not say so.
            env["NIXL_LOG_LEVEL"] = "INFO"
        return env

    def _is_here(self, host: str) -> bool:
        if host == LOCAL_HOST or is_loopback(host) or _is_unspecified(host):
            return True
        return self._resolve(host) in self._facts.local_addresses

    def _resolve(self, host: str) -> str:
        return self._facts.resolved.get(host, host)

    def _role_address(self, section: RoleSection) -> str:
        if section.host != LOCAL_HOST:
            return self._resolve(section.address)
        return LOOPBACK if self._loopback_only else self._facts.routable_address

    def _port(self, section: str, key: str, replica: int) -> int:
        named: int | None = self._named_ports[section, key]
        if named is not None:
            return named + replica
        if not self._all_here:
            return FIXED_PORTS[section, key] + replica
        return next(self._free_ports)

    def _assign_cores(self) -> dict[str, tuple[int, ...]]:
        if self._recipe.engine.variant != "cpu":
            return {}
        assigned: dict[str, tuple[int, ...]] = {}
        waiting: list[tuple[str, int]] = []
        for role in ROLES:
            section = self._recipe.role(role)
            if not self._is_here(section.address):
                continue
            for replica in range(section.replicas):
                name = f"{role}-{replica}"
                if section.cores is None:
                    waiting.append((name, workers_per_engine(section)))
                else:
                    assigned[name] = section.cores[replica]
                    self._known(role, "cores", assigned[name], self._facts.cores)
        taken = {core for cores in assigned.values() for core in cores}
        free = [core for core in self._facts.cores if core not in taken] or list(self._facts.cores)
        return assigned | self._spread(waiting, free)

    def _spread(
        self, waiting: Sequence[tuple[str, int]], free: Sequence[int]
    ) -> dict[str, tuple[int, ...]]:
        workers = sum(count for _, count in waiting)
        if workers > len(free):
            self.notes.append(
                f"{workers} engine workers share {len(free)} cores: it works, and it is slow"
            )
        spread: dict[str, tuple[int, ...]] = {}
        done = 0
        for name, count in waiting:
            if workers > len(free):
                spread[name] = tuple(free[(done + i) % len(free)] for i in range(count))
            else:
                first = done * len(free) // workers
                spread[name] = tuple(free[first : (done + count) * len(free) // workers])
            done += count
        return spread

    def _assign_devices(self) -> dict[str, tuple[int, ...]]:
        if self._recipe.engine.variant == "cpu":
            return {}
        # Nobody here counts Trainium's.
        gpus = self._facts.gpus if self._recipe.engine.variant == "cuda" else None
        taken: dict[str, set[int]] = {}
        for role in ROLES:
            section = self._recipe.role(role)
            for named in section.devices or ():
                taken.setdefault(self._role_address(section), set()).update(named)
        assigned: dict[str, tuple[int, ...]] = {}
        for role in ROLES:
            section = self._recipe.role(role)
            on_host = taken.setdefault(self._role_address(section), set())
            for replica in range(section.replicas):
                if section.devices is not None:
                    devices = section.devices[replica]
                else:
                    free = (index for index in itertools.count() if index not in on_host)
                    devices = tuple(itertools.islice(free, workers_per_engine(section)))
                    on_host.update(devices)
                assigned[f"{role}-{replica}"] = devices
                if self._is_here(section.address) and gpus is not None:
                    self._known(role, "devices", devices, range(len(gpus)))
        return assigned

    def _known(self, role: Role, key: str, wanted: Sequence[int], available: Sequence[int]) -> None:
        missing = [str(index) for index in wanted if index not in available]
        if missing:
            there = ", ".join(str(index) for index in available) or "none"
            more = ""
            if key == "devices" and not available:
                more = "; without a GPU: --set engine.variant=cpu"
            elif key == "devices" and len(wanted) > len(available):
                # Here an engine is one process; over several nodes it is several.
                more = "; an engine over several nodes is for a cluster: `pdlaunch render k8s`"
            raise UsageError(
                f"{role} needs {key} {', '.join(missing)}, and this machine offers {there}",
                where=f"{role}.{key}",
                next_step=f"set {role}.{key}, or lower replicas or tensor_parallel{more}",
            )

    def _device_names(self, indexes: Sequence[int]) -> str:
        gpus = self._facts.gpus
        if self._recipe.engine.variant == "neuron":
            return _range(indexes)
        if gpus is None:
            return ",".join(map(str, indexes))
        # An inherited CUDA_VISIBLE_DEVICES narrows the machine down; indexes count inside it.
        return ",".join(gpus[each] if each < len(gpus) else str(each) for each in indexes)


def _is_unspecified(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _range(indexes: Sequence[int]) -> str:
    """As Neuron's runtime documents it; what has gaps is listed."""
    first, last = min(indexes), max(indexes)
    if sorted(indexes) == list(range(first, last + 1)):
        return f"{first}-{last}" if last > first else str(first)
    return ",".join(map(str, indexes))


def _bind(cores: Sequence[int], workers: int) -> str:
    share = len(cores) / workers
    return "|".join(
        ",".join(str(core) for core in cores[int(rank * share) : int((rank + 1) * share)])
        for rank in range(workers)
    )
