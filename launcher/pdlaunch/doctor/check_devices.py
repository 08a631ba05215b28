"""Judges GPUs, the fabric and NIXL. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.version import InvalidVersion, Version

from pdlaunch.doctor.facts import Deployment, Facts, Gpu, NixlProbe
from pdlaunch.doctor.findings import Finding, error, not_checked, ok, size, warning
from pdlaunch.doctor.kv import DEFAULT_GPU_FRACTION
from pdlaunch.engine_scripts import verify_image
from pdlaunch.planner import EFA_LIBRARIES
from pdlaunch.recipe_checks import Role

# The first drivers that run programs of a CUDA major.
FIRST_DRIVER: Mapping[int, int] = {12: 525, 13: 580}
# Earlier ones could hang on small WRITEs over EFA.
FIRST_NIXL_FOR_EFA = Version("1.3.1")
_LITTLE_LOCKED_BYTES = 2**30
# nvidia-smi counts a little more, or less, than CUDA offers.
_TOOL_ACCURACY = 0.98
_DEVICES = "--gpus all (docker), or the resource nvidia.com/gpu (Kubernetes)"


def gpus(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Devices and driver, and memory that others left on them."""
    if facts.engine.variant != "cuda" or _nothing_here(deployment):
        return
    found = facts.machine.gpus
    if found.problem is not None and found.nodes and "nvidia-smi:" not in found.problem:
        yield not_checked(
            "gpus",
            f"{found.problem}, and there are {', '.join(found.nodes)} in /dev",
            "have nvidia-smi in the container: NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
        yield from _driver(facts, None)
        return
    if found.problem is not None or not found.devices:
        yield error(
            "gpus",
            found.problem or "nvidia-smi lists no device",
            "install NVIDIA's driver and reboot where it says that versions do not match; in a "
            f"container: {_DEVICES}"
            + ("; without a GPU: --set engine.variant=cpu" if deployment is not None else ""),
        )
        return
    kinds = sorted({f"{gpu.name} ({size(gpu.total_bytes)})" for gpu in found.devices})
    driver = found.devices[0].driver
    yield ok("gpus", f"{len(found.devices)} devices: {', '.join(kinds)}, driver {driver}")
    yield from _driver(facts, driver)
    if deployment is not None and not deployment.up:
        yield from _device_memory(found.devices, deployment)


def _driver(facts: Facts, driver: str | None) -> Iterator[Finding]:
    """Whether the engine's CUDA computes with this driver: tried, not looked up."""
    probe = next((probe for probe in facts.engine.probes if probe.cuda), None)
    if probe is None or probe.cuda is None:
        return
    seen = f"driver {driver or '(version unknown)'} and CUDA {probe.cuda}"
    if probe.cuda_problem is None:
        yield ok("driver", f"{seen}: torch computes on a device")
        return
    first = FIRST_DRIVER.get(int(probe.cuda.partition(".")[0]))
    major = (driver or "").partition(".")[0]
    remedy = "see that nvidia-smi and the container's devices work, then that torch does"
    if first is not None and major.isdigit() and int(major) < first:
        seen += f", which needs driver {first} or later"
        remedy = f"install driver {first} or later, or CUDA's forward compatibility package"
    yield error("driver", f"{seen}: torch cannot compute: {probe.cuda_problem}", remedy)


def _device_memory(devices: tuple[Gpu, ...], deployment: Deployment) -> Iterator[Finding]:
    # Engines may share a device; the next one finds what the one before has left.
    free_bytes = {gpu.index: gpu.free_bytes for gpu in devices}
    for process in deployment.engines_here:
        role: Role = "prefill" if process.role == "prefill" else "decode"
        section = deployment.recipe.role(role)
        # vLLM wants the share to be free even where the cache has a fixed size.
        fraction = section.gpu_memory_fraction or DEFAULT_GPU_FRACTION
        names = deployment.environments[process.name].get("CUDA_VISIBLE_DEVICES", "")
        for name in filter(None, names.split(",")):
            if name.startswith("MIG-"):
                continue
            gpu = named(devices, name)
            if gpu is None:
                yield error(
                    "gpus",
                    f"{process.name} is given device {name}, and there are "
                    f"{', '.join(each.index for each in devices)}",
                    f"set {role}.devices to devices that are there",
                    where=f"{role}.devices",
                )
                continue
            wanted = int(gpu.total_bytes * fraction)
            free = free_bytes[gpu.index]
            free_bytes[gpu.index] = max(0, free - wanted)
            if free < wanted * _TOOL_ACCURACY:
                yield error(
                    "gpu-memory",
                    f"{process.name} wants {size(wanted)} of device {gpu.index}, and "
                    f"{size(free)} of {size(gpu.total_bytes)} are free",
                    "end what else uses the device (nvidia-smi names the processes), lower "
                    f"{role}.gpu_memory_fraction, or name another device in {role}.devices",
                    where=f"{role}.gpu_memory_fraction",
                )


def named(devices: tuple[Gpu, ...], name: str) -> Gpu | None:
    """The device that a name in CUDA_VISIBLE_DEVICES means: an index, or the start of a UUID."""
    for gpu in devices:
        if name == gpu.index or (not name.isdigit() and gpu.uuid.startswith(name)):
            return gpu
    return None


def efa(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """EFA interfaces against the recipe, and what EFA needs of the host."""
    found = facts.machine.fabric
    if deployment is None:
        if found.efa:
            yield ok("efa", f"{len(found.efa)} EFA interfaces: {', '.join(found.efa)}")
        return
    wanted = sum(
        deployment.count_here(role) * deployment.recipe.role(role).efa_interfaces
        for role in deployment.roles_here
    )
    if not wanted:
        yield from _unused_fabric(facts, deployment)
        return
    if len(found.efa) < wanted:
        yield error(
            "efa",
            f"the recipe wants {wanted} EFA interfaces here, and the kernel has {len(found.efa)}",
            "attach them when the instance is launched and load the efa module (modprobe efa); "
            "Kubernetes: vpc.amazonaws.com/efa; or lower efa_interfaces",
            where=f"{deployment.roles_here[0]}.efa_interfaces",
        )
    else:
        yield ok("efa", f"{len(found.efa)} EFA interfaces, the recipe wants {wanted} here")
    yield from _nodes(facts, wanted)
    yield from _locked_memory(facts, "EFA")
    yield from _huge_pages(facts, deployment)
    if found.has_efa_libfabric:
        yield ok("efa-libraries", f"libfabric is in {EFA_LIBRARIES}")
    else:
        yield error(
            "efa-libraries",
            f"there is no libfabric.so.1 in {EFA_LIBRARIES}",
            "install EFA's libraries: efa_installer.sh 1.47 or later, with "
            "-y --skip-kmod --skip-limit-conf --no-verify in a container",
        )


def _nodes(facts: Facts, wanted: int) -> Iterator[Finding]:
    found = facts.machine.fabric
    if found.closed_nodes:
        yield error(
            "infiniband",
            f"/dev/infiniband/{found.closed_nodes[0]} must not be opened by this user",
            "let the user read and write it (udev rule or group), or run the container with it",
        )
    elif len(found.nodes) < min(wanted, len(found.efa) or wanted):
        seen = f"{len(found.nodes)} of {wanted} nodes" if found.nodes else "nothing"
        yield error(
            "infiniband",
            f"{seen} in /dev/infiniband: EFA cannot be opened from here",
            "pass it into the container: --device /dev/infiniband (Kubernetes: "
            "vpc.amazonaws.com/efa); on a host: modprobe ib_uverbs",
        )
    else:
        yield ok("infiniband", f"{len(found.nodes)} nodes in /dev/infiniband")


def _locked_memory(facts: Facts, what: str) -> Iterator[Finding]:
    limits = facts.machine.limits
    if limits.locked_bytes is None:
        yield ok("memlock", "no limit on locked memory")
        return
    if limits.may_lock_all:
        yield ok("memlock", "this process may lock all memory (CAP_IPC_LOCK)")
        return
    raised = limits.locked_hard_bytes is None
    remedy = (
        "raise it before pdlaunch: ulimit -l unlimited"
        if raised
        else "set memlock to unlimited for this user in /etc/security/limits.conf and log in "
        "again; containers: --ulimit memlock=-1, Kubernetes: the capability IPC_LOCK"
    )
    seen = (
        f"at most {size(limits.locked_bytes)} of memory may be locked, and {what} locks what it "
        "moves"
    )
    # Where UCX cannot lock, it takes TCP.
    if what == "EFA" and limits.locked_bytes < _LITTLE_LOCKED_BYTES:
        yield error("memlock", seen, remedy)
    else:
        yield warning("memlock", seen, remedy)


def _huge_pages(facts: Facts, deployment: Deployment) -> Iterator[Finding]:
    asked = any(
        environment.get("FI_EFA_USE_HUGE_PAGE") == "1"
        for environment in deployment.environments.values()
    )
    found = facts.machine.fabric
    seen = f"{found.huge_pages_free} of {found.huge_pages_total} huge pages of 2 MiB are free"
    if asked and not found.huge_pages_free:
        yield warning(
            "huge-pages",
            f"{seen}, and FI_EFA_USE_HUGE_PAGE asks for them: memory is registered more slowly",
            "reserve some: sysctl -w vm.nr_hugepages=5128 (Kubernetes: hugepages-2Mi), or take "
            "FI_EFA_USE_HUGE_PAGE out of the recipe",
        )
    elif asked:
        yield ok("huge-pages", seen)


def _unused_fabric(facts: Facts, deployment: Deployment) -> Iterator[Finding]:
    """Fast interfaces that a deployment over several hosts would leave idle."""
    found = facts.machine.fabric
    if not deployment.is_spread or _nothing_here(deployment):
        return
    if found.efa and "LIBFABRIC" not in (deployment.recipe.transfer.backends or ()):
        yield warning(
            "efa",
            f"this machine has {len(found.efa)} EFA interfaces, and the recipe uses none: KV "
            "would go over TCP",
            "set prefill.efa_interfaces, decode.efa_interfaces and transfer.backends [LIBFABRIC]",
        )
    elif found.other_rdma and not found.nodes:
        yield warning(
            "infiniband",
            f"the kernel has {', '.join(found.other_rdma)}, and /dev/infiniband is not here: UCX "
            "would use TCP",
            "pass it into the container: --device /dev/infiniband",
        )
    elif found.other_rdma:
        yield from _locked_memory(facts, "RDMA")
    elif not found.efa:
        yield ok("fabric", "no RDMA device here: KV goes over TCP")


def nixl(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """NIXL's build against CUDA's, and whether its backends instantiate."""
    for probe in facts.engine.probes:
        repair = f"pdlaunch engine repair {facts.engine.variant}"
        if not probe.builds and probe.torch is None and probe.problem is not None:
            yield error("nixl", f"the engine's Python: {probe.problem}", repair)
            continue
        yield from _builds(probe, repair)
        yield from _version(probe, repair)
        for backend in probe.wanted:
            yield _backend(probe, backend, repair)
        if probe.problem is not None and not probe.backends:
            yield error("nixl", f"{probe.process}: {probe.problem}", repair)


def _builds(probe: NixlProbe, repair: str) -> Iterator[Finding]:
    major = probe.cuda.partition(".")[0] if probe.cuda else None
    problems = list(verify_image.nixl_problems(major, list(probe.builds)))
    for problem in problems:
        keep = f"keep nixl-cu{major or 12} alone; {repair} installs it so"
        yield error("nixl-build", problem, keep)
    if not problems:
        built = f"CUDA {probe.cuda}" if probe.cuda else "no CUDA"
        yield ok("nixl-build", f"NIXL {probe.nixl} ({probe.builds[0]}), torch built for {built}")


def _version(probe: NixlProbe, repair: str) -> Iterator[Finding]:
    if "LIBFABRIC" not in probe.wanted or probe.nixl is None:
        return
    try:
        old = Version(probe.nixl) < FIRST_NIXL_FOR_EFA
    except InvalidVersion:
        return
    if old:
        yield error(
            "nixl-build",
            f"NIXL {probe.nixl} can hang on small WRITEs over EFA",
            f"use {FIRST_NIXL_FOR_EFA} or later; {repair} installs a later one",
        )


def _backend(probe: NixlProbe, backend: str, repair: str) -> Finding:
    where = "transfer.backends"
    if backend not in probe.backends:
        return not_checked("nixl-backend", f"{probe.process}: {backend} was not tried", repair)
    failure = probe.backends[backend]
    if failure is None:
        return ok("nixl-backend", f"{probe.process}: {backend} instantiates")
    reasons: list[str] = []
    remedy = "compare the environment that pdlaunch up --dry-run prints with what the backend needs"
    if probe.plugins and backend not in probe.plugins:
        remedy = (
            f"NIXL knows {', '.join(probe.plugins)} here: name one of them in transfer.backends, "
            "or set NIXL_PLUGIN_DIR to the folder of the plugin"
        )
    if backend == "LIBFABRIC":
        _, reasons = verify_image.plugin_libraries(probe.fabric_libraries, probe.loaded)
        remedy = (
            "install EFA's libraries (efa_installer.sh 1.47 or later), the driver of the GPU and "
            f"libhwloc15, and put {EFA_LIBRARIES} first in LD_LIBRARY_PATH; without EFA, set "
            "transfer.backends to [UCX]"
        )
    evidence = "; ".join([f"{probe.process}: {backend} does not instantiate: {failure}", *reasons])
    return error("nixl-backend", evidence, remedy, where=where)


def _nothing_here(deployment: Deployment | None) -> bool:
    return deployment is not None and not deployment.engines_here
