"""`pdlaunch doctor` finds each planted fault, names its remedy, and raises no other alarm."""

from __future__ import annotations

import functools
import json
import os
import resource
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from packaging.tags import Tag

from launching import Launcher
from patient import (
    CPU_RECIPE,
    GIB,
    THERE,
    Patient,
    become_nobody,
    in_child,
    small_file_system,
    sound,
)
from pdlaunch import engine, hosts, recipe_loader, upstream
from pdlaunch.doctor import examination, kv, machine, network
from pdlaunch.doctor.findings import State
from pdlaunch.paths import recipes_dir
from pdlaunch.recipe import Recipe


@dataclass(frozen=True)
class Fault:
    """Something to plant, and what the doctor should say of it."""

    plant: Callable[[Patient, pytest.MonkeyPatch], None]
    check: str
    state: State
    evidence: str
    remedy: str
    # Whether planting it mounts a small file system.
    mounts: bool


REALLY_TRIED = network.tried
FAULTS: list[Fault] = []


def fault(
    check: str, state: State, evidence: str, remedy: str, *, mounts: bool = False
) -> Callable[[Callable[[Patient, pytest.MonkeyPatch], None]], None]:
    """Register a planted fault; the function's name is that of its test."""

    def register(plant: Callable[[Patient, pytest.MonkeyPatch], None]) -> None:
        FAULTS.append(Fault(plant, check, state, evidence, remedy, mounts))

    return register


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Patient]:
    # Folders of pytest are their owner's alone, and some examinations are by another user.
    with TemporaryDirectory(prefix="pdlaunch-patient-") as folder:
        made = sound(Path(folder), monkeypatch)
        with made.open:
            yield made


# The model


@fault("recipe", "error", "4 does not divide the 6 attention heads", "mend")
def heads_that_tensor_parallel_does_not_divide(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.config(num_attention_heads=6, num_key_value_heads=6)


@fault("shape", "error", "4 does not divide the 6 attention heads", "prefill.tensor_parallel")
def shape_in_the_recipe_that_is_not_the_models(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.config(num_attention_heads=6, num_key_value_heads=6)
    patient.set("model_shape", {"attention_heads": 64, "kv_heads": 8})


@fault("model", "error", "lacks model-00002-of-00002.safetensors", "copy it again")
def missing_shard(patient: Patient, _: pytest.MonkeyPatch) -> None:
    (patient.model / "model.safetensors").rename(patient.model / "model-00001-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = patient.model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))


@fault("model", "error", "is 1073741824 bytes long, and by its header 65498251264", "copy it again")
def weights_that_were_not_copied_to_their_end(patient: Patient, _: pytest.MonkeyPatch) -> None:
    os.truncate(patient.model / "model.safetensors", GIB)


@fault("model", "error", "holds no weights", "safetensors")
def no_weights(patient: Patient, _: pytest.MonkeyPatch) -> None:
    (patient.model / "model.safetensors").unlink()


@fault("model", "error", "must not be read", "chmod a+r")
def unreadable_weights(patient: Patient, _: pytest.MonkeyPatch) -> None:
    (patient.model / "model.safetensors").chmod(0)
    patient.before.append(become_nobody)


@fault("recipe", "error", "65536 tokens, and the limit of", "mend")
def longer_requests_than_the_model_can(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.set("max_model_len_tokens", 65536)


@fault("length", "error", "65536 tokens, and the limit of Org/Model is 40960", "40960 or less")
def longer_requests_than_the_hubs_model_can(patient: Patient, patch: pytest.MonkeyPatch) -> None:
    hub(patient, patch, 200, body=(patient.model / "config.json").read_bytes())
    patient.set("max_model_len_tokens", 65536)


@fault("kv-cache", "error", "one request may have 32768", "prefill.kv_cache_gib 2.0 at least")
def cache_smaller_than_a_request(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.set("prefill.kv_cache_gib", 1)


@fault("kv-cache", "error", "one request may have 32768", "prefill.gpu_memory_fraction")
def share_of_the_device_that_no_request_fits(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.set("prefill.gpu_memory_fraction", 0.01)
    patient.weights(GIB)


@fault("kv-cache", "warning", "one request may have 32768", "prefill.gpu_memory_fraction")
def memory_that_the_weights_fill(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.weights(502 * GIB)


@fault("kv-cache", "warning", "512 requests at once", "max-num-seqs to 196")
def more_requests_than_the_cache_holds(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.set("decode.kv_cache_gib", 98)
    patient.set("decode.args", {"max-num-seqs": 512})


@fault("block-size", "warning", "blocks of 16 tokens", "64 or 128")
def small_blocks(patient: Patient, _: pytest.MonkeyPatch) -> None:
    for role in ("prefill", "decode"):
        patient.set(f"{role}.block_size_tokens", 16)


@fault("model", "error", "the hub has no Org/Model", "spelling")
def model_that_the_hub_does_not_have(patient: Patient, patch: pytest.MonkeyPatch) -> None:
    hub(patient, patch, 404)


@fault("model", "error", "no model folder at /nowhere/acme", "copy the model there")
def model_that_is_elsewhere(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.set("model", "/nowhere/acme")
    patient.set("model_shape", {"attention_heads": 32, "kv_heads": 8})


@fault("model", "error", "refuses Org/Model with 401", "HF_TOKEN")
def gated_model(patient: Patient, patch: pytest.MonkeyPatch) -> None:
    hub(patient, patch, 401)


@fault("clock", "warning", "s behind the hub's", "time service")
def clock_that_is_an_hour_late(patient: Patient, patch: pytest.MonkeyPatch) -> None:
    hub(patient, patch, 200, date="Fri, 01 Jan 2100 00:00:00 GMT")


@fault("model", "error", "the hub does not answer", "HF_ENDPOINT")
def hub_out_of_reach(patient: Patient, patch: pytest.MonkeyPatch) -> None:
    patient.set("model", "Org/Model")
    patch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")


@fault("model", "error", "HF_HUB_OFFLINE", "hf download Org/Model")
def offline_without_the_model(patient: Patient, patch: pytest.MonkeyPatch) -> None:
    patient.set("model", "Org/Model")
    patch.setenv("HF_HUB_OFFLINE", "1")


# The machine


@fault("python", "error", "cannot install vllm-0.32.0", "glibc 2.28")
def interpreter_that_cannot_install_the_wheel(_: Patient, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "is_ready", lambda _: False)
    patch.setattr(machine, "sys_tags", lambda: [Tag("cp311", "cp311", "musllinux_1_2_x86_64")])


@fault("python", "error", "vLLM's cuda build: there is none", "architecture that")
def architecture_without_a_build(_: Patient, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "is_ready", lambda _: False)
    patch.setattr(upstream, "machine", lambda: "riscv64")


@fault("python", "error", "no venv module", "apt install python3-venv")
def python_without_venv(patient: Patient, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "is_ready", lambda _: False)
    patch.setattr(machine.importlib.util, "find_spec", lambda name: None)


@fault("disk", "error", "Permission denied", "XDG_CACHE_HOME")
def cache_that_must_not_be_written(patient: Patient, _: pytest.MonkeyPatch) -> None:
    (patient.folder / "cache").chmod(0o555)
    patient.before.append(become_nobody)


@fault("disk", "error", "cache/pdlaunch: Permission denied", "XDG_CACHE_HOME")
def cache_that_cannot_be_looked_into(patient: Patient, _: pytest.MonkeyPatch) -> None:
    (patient.folder / "cache").chmod(0)
    patient.before.append(become_nobody)


@fault("disk", "error", "No space left", "XDG_CACHE_HOME", mounts=True)
def full_disk(patient: Patient, _: pytest.MonkeyPatch) -> None:
    def fill() -> None:
        small_file_system(patient.folder / "cache", "64k")
        (patient.folder / "cache" / "full").write_bytes(b"\0" * 65536)

    patient.before.append(fill)


@fault("disk", "error", "building the engine takes", "make room", mounts=True)
def no_room_for_the_engine(patient: Patient, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "is_ready", lambda _: False)
    patient.before.append(lambda: small_file_system(patient.folder / "cache", "2g"))


@fault("shared-memory", "error", "it is full", "--shm-size", mounts=True)
def full_shared_memory(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.before.append(lambda: small_file_system(patient.root / "dev/shm", "8m"))


@fault("shared-memory", "warning", "engines of 4 workers", "--shm-size", mounts=True)
def shared_memory_as_docker_gives_it(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.before.append(lambda: small_file_system(patient.root / "dev/shm", "64m"))


@fault("open-files", "warning", "at most 1024 open files", "nofile=65536")
def few_open_files(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.before.append(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)))


@fault("memory", "error", "KV caches and weights take", "kv_cache_gib")
def container_too_small_for_the_caches(patient: Patient, _: pytest.MonkeyPatch) -> None:
    on_cpu(patient)
    patient.write("sys/fs/cgroup/memory.max", str(8 * GIB))
    patient.write("sys/fs/cgroup/memory.current", str(GIB))


@fault("memory", "warning", "available", "end what else uses memory")
def memory_that_others_use(patient: Patient, _: pytest.MonkeyPatch) -> None:
    on_cpu(patient)
    patient.write("sys/fs/cgroup/memory.max", str(16 * GIB))
    patient.write("sys/fs/cgroup/memory.current", str(12 * GIB))


@fault("cores", "warning", "1 cores' worth of time", "more cores")
def container_with_little_time(patient: Patient, _: pytest.MonkeyPatch) -> None:
    on_cpu(patient)
    patient.write("sys/fs/cgroup/cpu.max", "100000 100000\n")


@fault("cores", "warning", "2 engine workers share 1 cores", "replicas")
def fewer_cores_than_workers(patient: Patient, patch: pytest.MonkeyPatch) -> None:
    on_cpu(patient)
    patch.setattr(hosts, "cores", lambda: (0,))


@fault("cores", "error", "no AVX2", "AVX2")
def old_processor(patient: Patient, _: pytest.MonkeyPatch) -> None:
    on_cpu(patient)
    patient.write("proc/cpuinfo", "flags : fpu sse\n")


@fault("clock", "warning", "not synchronised", "chrony")
def clock_that_nobody_sets(_: Patient, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "_clock_is_synchronised", lambda: False)


# Devices and fabric


@fault("gpus", "error", "no nvidia-smi", "--set engine.variant=cpu")
def no_driver(patient: Patient, _: pytest.MonkeyPatch) -> None:
    (patient.folder / "bin/nvidia-smi").unlink()


@fault("gpus", "error", "Driver/library version mismatch", "reboot")
def driver_that_was_updated_under_the_kernel(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.tool("nvidia-smi", "echo 'Failed: Driver/library version mismatch'; exit 18")


@fault("recipe", "error", "prefill needs devices 2, 3", "prefill.devices")
def fewer_gpus_than_the_recipe_names(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.gpus(count=2)


@fault("gpu-memory", "error", "of device 0, and 39.1 GiB", "prefill.gpu_memory_fraction")
def gpu_that_others_use(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.gpus(free_mib=40000)


@fault("gpu-memory", "error", "decode-0 wants 70.2 GiB of device 0, and 27.5", "decode.gpu_memory")
def gpu_that_has_room_for_one_of_two_engines(patient: Patient, _: pytest.MonkeyPatch) -> None:
    share_gpus(patient)
    patient.gpus(free_mib=100000)


@fault("driver", "error", "needs driver 580 or later", "install driver 580")
def driver_older_than_cuda(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.gpus(driver="550.54.15")
    problem = "The NVIDIA driver on your system is too old (found version 12040)."
    patient.nixl(cuda="13.0", builds=["nixl-cu13"], cuda_problem=problem)


@fault("efa", "error", "wants 8 EFA interfaces here, and the kernel has 2", "when the instance is")
def too_few_efa_interfaces(patient: Patient, _: pytest.MonkeyPatch) -> None:
    for index in range(2, 16):
        patient.write(f"sys/class/infiniband/rdmap{index}/device/vendor", "0x15b3\n")


@fault("infiniband", "error", "nothing in /dev/infiniband", "--device /dev/infiniband")
def container_without_infiniband(patient: Patient, _: pytest.MonkeyPatch) -> None:
    for node in (patient.root / "dev/infiniband").iterdir():
        node.unlink()


@fault("infiniband", "error", "must not be opened", "let the user read and write it")
def infiniband_for_root_alone(patient: Patient, _: pytest.MonkeyPatch) -> None:
    for node in (patient.root / "dev/infiniband").iterdir():
        node.chmod(0)
    patient.before.append(become_nobody)


@fault("memlock", "error", "at most 64.0 KiB", "--ulimit memlock=-1")
def little_locked_memory(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.write("proc/self/status", "CapEff:\t0000000000000000\n")
    patient.before.append(lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)))


@fault("huge-pages", "warning", "0 of 0 huge pages", "vm.nr_hugepages")
def no_huge_pages(patient: Patient, _: pytest.MonkeyPatch) -> None:
    for name in ("nr_hugepages", "free_hugepages"):
        patient.write(f"sys/kernel/mm/hugepages/hugepages-2048kB/{name}", "0\n")


@fault("efa-libraries", "error", "no libfabric.so.1", "efa_installer.sh 1.47")
def no_efa_libraries(patient: Patient, _: pytest.MonkeyPatch) -> None:
    (patient.root / "opt/amazon/efa/lib/libfabric.so.1").unlink()


@fault("efa", "warning", "the recipe uses none", "transfer.backends [LIBFABRIC]")
def efa_that_the_recipe_leaves_idle(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.set("transfer.backends", ["UCX"])
    for role in ("prefill", "decode"):
        patient.set(f"{role}.efa_interfaces", 0)


@fault("infiniband", "warning", "UCX would use TCP", "--device /dev/infiniband")
def infiniband_that_the_container_lacks(patient: Patient, _: pytest.MonkeyPatch) -> None:
    on_infiniband(patient)
    for node in (patient.root / "dev/infiniband").iterdir():
        node.unlink()


@fault("memlock", "warning", "RDMA locks what it moves", "--ulimit memlock=-1")
def infiniband_with_little_locked_memory(patient: Patient, _: pytest.MonkeyPatch) -> None:
    on_infiniband(patient)
    patient.write("proc/self/status", "CapEff:\t0000000000000000\n")
    patient.before.append(lambda: resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)))


# NIXL


@fault("nixl-build", "error", "CUDA 12 and NIXL is nixl-cu13", "nixl-cu12 alone")
def nixl_for_another_cuda(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.nixl(builds=["nixl-cu13"])


@fault("nixl-build", "error", "found nixl-cu12, nixl-cu13", "nixl-cu12 alone")
def two_builds_of_nixl(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.nixl(builds=["nixl-cu12", "nixl-cu13"])


@fault("nixl-build", "error", "1.3.0 can hang", "1.3.1 or later")
def nixl_that_hangs_over_efa(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.nixl(nixl="1.3.0")


@fault("nixl-backend", "error", "needs libfabric.so.1, which is not found", "set transfer.backends")
def backend_without_its_library(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.nixl(
        {"LIBFABRIC": "NIXL_ERR_NOT_FOUND"}, fabric_libraries="libfabric.so.1 => not found"
    )


@fault("nixl-backend", "error", "MOONCAKE does not instantiate", "NIXL knows LIBFABRIC, UCX")
def backend_that_nixl_does_not_have(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.set("transfer.backends", ["LIBFABRIC", "MOONCAKE"])
    patient.nixl({"LIBFABRIC": None, "MOONCAKE": "NIXL_ERR_NOT_FOUND"})


@fault("nixl-backend", "error", "it crashed: SIGSEGV", "LD_LIBRARY_PATH")
def backend_that_crashes(patient: Patient, _: pytest.MonkeyPatch) -> None:
    good = {"torch": "2.13.0", "nixl": "1.5.1", "builds": ["nixl-cu12"], "cuda": "12.9"}
    lines = (json.dumps(good), json.dumps({"trying": "LIBFABRIC"}))
    patient.python("\n".join(f"echo '{line}'" for line in lines) + "\nkill -SEGV $$")


@fault("nixl-backend", "error", "it hung: no end within", "LD_LIBRARY_PATH")
def backend_that_hangs(patient: Patient, _: pytest.MonkeyPatch) -> None:
    good = {"torch": "2.13.0", "nixl": "1.5.1", "builds": ["nixl-cu12"], "cuda": "12.9"}
    lines = (json.dumps(good), json.dumps({"trying": "LIBFABRIC"}))
    patient.python("\n".join(f"echo '{line}'" for line in lines) + "\nexec /bin/sleep 600")
    patient.surroundings = replace(patient.surroundings, probe_timeout_s=3.0)


@fault("nixl", "error", "cannot be run", "pdlaunch engine repair cuda")
def engine_whose_python_is_gone(patient: Patient, _: pytest.MonkeyPatch) -> None:
    (patient.folder / "bin/engine-python").unlink()


@fault("nixl", "error", "No module named 'nixl'", "pdlaunch engine repair cuda")
def engine_without_nixl(patient: Patient, _: pytest.MonkeyPatch) -> None:
    said = json.dumps({"torch": "2.13.0", "nixl": "1.5.1", "builds": ["nixl-cu12"], "cuda": "12.9"})
    patient.python(
        f"echo '{said}'\necho \"ModuleNotFoundError: No module named 'nixl'\" >&2\nexit 1"
    )


# Hosts and ports


@fault("ports", "error", "is taken by process", "name another port")
def port_that_somebody_has(patient: Patient, _: pytest.MonkeyPatch) -> None:
    on_cpu(patient)
    patient.set("router.port", listening_port(patient))


@fault("ports", "warning", "lies in 32768-60999", "ip_local_reserved_ports=40001")
def port_of_outgoing_connections(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.set("prefill.port", 40001)


@fault("reachability", "error", "no answer within 3 s", "security group")
def closed_security_group(_: Patient, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(network, "tried", lambda host, port, timeout_s: "no answer within 3 s")


@fault("reachability", "error", "the name does not resolve", "check the address")
def host_that_does_not_exist(patient: Patient, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(network, "tried", REALLY_TRIED)
    patient.set("decode.host", "decode.invalid")


@fault("side-channel", "error", "127.0.1.1, which means another machine", "/etc/hosts")
def host_name_that_means_loopback(patient: Patient, patch: pytest.MonkeyPatch) -> None:
    patient.set("prefill.host", "examined-host")
    names = {"examined-host": "127.0.1.1"}
    patch.setattr(hosts, "_resolve", lambda host: names.get(host, host))


@fault("side-channel", "warning", "8.8.8.8 is a public address", "VLLM_NIXL_SIDE_CHANNEL_SECRET")
def public_address_without_a_secret(patient: Patient, _: pytest.MonkeyPatch) -> None:
    patient.set("decode.host", "8.8.8.8")


@fault(
    "proxy", "warning", f"{THERE} would go through the proxy http://proxy:3128", "export NO_PROXY="
)
def proxy_between_the_processes(_: Patient, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("http_proxy", "http://user:secret@proxy:3128")


@fault("placement", "warning", "no role of the recipe belongs", "--set prefill.host=ADDRESS")
def another_machines_recipe(_: Patient, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hosts, "local_addresses", lambda: frozenset({"127.0.0.1", "10.9.9.9"}))


def on_cpu(patient: Patient) -> None:
    """Two CPU engines on this machine, and a model that fits."""
    patient.recipe = json.loads(json.dumps(CPU_RECIPE))
    patient.weights(GIB)


def on_infiniband(patient: Patient) -> None:
    """Adapters that are not Amazon's, and UCX."""
    patient.set("transfer.backends", ["UCX"])
    for role in ("prefill", "decode"):
        patient.set(f"{role}.efa_interfaces", 0)
    for index in range(16):
        patient.write(f"sys/class/infiniband/rdmap{index}/device/vendor", "0x15b3\n")


def hub(
    patient: Patient,
    patch: pytest.MonkeyPatch,
    status: int,
    date: str | None = None,
    body: bytes = b"{}",
) -> None:
    """A hub that answers so, whatever it is asked."""
    patient.set("model", "Org/Model")

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return date or super().date_time_string(timestamp)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    patch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    patient.serve(server)


def listening_port(patient: Patient) -> int:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen()
    patient.open.callback(server.close)
    return int(server.getsockname()[1])


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def mounts_are_allowed(folder: Path) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            small_file_system(folder, "64k")
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.__name__)
def test_planted_fault_is_found_with_its_remedy_and_nothing_else(
    patient: Patient, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    if fault.mounts and not mounts_are_allowed(patient.folder / "tmp"):
        pytest.skip("mounting a file system is not allowed here")
    fault.plant(patient, monkeypatch)
    complaints = [each for each in patient.examine() if each.state in ("warning", "error")]
    assert {each.check for each in complaints} == {fault.check}, complaints
    told = [each for each in complaints if fault.evidence in each.evidence]
    assert told, complaints
    assert told[0].state == fault.state
    assert told[0].remedy is not None and fault.remedy in told[0].remedy
    assert not any("secret@" in each.evidence for each in complaints)


def share_gpus(patient: Patient) -> None:
    patient.set("decode.host", patient.recipe["prefill"]["host"])
    patient.set("decode.side_channel_port", 5700)
    for role in ("prefill", "decode"):
        patient.set(f"{role}.gpu_memory_fraction", 0.5)
        patient.set(f"{role}.kv_cache_gib", 30)


def test_many_faults_are_planted() -> None:
    assert len({fault.plant.__name__ for fault in FAULTS}) == len(FAULTS) > 50


def test_sound_machine_raises_no_alarm(patient: Patient) -> None:
    found = patient.examine()
    assert [each for each in found if each.state in ("warning", "error")] == []
    told = {each.check for each in found if each.state == "ok"}
    assert told >= {"gpus", "driver", "efa", "infiniband", "memlock", "huge-pages", "nixl-backend"}
    assert told >= {"side-channel", "ports", "reachability", "clock", "shape", "kv-cache"}


@pytest.mark.parametrize(("secret", "told"), [(None, "everybody else"), ("s" * 32, "need the")])
def test_it_is_said_whether_the_side_channel_needs_a_secret(
    patient: Patient, monkeypatch: pytest.MonkeyPatch, secret: str | None, told: str
) -> None:
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_SECRET", raising=False)
    if secret is not None:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_SECRET", secret)
    found = [each.evidence for each in patient.examine() if each.check == "side-channel"]
    assert found and all(told in each and "s" * 32 not in each for each in found)


def test_sound_cpu_machine_raises_no_alarm(patient: Patient) -> None:
    on_cpu(patient)
    assert patient.complaints() == {}


def test_gpus_that_prefill_and_decode_share_raise_no_alarm(patient: Patient) -> None:
    share_gpus(patient)
    assert not patient.complaints()


def test_sound_infiniband_raises_no_alarm(patient: Patient) -> None:
    on_infiniband(patient)
    assert patient.complaints() == {}


def test_containers_of_another_machine_without_ssh_are_nobodys(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for section in ("prefill", "decode", "router"):
        patient.set(f"{section}.host", THERE)
    patient.set("decode.side_channel_port", 5700)
    patient.set("decode.devices", [[4, 5, 6, 7]])
    patient.set("backend", "docker")
    monkeypatch.setattr(examination.backend, "image_labels", lambda endpoint, name: {})
    assert "placement" in patient.complaints()
    for section in ("prefill", "decode", "router"):
        patient.set(f"{section}.host", f"ssh://{THERE}")
    assert "placement" not in patient.complaints()


def test_a_connection_is_not_taken_for_an_answer(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "tried", lambda host, port, timeout_s: None)
    told = [each.evidence for each in patient.examine() if each.check == "reachability"]
    assert told and all("accepts TCP connections; who listens was not asked" in e for e in told)


def test_router_alone_needs_neither_devices_nor_engine_nor_the_model(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient.set("model", "Org/Model")
    patient.set("prefill.host", "10.0.0.13")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (patient.folder / "bin/nvidia-smi").unlink()
    for node in (patient.root / "dev/infiniband").iterdir():
        node.unlink()
    monkeypatch.setattr(engine, "is_ready", lambda _: False)
    monkeypatch.setattr(upstream, "machine", lambda: "riscv64")
    assert patient.complaints() == {}
    (found,) = (each for each in patient.examine() if each.check == "engine")
    assert found.state == "ok" and "none is needed" in found.evidence


def test_engine_without_the_drivers_tool_is_not_refused(patient: Patient) -> None:
    (patient.folder / "bin/nvidia-smi").unlink()
    patient.write("dev/nvidia0", "")
    assert patient.complaints() == {}
    (found,) = (each for each in patient.examine() if each.check == "gpus")
    assert found.state == "not checked" and "utility" in str(found.remedy)


def test_machine_alone_is_examined_without_a_recipe(patient: Patient) -> None:
    found = patient.examine(name_recipe=False)
    assert {each.state for each in found} == {"ok"}
    assert {"gpus", "efa", "nixl-backend"} <= {each.check for each in found}


def test_running_deployment_is_no_fault(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    patient.gpus(free_mib=500)
    patient.set("prefill.port", listening_port(patient))
    record = SimpleNamespace(supervisor=lambda: object())
    monkeypatch.setattr(
        examination.deployments, "read", lambda name: {"examined-prefill": record}.get(name)
    )
    found = patient.examine()
    assert {each.check for each in found if each.state in ("warning", "error")} == set()


def test_every_complaint_names_a_remedy_and_no_shipped_recipe_crashes_the_doctor(
    patient: Patient,
) -> None:
    for path in sorted(recipes_dir().glob("*.yaml")):
        found = in_child(
            functools.partial(examination.examine, path, surroundings=patient.surroundings), []
        )
        assert len(found) > 10
        for each in found:
            assert each.evidence
            assert each.remedy or each.state in ("ok", "not checked"), each


@pytest.mark.parametrize(
    ("recipe", "model", "tokens"),
    [("tiny-qwen3-cpu", "tiny-qwen3", 32_768), ("smollm2-135m-cpu", "smollm2", 23_296)],
)
def test_capacity_is_what_engines_log(
    patient: Patient, recipe: str, model: str, tokens: int
) -> None:
    """The figures are those of vLLM's line "KV cache size: ... tokens" for these recipes."""
    sizes = {
        "tiny-qwen3": {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 8},
        "smollm2": {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30},
    }
    loaded = recipe_loader.load(recipe_loader.find(recipe))
    patient.recipe = loaded.recipe.model_dump(mode="json") | {"model": "./model"}
    patient.config(**sizes[model], head_dim=128 if model == "tiny-qwen3" else 64)
    (evidence,) = [
        each.evidence
        for each in patient.examine()
        if each.check == "kv-cache" and each.evidence.startswith("prefill")
    ]
    assert f" hold {tokens} tokens" in evidence


def test_latent_attention_keeps_one_latent_on_every_rank() -> None:
    config = {
        "num_hidden_layers": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "dtype": "float32",
    }
    section = Recipe.model_validate(
        {"name": "a", "model": "Org/Model", "prefill": {"tensor_parallel": 2}}
    ).prefill
    assert kv.bytes_a_token(config, section, {"dtype": "float32"}) == 9216
    assert kv.bytes_a_token(config, section, {}) == 4608
    assert kv.bytes_a_token(config, section, {"kv-cache-dtype": "fp8"}) == 2304


def test_sizes_of_the_language_model_may_lie_below_its_type() -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    config = {"dtype": "bfloat16", "text_config": {**sizes, "head_dim": 8}}
    section = Recipe(name="a", model="Org/Model").decode
    assert kv.bytes_a_token(config, section, {}) == 2 * 2 * 8 * 2 * 3
    quantized = {**config, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    assert isinstance(kv.bytes_a_token(quantized, section, {}), str)


def test_weights_that_are_not_here_are_not_taken_for_nothing(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub(patient, monkeypatch, 200, body=(patient.model / "config.json").read_bytes())
    found = [each for each in patient.examine() if each.check == "kv-cache"]
    assert found[0].state == "not checked"
    assert "prefill: 126.4 GiB a worker are for weights and cache" in found[0].evidence
    patient.recipe = {**CPU_RECIPE, "model": "Org/Model"}
    (memory,) = [each for each in patient.examine() if each.check == "memory"]
    assert "KV caches without the weights take 8.0 GiB" in memory.evidence


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4096, "use_sliding_window": True},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"num_kv_shared_layers": 10},
        {"torch_dtype": "int4"},
        {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}},
        {"v_head_dim": 64},
    ],
)
def test_capacity_of_uneven_models_is_not_guessed(
    patient: Patient, change: dict[str, object]
) -> None:
    patient.config(**change)
    patient.set("prefill.kv_cache_gib", 0.01)
    assert patient.complaints() == {}


def test_report_for_people_ends_with_1_where_something_cannot_work(launcher: Launcher) -> None:
    recipe = launcher.recipe("a")
    code, out, err = launcher.run("doctor", recipe)
    assert (code, "0 error" in err) == (0, True), out
    code, out, err = launcher.run("doctor", recipe, "--set", "prefill.kv_cache_gib=1000000")
    assert (code, "1 error" in err) == (1, True), out
    lines = out.splitlines()
    (at,) = (at for at, line in enumerate(lines) if line.startswith("error"))
    assert lines[at].split()[1] == "memory"
    assert "KV caches without the weights take 976.6 TiB" in lines[at]
    assert lines[at + 1].strip().startswith("→ lower kv_cache_gib")


def test_report_for_scripts_counts_states_and_keeps_the_exit_code(launcher: Launcher) -> None:
    recipe = launcher.recipe("a")
    wrong = ("--set", "prefill.tensor_parallel=3")
    code, out, _ = launcher.run("doctor", recipe, *wrong, "--json")
    report = json.loads(out)
    assert code == 1
    assert report["counts"]["error"] == 1
    assert sum(report["counts"].values()) == len(report["findings"])
    (refused,) = (each for each in report["findings"] if each["state"] == "error")
    assert refused["check"] == "recipe"
    assert "3 does not divide the 8 attention heads" in refused["evidence"]
    assert refused["remedy"]


def test_recipe_that_is_not_there_is_a_mistake_of_the_user(launcher: Launcher) -> None:
    code, _, err = launcher.run("doctor", "tiny-qwen3")
    assert code == 2 and "did you mean tiny-qwen3-cpu?" in err


def test_doctor_leaves_nothing_behind(launcher: Launcher) -> None:
    recipe = launcher.recipe("a")
    before = {path for path in launcher.folder.rglob("*") if path.suffix not in (".out", ".err")}
    assert launcher.run("doctor", recipe)[0] == 0
    after = {path for path in launcher.folder.rglob("*") if path.suffix not in (".out", ".err")}
    assert after == before
