"""Reads facts about this machine, from its files, limits and tools. Judges nothing."""

from __future__ import annotations

import csv
import ctypes
import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil
from packaging.tags import sys_tags

from pdlaunch import hosts, model_shape, upstream
from pdlaunch.doctor.facts import Fabric, Folder, Gpu, Gpus, Limits, Machine
from pdlaunch.paths import cache_dir, state_dir
from pdlaunch.planner import EFA_LIBRARIES, ENGINES_ONLY_ENV

_AMAZON = "0x1d0f"
_CAP_IPC_LOCK = 14
_TOOL_TIMEOUT_S = 30.0
_TOOL_FIELDS = ("index", "uuid", "name", "driver_version", "memory.total", "memory.free")
# Enough for the kernel's struct timex, whatever its padding.
_TIMEX_BYTES = 512
_CLOCK_IS_UNSYNCHRONISED = 5


def read(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    """The machine as this process sees it.

    Args:
        root: where /proc, /sys, /dev and /opt are; another folder than / for tests.
        environ: the environment that the processes would inherit.
    """
    memory = psutil.virtual_memory()
    limit, used = _container_memory(root)
    total = min(memory.total, limit or memory.total)
    available = min(memory.available, total - used if limit else memory.available)
    shm = _usage(root / "dev/shm")
    return Machine(
        python=platform.python_version(),
        architecture=upstream.machine(),
        wheel_tags=frozenset(str(tag) for tag in sys_tags()),
        can_make_environments=bool(importlib.util.find_spec("ensurepip")),
        cores=hosts.cores(),
        cpu_quota_cores=_cpu_quota(root),
        cpu_flags=_cpu_flags(root),
        memory_total_bytes=total,
        memory_available_bytes=max(0, available),
        shm_total_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else None,
        folders=folders(environ),
        limits=limits(root),
        gpus=gpus(root, environ),
        fabric=fabric(root),
        ephemeral_ports=_ephemeral_ports(root),
        clock_is_synchronised=_clock_is_synchronised(),
        proxy=_lower_first(environ, "http_proxy") or _lower_first(environ, "all_proxy"),
        no_proxy=_lower_first(environ, "no_proxy"),
        has_side_channel_secret=any(environ.get(name) for name in ENGINES_ONLY_ENV),
    )


def folders(environ: Mapping[str, str] = os.environ) -> tuple[Folder, ...]:
    """The folders that pdlaunch and the engines write to."""
    return (
        _folder("engines and models", cache_dir(), "XDG_CACHE_HOME"),
        _folder("records and logs", state_dir(), "XDG_STATE_HOME"),
        _folder("temporary files", Path(tempfile.gettempdir()), "TMPDIR"),
        _folder("models of the hub", model_shape.hub_cache(environ), "HF_HOME"),
    )


def limits(root: Path = Path("/")) -> Limits:
    """The limits that the engines inherit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", _text(root / "proc/self/status"), re.MULTILINE)
    capabilities = int(found.group(1), 16) if found else 0
    return Limits(
        locked_bytes=_limit(soft),
        locked_hard_bytes=_limit(hard),
        may_lock_all=bool(capabilities >> _CAP_IPC_LOCK & 1),
        open_files_hard=_limit(files),
    )


def gpus(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Gpus:
    """The devices that the driver's tool lists."""
    nodes = tuple(
        node.name for node in _entries(root / "dev") if re.fullmatch(r"nvidia\d+|dxg", node.name)
    )
    devices, problem = _listed_gpus(environ)
    return Gpus(devices, problem, nodes)


def _listed_gpus(environ: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str | None]:
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return (), "there is no nvidia-smi on the path"
    command = [program, f"--query-gpu={','.join(_TOOL_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi does not end within {_TOOL_TIMEOUT_S:.0f} s"
    except OSError as error:
        return (), f"nvidia-smi cannot be run: {error.strerror or error}"
    if listed.returncode:
        said = (listed.stdout + listed.stderr).strip().splitlines()
        return (), f"nvidia-smi: {said[0] if said else f'code {listed.returncode}'}"
    rows = csv.reader(listed.stdout.splitlines(), skipinitialspace=True)
    return tuple(gpu for row in rows if (gpu := _gpu(row)) is not None), None


def fabric(root: Path = Path("/")) -> Fabric:
    """RDMA devices of the kernel, and their nodes."""
    efa: list[str] = []
    other: list[str] = []
    for device in _entries(root / "sys/class/infiniband"):
        is_efa = _text(device / "device/vendor").strip() == _AMAZON
        (efa if is_efa else other).append(device.name)
    nodes = [node for node in _entries(root / "dev/infiniband") if node.name.startswith("uverbs")]
    opens = {node.name: os.access(node, os.R_OK | os.W_OK) for node in nodes}
    pages = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    libfabric = root / EFA_LIBRARIES.lstrip("/") / "libfabric.so.1"
    return Fabric(
        efa=tuple(efa),
        other_rdma=tuple(other),
        nodes=tuple(name for name, may_open in opens.items() if may_open),
        closed_nodes=tuple(name for name, may_open in opens.items() if not may_open),
        has_efa_libfabric=libfabric.exists(),
        huge_pages_total=_number(pages / "nr_hugepages") or 0,
        huge_pages_free=_number(pages / "free_hugepages") or 0,
    )


def _folder(purpose: str, path: Path, variable: str) -> Folder:
    """Looks at the nearest part of a path that exists: nothing is made here."""
    there = path
    while not _exists(there) and there != there.parent:
        there = there.parent
    problem = None
    try:
        if there.is_dir():
            # Permissions alone do not tell of read-only and full file systems.
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(b"\0" * 4096)
                file.flush()
        else:
            problem = f"{there} is no folder"
    except OSError as error:
        problem = f"{there}: {error.strerror or error}"
    usage = _usage(there)
    return Folder(
        purpose=purpose,
        path=str(path),
        free_bytes=usage.free if usage else None,
        problem=problem,
        variable=variable,
    )


def _exists(path: Path) -> bool:
    """Whether it is there, or may be: a folder above may keep that from us."""
    try:
        return path.exists()
    except PermissionError:
        return True


def _usage(path: Path) -> shutil._ntuple_diskusage | None:
    try:
        return shutil.disk_usage(path)
    except OSError:
        return None


def _gpu(row: Iterable[str]) -> Gpu | None:
    try:
        index, uuid, name, driver, total_mib, free_mib = row
        return Gpu(index, uuid, name, driver, int(total_mib) * 2**20, int(free_mib) * 2**20)
    except ValueError:
        return None


def _container_memory(root: Path) -> tuple[int | None, int]:
    """Limit and use of a container's memory in bytes, where a control group sets one."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        folder = root / "sys/fs/cgroup"
        bound = _number(folder / limit)
        if bound is not None:
            # What the kernel would give back at once is not in use.
            stat = _text((folder / used).with_name("memory.stat"))
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
            in_use = (_number(folder / used) or 0) - int(cached.group(1) if cached else 0)
            return bound, max(0, in_use)
    return None, 0


def _cpu_quota(root: Path) -> float | None:
    folder = root / "sys/fs/cgroup"
    words = _text(folder / "cpu.max").split()
    if not words:
        quota = _number(folder / "cpu/cpu.cfs_quota_us")
        period = _number(folder / "cpu/cpu.cfs_period_us")
        return quota / period if quota and quota > 0 and period else None
    return int(words[0]) / int(words[1]) if words[0] != "max" else None


def _cpu_flags(root: Path) -> frozenset[str]:
    found = re.search(r"^(?:flags|Features)\s*: (.*)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def _ephemeral_ports(root: Path) -> tuple[int, int] | None:
    words = _text(root / "proc/sys/net/ipv4/ip_local_port_range").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else None


def _clock_is_synchronised() -> bool | None:
    """What the kernel's clock says of itself, without changing anything."""
    try:
        state = int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != _CLOCK_IS_UNSYNCHRONISED


def _lower_first(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.upper(), "")


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None
