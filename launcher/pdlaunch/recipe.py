"""What a recipe may say: frozen, validated objects. Never reads files, plans or starts anything."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    WithJsonSchema,
    field_validator,
)

LOCAL_HOST = "local"
SSH = "ssh://"
Backend = Literal["process", "docker"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

# What OpenSSH and the Docker SDK take alike.
_SSH_ENDPOINT = re.compile(r"ssh://([\w.-]+@)?[\w.-]+(:\d+)?", re.ASCII)

RestartWhen = Literal["always", "on-failure", "never"]

EngineVariant = Literal["cpu", "cuda", "neuron"]
# What the images of the vllm-neuron plugin carry. The patch series does not apply to it.
NEURON_VLLM_VERSION = "0.21"

Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Indexes = tuple[Annotated[int, Field(ge=0)], ...]

# Flags that a key of the recipe already decides; a second place to say it would be a way to
# contradict oneself.
OWNED_FLAGS: Mapping[str, str] = {
    "host": "prefill.host and decode.host",
    "port": "prefill.port and decode.port",
    "model": "model",
    "served-model-name": "served_name",
    "kv-transfer-config": "transfer",
    "tensor-parallel-size": "tensor_parallel",
    "pipeline-parallel-size": "prefill.pipeline_parallel",
    "block-size": "block_size_tokens",
    "max-model-len": "max_model_len_tokens",
    "kv-cache-memory-bytes": "kv_cache_gib",
    "gpu-memory-utilization": "gpu_memory_fraction",
}
OWNED_ROUTER_FLAGS: Mapping[str, str] = {
    "host": "router.host",
    "port": "router.port",
    "prometheus-host": "router.host",
    "prometheus-port": "router.metrics_port",
    "policy": "router.policy",
    "prefill": "prefill",
    "decode": "decode",
    "vllm-pd-disaggregation": "nothing: it is always on",
}
OWNED_EXTRA: Mapping[str, str] = {
    "backends": "transfer.backends",
    "push_impl": "transfer.mode",
}
OWNED_ENV: Mapping[str, str] = {
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "prefill.host and decode.host",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "side_channel_port",
    "VLLM_CPU_OMP_THREADS_BIND": "cores",
    "VLLM_CPU_KVCACHE_SPACE": "kv_cache_gib",
    "CUDA_VISIBLE_DEVICES": "devices",
    "NEURON_RT_VISIBLE_CORES": "devices",
}
SECRET_NAME = re.compile(
    r"(^|[_-])(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API[_-]?KEY|ACCESS[_-]KEY|PRIVATE[_-]KEY)$",
    re.IGNORECASE,
)


def _env_value(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError('write a quoted string such as "1": true and false mean nothing here')
    if isinstance(value, int | float):
        return str(value)
    return value


EnvValue = Annotated[
    str, BeforeValidator(_env_value), WithJsonSchema({"type": ["string", "number"]})
]


def _no_owned_flags(args: Mapping[str, Any], owned: Mapping[str, str]) -> Mapping[str, Any]:
    for flag in args:
        name = flag.lstrip("-").replace("_", "-")
        if name in owned:
            raise ValueError(f"--{name} is decided by {owned[name]}; set that instead")
        if SECRET_NAME.search(name):
            raise ValueError(
                f"--{name} would show a secret in the process list; export it in the environment "
                "of pdlaunch, which the processes inherit"
            )
    return args


def _no_owned_env(env: Mapping[str, str]) -> Mapping[str, str]:
    for name in env:
        if name in OWNED_ENV:
            raise ValueError(f"{name} is decided by {OWNED_ENV[name]}; set that instead")
        if SECRET_NAME.search(name):
            raise ValueError(
                f"{name} looks like a secret; export it in the environment of pdlaunch, "
                "which the processes inherit"
            )
    return env


def _endpoint(host: str) -> str:
    if "://" in host and not _SSH_ENDPOINT.fullmatch(host):
        raise ValueError("write an address, or ssh://[USER@]HOST[:PORT] for Docker on another host")
    return host


def _address(host: str) -> str:
    return urlsplit(host).hostname or host if host.startswith(SSH) else host


Host = Annotated[str, StringConstraints(min_length=1), AfterValidator(_endpoint)]


def _none_of(names: Iterable[str]) -> dict[str, JsonValue]:
    """The part of a JSON schema that refuses keys."""
    return {"propertyNames": {"not": {"enum": list(names)}}}


EngineFlags = Annotated[
    Mapping[str, JsonValue],
    AfterValidator(lambda args: _no_owned_flags(args, OWNED_FLAGS)),
    Field(json_schema_extra=_none_of(OWNED_FLAGS)),
]
RouterFlags = Annotated[
    Mapping[str, JsonValue],
    AfterValidator(lambda args: _no_owned_flags(args, OWNED_ROUTER_FLAGS)),
    Field(json_schema_extra=_none_of(OWNED_ROUTER_FLAGS)),
]
Environment = Annotated[
    Mapping[str, EnvValue],
    AfterValidator(_no_owned_env),
    Field(json_schema_extra=_none_of(OWNED_ENV)),
]


class Section(BaseModel):
    """What all parts of a recipe share: frozen, no unknown keys, no guessing of types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class ModelShape(Section):
    """Sizes that decide which parallel layouts are possible."""

    attention_heads: Count = Field(description="Number of attention (query) heads.", examples=[64])
    kv_heads: Count = Field(description="Number of key/value heads.", examples=[8])
    layers: Count | None = Field(
        default=None, description="Number of hidden layers. null: not checked.", examples=[64]
    )


class EngineSection(Section):
    """The engine that both roles run."""

    variant: EngineVariant = Field(
        default="cuda",
        description="Build of vLLM: cpu; cuda for NVIDIA devices; neuron for AWS Trainium, whose "
        "recipes can be validated and cannot be started yet.",
    )
    args: EngineFlags = Field(
        default_factory=dict,
        description="Further `vllm serve` flags for both roles, without dashes. true gives the "
        "flag alone, false its --no- form, null takes an inherited flag away. Flags that a key of "
        "the recipe decides are refused.",
        examples=[{"max-num-batched-tokens": 8192, "enforce-eager": True}],
    )
    env: Environment = Field(
        default_factory=dict,
        description="Environment of both roles' processes. Secrets are refused: the processes "
        "inherit the environment of pdlaunch.",
        examples=[{"VLLM_LOGGING_LEVEL": "INFO"}],
    )


class DockerSection(Section):
    """How containers are made, where `backend` says docker."""

    image: Annotated[str, StringConstraints(min_length=1)] | None = Field(
        default=None,
        description="The image of all containers. null: what `pdlaunch build image` makes, "
        "pdlaunch:latest, or pdlaunch:cpu for the CPU engine.",
        examples=["registry.example/pdlaunch:1"],
    )
    shm_gib: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Shared memory in GiB of an engine that has its host to itself; several on one "
        "host share the host's. null: 32, for the CPU engine 4.",
        examples=[16.0],
    )


class TransferSection(Section):
    """How KV gets from prefill to decode."""

    mode: Literal["push", "pull", "push-upstream"] = Field(
        default="push",
        description="push: ours, written while prefill runs. pull: decode reads after prefill. "
        "push-upstream: stock vLLM's own push connector.",
    )
    backends: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")], ...] | None = (
        Field(
            default=None,
            min_length=1,
            description="NIXL backends, such as UCX or LIBFABRIC. null: NIXL's default, UCX.",
            examples=[["LIBFABRIC"]],
        )
    )
    buffer: Literal["device", "host"] = Field(
        default="device",
        description="Where KV leaves from and arrives at: the device's own memory, or a copy in "
        "the host's, for devices whose memory NIXL cannot register.",
    )
    load_failure_policy: Literal["fail", "recompute"] = Field(
        default="fail",
        description="When KV cannot be loaded: fail ends the request with an error, recompute "
        "prefills it on the decode engine.",
    )
    extra: Mapping[str, JsonValue] = Field(
        default_factory=dict,
        description="Further keys of kv_connector_extra_config, for both roles.",
        examples=[{"push_min_bytes": 1048576, "kv_lease_duration": 30}],
        json_schema_extra=_none_of(OWNED_EXTRA),
    )

    @field_validator("extra")
    @classmethod
    def _extra(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        for key, owner in OWNED_EXTRA.items():
            if key in value:
                raise ValueError(f"{key} is decided by {owner}; set that instead")
        return value


class RestartSection(Section):
    """What follows when a process dies in a running deployment."""

    policy: RestartWhen = Field(
        default="always",
        description="always: start it again. on-failure: unless it ended with exit code 0. never: "
        "leave it.",
    )
    backoff_s: Seconds = Field(
        default=1.0,
        description="Seconds before a start after the second death within an hour, each death "
        "twice as long; after the first it is started at once.",
        examples=[5],
    )
    max_backoff_s: Seconds = Field(
        default=60.0, description="Seconds that the wait grows to at most.", examples=[300]
    )
    max_per_hour: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="How often it is started again within an hour. null: the recipe's "
        "restarts_per_hour.",
        examples=[10],
    )


class RoleSection(Section):
    """One role's engines: as many as `replicas`, all alike."""

    replicas: Count = Field(default=1, description="Number of engines.", examples=[2])
    tensor_parallel: Count = Field(
        default=1,
        description="Devices (on CPU: workers) that share each layer of one engine. Must divide "
        "the attention heads.",
        examples=[4],
    )
    block_size_tokens: Count = Field(
        default=64,
        description="Size of a KV block in tokens; on CPU a multiple of 32. Push needs the same on "
        "both sides.",
        examples=[128],
    )
    max_model_len_tokens: Count | None = Field(
        default=None,
        description="Longest prompt plus answer in tokens, for this role. null: the recipe's.",
        examples=[32768],
    )
    kv_cache_gib: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="KV cache of one engine in GiB, per device. null: 4 on CPU; what "
        "gpu_memory_fraction leaves on CUDA.",
        examples=[16],
    )
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Share of a device's memory that the engine may use. null: vLLM's default. "
        "CUDA only.",
        examples=[0.9],
    )
    devices: tuple[Indexes, ...] | None = Field(
        default=None,
        description="Devices of each replica, by index. null: the next free ones, prefill first. "
        "Engines share a device where kv_cache_gib and gpu_memory_fraction share it out. Not on "
        "CPU; on Trainium they are logical NeuronCores.",
        examples=[[[0, 1], [2, 3]]],
    )
    cores: tuple[Indexes, ...] | None = Field(
        default=None,
        description="Cores of each replica's workers, by index. null: spread over what is "
        "available. CPU only.",
        examples=[[[0, 1], [2, 3]]],
    )
    host: Host = Field(
        default=LOCAL_HOST,
        description="Address that the role's servers listen on and are reached at. local: this "
        "machine, loopback only when every role is here. ssh://[USER@]ADDRESS[:PORT]: the same, "
        "and containers are started there through ssh.",
        examples=["10.0.0.11"],
    )
    port: Port | None = Field(
        default=None,
        description="HTTP port of the first replica, the next ones follow. null: a free one, or a "
        "fixed one where roles are on several hosts.",
        examples=[8100],
    )
    side_channel_port: Port | None = Field(
        default=None,
        description="NIXL side-channel port of the first replica, the next ones follow. null: a "
        "free one, or a fixed one where roles are on several hosts.",
        examples=[5600],
    )
    efa_interfaces: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="EFA interfaces of one engine. Above 0: libfabric is set up for EFA, and "
        "transfer.backends must say LIBFABRIC.",
        examples=[8],
    )
    args: EngineFlags = Field(
        default_factory=dict,
        description="`vllm serve` flags of this role, over engine.args.",
        examples=[{"max-num-seqs": 64}],
    )
    env: Environment = Field(
        default_factory=dict,
        description="Environment of this role, over engine.env.",
        examples=[{"UCX_LOG_LEVEL": "warn"}],
    )
    restart: RestartSection = Field(default_factory=RestartSection)

    @property
    def address(self) -> str:
        """Where the role's servers are reached."""
        return _address(self.host)


class PrefillSection(RoleSection):
    """The prefill engines (P)."""

    pipeline_parallel: Count = Field(
        default=1, description="Pipeline stages of one engine; prefill only.", examples=[2]
    )


class DecodeSection(RoleSection):
    """The decode engines (D)."""


class RouterSection(Section):
    """vllm-router, the one address that clients talk to."""

    policy: Literal[
        "random",
        "round_robin",
        "cache_aware",
        "kv_aware",
        "power_of_two",
        "consistent_hash",
        "sticky_least_loaded",
    ] = Field(default="round_robin", description="How requests spread over replicas.")
    host: Host = Field(
        default=LOCAL_HOST,
        description="Address that the router listens on. local: loopback. 0.0.0.0 opens it to the "
        "network. ssh://: as for a role.",
        examples=["10.0.0.11"],
    )
    port: Port | None = Field(
        default=None,
        description="HTTP port. null: a free one, or 8000 where roles are on several hosts.",
        examples=[8000],
    )
    metrics_port: Port | None = Field(
        default=None,
        description="Port of the router's own metrics. null: a free one, or 29000 where roles are "
        "on several hosts.",
        examples=[29000],
    )
    args: RouterFlags = Field(
        default_factory=dict,
        description="Further vllm-router flags, without dashes.",
        examples=[{"request-timeout-secs": 1800}],
    )
    env: Environment = Field(
        default_factory=dict,
        description="Environment of the router's process.",
        examples=[{"RUST_BACKTRACE": "1"}],
    )
    restart: RestartSection = Field(default_factory=RestartSection)

    @property
    def address(self) -> str:
        """Where the router listens."""
        return _address(self.host)


class TimeoutsSection(Section):
    """Bounds, not waits: what is ready or dead earlier is seen at once."""

    ready_s: Seconds = Field(
        default=1800.0,
        description="Seconds from start until the deployment has answered a request.",
        examples=[3600],
    )
    request_s: Seconds = Field(
        default=300.0,
        description="Seconds for one request of the warm start or of the readiness check.",
        examples=[600],
    )
    stop_s: Seconds = Field(
        default=30.0,
        description="Seconds from asking a process to stop until it is killed; one that still "
        "starts gets 3 at most.",
        examples=[60],
    )
    drain_s: Seconds = Field(
        default=600.0,
        description="Seconds that a rolling restart waits for the requests of an engine to end, "
        "before it ends them.",
        examples=[3600],
    )


class Recipe(Section):
    """One deployment: what to serve, with which engines, and how KV moves between them."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")] = Field(
        description="Name of the deployment: lower-case letters, digits, dots and dashes.",
        examples=["qwen3-8b"],
    )
    model: Annotated[str, StringConstraints(min_length=1)] = Field(
        description="A hub id (Org/Name), a path (starts with / or ./), "
        "embedded:smollm2-135m-instruct or random:tiny-qwen3 (for tests; there are more).",
        examples=["Qwen/Qwen3-8B", "./my-model", "embedded:smollm2-135m-instruct"],
    )
    served_name: str | None = Field(
        default=None,
        description="Name in a client's `model` field. null: the hub id, or the last part of the "
        "model's name.",
        examples=["my-model"],
    )
    max_model_len_tokens: Count | None = Field(
        default=None,
        description="Longest prompt plus answer in tokens. null: the model's own limit.",
        examples=[32768],
    )
    model_shape: ModelShape | None = Field(
        default=None,
        description="The model's sizes, for the checks of the parallel layout where its "
        "config.json is not at hand.",
        examples=[{"attention_heads": 64, "kv_heads": 8, "layers": 64}],
    )
    restarts_per_hour: Annotated[int, Field(ge=0)] = Field(
        default=4,
        description="How often a process that dies in a running deployment is started again within "
        "an hour; a role's restart.max_per_hour goes before. What dies once more stays down; where "
        "it is the last of its role, that takes the deployment down.",
        examples=[4],
    )
    backend: Backend = Field(
        default="process",
        description="What engines and router run as: processes of this machine, or containers of "
        "its Docker and of that of other hosts.",
    )
    docker: DockerSection = Field(default_factory=DockerSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    transfer: TransferSection = Field(default_factory=TransferSection)
    prefill: PrefillSection = Field(default_factory=PrefillSection)
    decode: DecodeSection = Field(default_factory=DecodeSection)
    router: RouterSection = Field(default_factory=RouterSection)
    timeouts: TimeoutsSection = Field(default_factory=TimeoutsSection)

    @property
    def client_model_name(self) -> str:
        """The name in a client's `model` field."""
        if self.served_name:
            return self.served_name
        name = self.model.rstrip("/")
        if ":" in name:
            return name.partition(":")[2]
        return name.rpartition("/")[2] if is_path(name) else name

    def role(self, role: Literal["prefill", "decode"]) -> RoleSection:
        return self.prefill if role == "prefill" else self.decode

    def flags(self, role: Literal["prefill", "decode"]) -> Mapping[str, JsonValue]:
        """The further `vllm serve` flags of a role's engines."""
        merged = overlay(self.engine.args, self.role(role).args)
        return {name: value for name, value in merged.items() if value is not None}

    def restart(self, role: Literal["prefill", "decode", "router"]) -> RestartSection:
        """How a role's processes are started again, with nothing left open."""
        section = self.router.restart if role == "router" else self.role(role).restart
        if section.max_per_hour is not None:
            return section
        return section.model_copy(update={"max_per_hour": self.restarts_per_hour})


def is_path(model: str) -> bool:
    """Whether a recipe's model names a folder rather than a hub id or a model of ours."""
    return model.startswith(("/", "./", "../"))


def overlay(*layers: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Flags of several layers, the last wins; dashes and underscores are the same name."""
    merged: dict[str, JsonValue] = {}
    for layer in layers:
        for name, value in layer.items():
            merged[name.lstrip("-").replace("_", "-")] = value
    return merged
