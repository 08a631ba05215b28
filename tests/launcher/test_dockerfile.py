"""The Dockerfile, without a daemon: linted, in step with the code, its check run by itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pdlaunch import containers, engine, engine_install, planner
from pdlaunch.console import Terminal
from pdlaunch.engine_scripts import verify_image
from pdlaunch.paths import patches_dir
from pdlaunch.upstream import load as load_upstream

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
FOR_CPUS = ROOT / "Dockerfile.cpu"
BOTH = pytest.mark.parametrize("dockerfile", [DOCKERFILE, FOR_CPUS], ids=lambda path: path.name)
SCRIPT = Path(verify_image.__file__)

LDD = """\
\tlibnixl_common.so => /venv/lib/libnixl_common.so (0x00007f6d42d08000)
\tlibfabric.so.1 => /opt/amazon/efa/lib/libfabric.so.1 (0x00007f6d42c74000)
\tlibcudart.so.13 => not found
\tlibcuda.so.1 => not found
"""


def default(argument: str, dockerfile: Path = DOCKERFILE) -> str:
    found = re.search(rf"^ARG {argument}=(\S+)$", dockerfile.read_text(), re.MULTILINE)
    assert found, argument
    return found[1]


@BOTH
def test_linter_has_nothing_to_say(dockerfile: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    linted = subprocess.run(
        [hadolint, "--no-color", dockerfile], capture_output=True, text=True, check=False
    )
    assert (linted.returncode, linted.stdout + linted.stderr) == (0, "")


def test_versions_are_those_of_the_series_and_of_the_engine() -> None:
    assert default("VLLM_VERSION") == load_upstream(patches_dir() / "UPSTREAM").version
    router = next(tool for tool in engine_install.TOOLS if tool.startswith("vllm-router"))
    for each in (DOCKERFILE, FOR_CPUS):
        assert f"nixl=={default('NIXL_VERSION', each)}" in engine_install.TOOLS
        assert router.startswith(f"vllm-router>={default('ROUTER_VERSION', each)},")


def test_libraries_of_efa_are_where_the_planner_expects_them() -> None:
    assert f"LD_LIBRARY_PATH={planner.EFA_LIBRARIES}:" in DOCKERFILE.read_text()
    assert Path(planner.EFA_LIBRARIES) == verify_image.EFA_LIBRARIES


@BOTH
def test_context_lets_through_what_the_dockerfile_copies(dockerfile: Path) -> None:
    allowed = (ROOT / ".dockerignore").read_text().split()
    copied = re.findall(r"^COPY (\S+) ", dockerfile.read_text(), re.MULTILINE)
    assert copied and all(f"!{each}" in allowed and (ROOT / each).is_file() for each in copied)
    assert allowed[0] == "*" and "!dist/vllm-*.whl" in allowed


@BOTH
def test_runs_as_a_user_that_is_known_not_to_be_root(dockerfile: Path) -> None:
    assert re.findall(r"^USER (.*)$", dockerfile.read_text(), re.MULTILINE) == ["2000:0"]


@BOTH
def test_labels_tell_base_and_series_and_the_build_checks_itself(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    for label, argument in (
        (containers.VERSION_LABEL, "ENGINE_VERSION"),
        ("pdlaunch.vllm.version", "VLLM_VERSION"),
        ("pdlaunch.series.hash", "SERIES_HASH"),
    ):
        assert f'{label}="${{{argument}}}"' in text
    assert re.search(r'^RUN python3 \S+/verify_image.py --version "\$', text, re.MULTILINE)


@pytest.mark.e2e
def test_check_passes_on_the_cpu_engine() -> None:
    cpu = engine.ensure("cpu", Terminal())
    call = [cpu.python, SCRIPT, "--version", cpu.version, "--without-efa"]
    ran = subprocess.run(call, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["versions"]["vllm"] == cpu.version
    assert found["nixl_builds"] == ["nixl-cu12"]


def test_check_names_all_that_is_missing_without_a_traceback() -> None:
    call = [sys.executable, SCRIPT, "--version", "1.0"]
    ran = subprocess.run(call, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    for part in (
        "cannot import torch",
        "vllm is not installed",
        "found none",
        "no libplugin_LIBFABRIC.so",
        "no program vllm-router",
    ):
        assert part in ran.stderr


@pytest.mark.parametrize(
    ("major", "builds", "problem"),
    [
        ("13", ["nixl-cu13"], None),
        (None, ["nixl-cu12"], None),
        ("13", ["nixl-cu12", "nixl-cu13"], "one build of NIXL is needed, found nixl-cu12, nixl"),
        ("13", ["nixl-cu12"], "torch is built for CUDA 13 and NIXL is nixl-cu12: nixl-cu13 is"),
    ],
)
def test_check_wants_the_one_build_of_nixl_for_torchs_cuda(
    major: str | None, builds: list[str], problem: str | None
) -> None:
    found = list(verify_image.nixl_problems(major, builds))
    assert len(found) == bool(problem)
    assert not problem or found[0].startswith(problem)


def test_check_tells_a_stock_build_from_a_patched_one() -> None:
    def problems(version: str) -> list[str]:
        return list(verify_image.version_problems(version, {"vllm": version}, None))

    assert problems("0.32.0+pd.6.h0782c8f7") == []
    assert problems("0.32.0") == ["vllm 0.32.0 is not a patched build"]


def test_check_of_the_plugin_leaves_the_driver_to_the_host() -> None:
    found = verify_image.plugin_libraries(LDD, "7f00-7f01 r-xp /venv/lib/libcudart.so.13\n")
    assert found == ("/opt/amazon/efa/lib/libfabric.so.1", [])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("libhwloc.so.15 => not found", "needs libhwloc.so.15"),
        ("/l/p.so: /e/libfabric.so.1: version `FABRIC_1.10' not found (required by p)", "FABRIC_1"),
    ],
)
def test_check_of_the_plugin_names_what_it_lacks(line: str, problem: str) -> None:
    _, problems = verify_image.plugin_libraries(f"{LDD}\t{line}\n", "/libcudart.so.13\n")
    assert len(problems) == 1
    assert problem in problems[0]


def test_check_of_the_plugin_refuses_another_libfabric() -> None:
    ldd = LDD.replace("/opt/amazon/efa/lib/libfabric", "/usr/lib/libfabric")
    _, problems = verify_image.plugin_libraries(ldd, "/libcudart.so.13\n")
    assert problems == [
        "libfabric comes from /usr/lib/libfabric.so.1, not from /opt/amazon/efa/lib"
    ]
