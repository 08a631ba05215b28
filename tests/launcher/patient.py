"""A machine to examine, sound until a test plants a fault: its files, tools, engine and recipe.

What can be real is: sockets, limits, permissions, file systems, processes. Devices are files and
scripts, and what neither gives is put in the place of the function that reads it.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http.server import HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from checkpoints import write_weights
from pdlaunch import engine, hosts, series
from pdlaunch.doctor import examination, machine, network
from pdlaunch.doctor.examination import Surroundings
from pdlaunch.doctor.findings import Finding
from pdlaunch.engine import Engine
from pdlaunch.recipe import EngineVariant

HERE, THERE = "10.0.0.11", "10.0.0.12"
NOBODY = 65534
GIB = 2**30

# The sizes of Qwen3-32B.
CONFIG: Mapping[str, Any] = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": None,
}
ROLE: Mapping[str, Any] = {
    "tensor_parallel": 4,
    "devices": [[0, 1, 2, 3]],
    "efa_interfaces": 8,
    "block_size_tokens": 128,
    "gpu_memory_fraction": 0.9,
}
CUDA_RECIPE: Mapping[str, Any] = {
    "name": "examined",
    "model": "./model",
    "max_model_len_tokens": 32768,
    "engine": {"variant": "cuda", "env": {"FI_EFA_USE_HUGE_PAGE": 1}},
    "transfer": {"backends": ["LIBFABRIC"]},
    "prefill": {**ROLE, "host": HERE, "port": 8100, "side_channel_port": 5600},
    "decode": {**ROLE, "host": THERE, "port": 8200, "side_channel_port": 5600},
    "router": {"host": HERE, "port": 8000, "metrics_port": 29000},
}
CPU_RECIPE: Mapping[str, Any] = {
    "name": "examined",
    "model": "./model",
    "max_model_len_tokens": 4096,
    "engine": {"variant": "cpu"},
    "prefill": {"block_size_tokens": 32},
    "decode": {"block_size_tokens": 32},
}
GOOD_PROBE: Mapping[str, Any] = {
    "torch": "2.13.0",
    "nixl": "1.5.1",
    "builds": ["nixl-cu12"],
    "cuda": "12.9",
    "cuda_problem": None,
    "plugins": ["LIBFABRIC", "UCX"],
}


@dataclass
class Patient:
    """A machine and a recipe; `examine` says what the doctor finds."""

    folder: Path
    recipe: dict[str, Any]
    # What a child process does before it examines.
    before: list[Callable[[], None]] = field(default_factory=list)
    # Servers and sockets of the test's own process.
    open: ExitStack = field(default_factory=ExitStack)
    surroundings: Surroundings = field(init=False)

    def __post_init__(self) -> None:
        self.surroundings = Surroundings(root=self.root)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def set(self, key: str, value: Any) -> None:
        """Set a key of the recipe, such as prefill.port."""
        *path, last = key.split(".")
        target = self.recipe
        for part in path:
            target = target.setdefault(part, {})
        target[last] = value

    def write(self, name: str, text: str) -> Path:
        """A file below the root."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def tool(self, name: str, script: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def gpus(self, driver: str = "580.65.06", free_mib: int = 143000, count: int = 8) -> None:
        rows = "\n".join(
            f"{index}, GPU-{index}, NVIDIA H200, {driver}, 143771, {free_mib}"
            for index in range(count)
        )
        listed = "\n".join(f"GPU {index}: NVIDIA H200" for index in range(count))
        self.tool(
            "nvidia-smi",
            f"case $1 in\n--list-gpus) echo '{listed}';;\n*) echo '{rows}';;\nesac",
        )

    def nixl(self, backends: Mapping[str, str | None] | None = None, **facts: Any) -> None:
        """What the probe says in the engine's Python."""
        lines = [json.dumps({**GOOD_PROBE, **facts})]
        for backend, failure in (backends or {"LIBFABRIC": None, "UCX": None}).items():
            lines.append(json.dumps({"trying": backend}))
            lines.append(json.dumps({"backend": backend, "error": failure}))
        self.python("\n".join(f"echo '{line}'" for line in lines))

    def python(self, script: str) -> None:
        self.tool("engine-python", script)

    def config(self, **changes: Any) -> None:
        self.model.mkdir(exist_ok=True)
        (self.model / "config.json").write_text(json.dumps({**CONFIG, **changes}))

    def weights(self, size_bytes: int) -> None:
        write_weights(self.model / "model.safetensors", size_bytes)

    def serve(self, server: HTTPServer) -> None:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.open.callback(thread.join)
        self.open.callback(server.server_close)
        self.open.callback(server.shutdown)

    def examine(self, *, name_recipe: bool = True) -> list[Finding]:
        """What the doctor finds, in a process of its own with what was planted there."""
        file = self.folder / "examined.yaml"
        file.write_text(yaml.safe_dump(self.recipe))
        path = file if name_recipe else None
        found = in_child(
            lambda: examination.examine(path, surroundings=self.surroundings), self.before
        )
        return cast("list[Finding]", found)

    def complaints(self) -> dict[str, str]:
        """Warnings and errors: check and state."""
        return {
            found.check: found.state
            for found in self.examine()
            if found.state in ("warning", "error")
        }


def in_child(work: Callable[[], Any], before: list[Callable[[], None]]) -> Any:
    """The result of some work in a forked process, whose limits and rights may be changed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            for each in before:
                each()
            result = pickle.dumps(work())
            with os.fdopen(writer, "wb") as file:
                file.write(result)
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        result = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return pickle.loads(result)


def become_nobody() -> None:
    """Give up what root may do, the real ids as well: access is asked for those."""
    if os.geteuid() == 0:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def small_file_system(at: Path, size: str) -> None:
    """Mount a tmpfs that only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, private = 0x20000, 1 << 18 | 1 << 14
    for step in (
        libc.unshare(clone_newns),
        libc.mount(b"none", b"/", None, ctypes.c_ulong(private), None),
        libc.mount(
            b"tmpfs", str(at).encode(), b"tmpfs", ctypes.c_ulong(0), f"size={size}".encode()
        ),
    ):
        if step:
            raise OSError(ctypes.get_errno(), "mount")


def sound(folder: Path, patch: pytest.MonkeyPatch) -> Patient:
    """A p5en with prefill on it and decode on another one, both as they should be."""
    folder.chmod(0o755)
    patient = Patient(folder, json.loads(json.dumps(CUDA_RECIPE)))
    for index in range(16):
        patient.write(f"sys/class/infiniband/rdmap{index}/device/vendor", "0x1d0f\n")
        patient.write(f"dev/infiniband/uverbs{index}", "").chmod(0o666)
    for name in ("nr_hugepages", "free_hugepages"):
        patient.write(f"sys/kernel/mm/hugepages/hugepages-2048kB/{name}", "5128\n")
    patient.write("opt/amazon/efa/lib/libfabric.so.1", "")
    patient.write("proc/cpuinfo", "processor: 0\nflags\t\t: fpu sse avx avx2\n")
    patient.write("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
    # CAP_IPC_LOCK, which a container on EFA has.
    patient.write("proc/self/status", "CapEff:\t0000000000004000\n")
    (patient.root / "dev/shm").mkdir()
    patient.gpus()
    patient.nixl()
    patient.config()
    patient.weights(61 * GIB)
    for name in ("cache", "state", "tmp", "hub"):
        (folder / name).mkdir(mode=0o777)
        (folder / name).chmod(0o777)
    environment = {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "XDG_STATE_HOME": str(folder / "state"),
        "HF_HOME": str(folder / "hub"),
        "HF_TOKEN": "",
        "TMPDIR": str(folder / "tmp"),
        "PATH": str(folder / "bin"),
    }
    for name, value in environment.items():
        patch.setenv(name, value)
    for name in ("http_proxy", "all_proxy", "no_proxy"):
        patch.delenv(name, raising=False)
        patch.delenv(name.upper(), raising=False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT", "HF_HUB_CACHE"):
        patch.delenv(name, raising=False)
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.setattr("tempfile.tempdir", str(folder / "tmp"))

    really_planned = engine.planned

    def planned(variant: EngineVariant) -> Engine:
        root = folder / "engine"
        return replace(
            really_planned(variant),
            root=root,
            python=folder / "bin" / "engine-python",
            vllm=root / "vllm",
            router=root / "vllm-router",
        )

    patch.setattr(engine, "planned", planned)
    patch.setattr(engine, "is_ready", lambda _: True)
    loaded = series.load()
    for module in (engine, examination):
        patch.setattr(module, "load_series", lambda: loaded)
    memory = SimpleNamespace(total=2048 * GIB, available=2000 * GIB)
    patch.setattr(machine.psutil, "virtual_memory", lambda: memory)
    patch.setattr(machine, "_clock_is_synchronised", lambda: True)
    patch.setattr(hosts, "cores", lambda: tuple(range(192)))
    patch.setattr(hosts, "local_addresses", lambda: frozenset({"127.0.0.1", HERE}))
    patch.setattr(network, "tried", lambda host, port, timeout_s: "refused")
    really = hosts.why_not_free
    patch.setattr(
        hosts, "why_not_free", lambda host, port: None if host == HERE else really(host, port)
    )
    return patient
