"""Judges the machine itself: interpreter, space, memory, limits, clock. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from pdlaunch.doctor.facts import Deployment, Facts, Folder
from pdlaunch.doctor.findings import Finding, error, not_checked, ok, size, warning
from pdlaunch.planner import DEFAULT_CPU_KV_CACHE_GIB
from pdlaunch.recipe_checks import workers_per_engine
from pdlaunch.upstream import Variant

# What building an engine takes, downloads included. Of cpu 5 GB were measured; CUDA's libraries
# alone are about twice as large.
ENGINE_BYTES: dict[Variant, int] = {"cpu": 5 * 10**9, "cuda": 10 * 10**9}
LITTLE_SPACE_BYTES = 2**30
_FULL_SHM_BYTES = 16 * 2**20
_SMALL_SHM_BYTES = 2**30
_FEW_FILES = 4096
_CUDA_WORKER_BYTES = 2 * 2**30
_LARGEST_SKEW_S = 30.0


def python(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """The interpreter, and whether it can install and run the engine."""
    machine, engine = facts.machine, facts.engine
    seen = f"Python {machine.python} on {machine.architecture}"
    tags: frozenset[Tag] = frozenset()
    if engine.published_wheel is not None:
        _, _, _, tags = parse_wheel_filename(engine.published_wheel)
    if engine.is_ready:
        yield ok("python", seen)
    elif _builds_engine(facts, deployment) and not {str(tag) for tag in tags} & machine.wheel_tags:
        wheel = engine.published_wheel or f"vLLM's {engine.variant} build: there is none"
        yield error(
            "python",
            f"{seen} cannot install {wheel}",
            "use CPython 3.11 or later on Linux with glibc 2.28 or later, on an architecture that "
            "patches/UPSTREAM names",
        )
    elif not machine.can_make_environments:
        yield error(
            "python",
            f"{seen} has no venv module, and the engine is not built yet",
            "install it (Debian: apt install python3-venv)",
        )
    else:
        yield ok("python", seen)


def engine(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Whether the engine environment is there."""
    found = facts.engine
    if found.is_ready:
        yield ok("engine", f"the {found.variant} engine is in {found.root}")
    elif not _builds_engine(facts, deployment):
        yield ok("engine", "none is needed: none of the recipe's engines starts here")
    else:
        yield not_checked(
            "engine",
            f"the {found.variant} engine is not built yet; up builds it, which takes minutes",
            f"to have it checked, build it first: pdlaunch engine build {found.variant}",
        )


def folders(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Whether what has to be written can be, and whether there is room for it."""
    uses_hub = facts.model is not None and facts.model.is_hub_model
    for folder in facts.machine.folders:
        if folder.variable == "HF_HOME" and not uses_hub:
            continue
        builds_here = folder.variable == "XDG_CACHE_HOME" and _builds_engine(facts, deployment)
        yield _folder(folder, ENGINE_BYTES[facts.engine.variant] if builds_here else 0)


def _builds_engine(facts: Facts, deployment: Deployment | None) -> bool:
    """Whether `up` would build the engine first."""
    is_needed = deployment is None or bool(deployment.engines_here)
    return is_needed and not facts.engine.is_ready


def _folder(folder: Folder, engine_bytes: int) -> Finding:
    elsewhere = f"point {folder.variable} to a folder on another disk"
    if folder.problem is not None:
        return error(
            "disk",
            f"{folder.purpose} ({folder.path}) cannot be written: {folder.problem}",
            f"make room and let this user write there, or {elsewhere}",
        )
    if folder.free_bytes is None:
        return not_checked("disk", f"{folder.purpose}: nothing tells the space in {folder.path}")
    seen = f"{folder.purpose}: {size(folder.free_bytes)} free in {folder.path}"
    if folder.free_bytes < engine_bytes:
        return error(
            "disk",
            f"{seen}, and building the engine takes {size(engine_bytes)}",
            f"make room there, or {elsewhere}",
        )
    if folder.free_bytes < LITTLE_SPACE_BYTES:
        return warning("disk", seen, f"make room there, or {elsewhere}")
    return ok("disk", seen)


def cores(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Cores for the workers of CPU engines, and what they can compute."""
    machine = facts.machine
    quota = machine.cpu_quota_cores
    seen = f"{len(machine.cores)} cores may be used"
    if quota is not None:
        seen += f", {quota:g} cores' worth of time"
    if facts.engine.variant != "cpu":
        yield ok("cores", seen)
        return
    if machine.architecture == "x86_64" and machine.cpu_flags and "avx2" not in machine.cpu_flags:
        yield error(
            "cores",
            "the processor has no AVX2, which the CPU engine's kernels need",
            "use a machine with AVX2 (any x86-64 server of the last ten years)",
        )
    workers = 0
    if deployment is not None:
        workers = sum(
            deployment.count_here(role) * workers_per_engine(deployment.recipe.role(role))
            for role in deployment.roles_here
        )
    less = "lower replicas or tensor_parallel, or give the engines more cores"
    notes = deployment.notes if deployment is not None else ()
    yield from (warning("cores", note, less) for note in notes)
    if quota is not None and quota < workers <= len(machine.cores):
        yield warning("cores", f"{seen}, and {workers} engine workers share it", less)
    else:
        yield ok("cores", seen)


def memory(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Memory for what the engines here keep in it."""
    machine = facts.machine
    seen = f"{size(machine.memory_available_bytes)} of {size(machine.memory_total_bytes)} available"
    if deployment is None or not deployment.engines_here:
        yield ok("memory", seen)
        return
    needed = 0.0
    for role in deployment.roles_here:
        section = deployment.recipe.role(role)
        workers = workers_per_engine(section)
        each = workers * _CUDA_WORKER_BYTES
        if facts.engine.variant == "cpu":
            each = workers * int((section.kv_cache_gib or DEFAULT_CPU_KV_CACHE_GIB) * 2**30)
            each += facts.weights_bytes or 0
        needed += deployment.count_here(role) * each
    what = "the engines"
    if facts.engine.variant == "cpu":
        what = "KV caches and weights" if facts.weights_bytes else "KV caches without the weights"
    less = "lower kv_cache_gib or replicas" if facts.engine.variant == "cpu" else "lower replicas"
    if facts.engine.variant == "cpu" and needed > machine.memory_total_bytes:
        yield error(
            "memory",
            f"{what} take {size(needed)}, and there are {size(machine.memory_total_bytes)}",
            f"{less}, or use a machine (or a container limit) with more memory",
        )
    elif needed > machine.memory_available_bytes and not deployment.up:
        yield warning(
            "memory",
            f"{what} take {size(needed)}; {seen}",
            f"end what else uses memory, or {less}",
        )
    else:
        yield ok("memory", f"{seen}; {what} take {size(needed)}")


def shared_memory(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Shared memory, through which the workers of an engine talk."""
    total, free = facts.machine.shm_total_bytes, facts.machine.shm_free_bytes
    larger = "give the container more: --shm-size 32g (Kubernetes: an emptyDir of medium Memory)"
    if total is None or free is None:
        yield error("shared-memory", "there is no /dev/shm", f"mount a tmpfs there; {larger}")
        return
    seen = f"{size(free)} of {size(total)} free in /dev/shm"
    workers = 1
    if deployment is not None:
        workers = max(
            (workers_per_engine(deployment.recipe.role(role)) for role in deployment.roles_here),
            default=1,
        )
    if free < _FULL_SHM_BYTES:
        yield error(
            "shared-memory", f"{seen}: it is full", f"delete what nobody uses there, or {larger}"
        )
    elif workers > 1 and total < _SMALL_SHM_BYTES:
        yield warning("shared-memory", f"{seen}, for engines of {workers} workers", larger)
    else:
        yield ok("shared-memory", seen)


def open_files(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """The limit on open files: every client and every peer takes some."""
    hard = facts.machine.limits.open_files_hard
    seen = "no limit on open files" if hard is None else f"at most {hard} open files a process"
    if hard is not None and hard < _FEW_FILES:
        yield warning(
            "open-files",
            seen,
            "raise the hard limit to 65536: ulimit -Hn, /etc/security/limits.conf, or "
            "--ulimit nofile=65536 of the container",
        )
    else:
        yield ok("open-files", seen)


def clock(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Clocks: logs of several hosts, certificates and tokens depend on them."""
    hub = facts.model.hub if facts.model is not None else None
    skew_s = hub.clock_skew_s if hub is not None else None
    synchronise = "run a time service (chrony, systemd-timesyncd) on every host"
    if skew_s is not None and abs(skew_s) > _LARGEST_SKEW_S:
        way = "behind" if skew_s > 0 else "ahead of"
        yield warning("clock", f"this clock is {abs(skew_s):.0f} s {way} the hub's", synchronise)
    elif deployment is None or not deployment.is_spread:
        return
    elif facts.machine.clock_is_synchronised is None:
        yield not_checked("clock", "the kernel does not tell whether its clock is synchronised")
    elif not facts.machine.clock_is_synchronised:
        yield warning(
            "clock",
            "this machine's clock is not synchronised: logs of two hosts will not fit together",
            synchronise,
        )
    else:
        yield ok("clock", "the kernel says that its clock is synchronised")
