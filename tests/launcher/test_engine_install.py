"""Installing an engine with the real pip, from a folder of small packages, without a network."""

from __future__ import annotations

import os
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_upstream import TAG, FakeReporter, published_in
from pdlaunch import engine, engine_install
from pdlaunch.engine import Engine
from pdlaunch.errors import PdError
from pdlaunch.upstream import Variant

PACKAGES = {
    "torch": ("2.13.0+cpu", "__version__ = '2.13.0+cpu'\nclass version:\n    cuda = None\n"),
    "nixl": ("1.5.1", ""),
    "nixl_cu12": ("1.5.1", ""),
    "vllm_router": ("0.1.17", "def main():\n    print('the router')\n"),
    "accelerate": ("1.15.0", ""),
    "gguf": ("0.19.0", ""),
    "idna": ("3.20", ""),
}


# What the one build of this module reports.
SAID = FakeReporter()


def publish_package(folder: Path, name: str, version: str = "") -> None:
    usual, source = PACKAGES[name]
    version = version or usual
    info = f"{name}-{version}.dist-info"
    requires = "Requires-Dist: nixl-cu12\nRequires-Dist: nixl-cu13\n" if name == "nixl" else ""
    files = {
        f"{name}/__init__.py": source,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if name == "vllm_router":
        files[f"{info}/entry_points.txt"] = "[console_scripts]\nvllm-router = vllm_router:main\n"
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine installed from the fake upstream and the small packages."""
    root = tmp_path_factory.mktemp("engine")
    with published_in(root) as upstream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "load_series", upstream.series)
        patch.setattr("platform.machine", lambda: "x86_64")
        for name in PACKAGES:
            publish_package(upstream.published, name)
        yield engine.ensure("cpu", SAID)


def run(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_build_is_reported_phase_by_phase(built: Engine) -> None:
    assert [said for said in SAID.said if said.startswith("installing")] == [
        "installing torch==2.13.0+cpu",
        "installing what vLLM needs",
        "installing nixl-cu12==1.5.1",
        "installing nixl 1.5.1",
        "installing the router and tools",
        f"installing vllm-{built.version}-{TAG}.whl",
    ]


def test_engine_imports_its_vllm_and_its_packages(built: Engine) -> None:
    script = "import vllm, torch, idna, nixl; print(vllm.__version__, vllm.__file__)"
    version, path = run(built.python, "-c", script).split()
    assert version == built.version
    assert path.startswith(str(built.root))


def test_metadata_of_both_layers_are_visible(built: Engine) -> None:
    script = "from importlib.metadata import version as v; print(v('vllm'), v('torch'), v('nixl'))"
    assert run(built.python, "-c", script).split() == [built.version, "2.13.0+cpu", "1.5.1"]


def test_router_runs_from_the_engine(built: Engine) -> None:
    assert run(built.router) == "the router\n"


def test_router_runs_without_an_engine(built: Engine) -> None:
    engine.ensure_router(FakeReporter())
    assert run(engine.planned_router()) == "the router\n"


@pytest.mark.parametrize(
    ("variant", "taken"), [("cpu", "torch-2.13.0+cpu"), ("cuda", "torch-2.13.0")]
)
def test_torch_is_of_the_engines_variant(
    built: Engine, tmp_path: Path, variant: Variant, taken: str
) -> None:
    for version in ("2.13.0", "2.13.0+cpu"):
        publish_package(tmp_path, "torch", version)
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        needs = "Metadata-Version: 2.1\nName: vllm\nVersion: 1\nRequires-Dist: torch==2.13.0\n"
        archive.writestr("vllm-1.dist-info/METADATA", needs)
    torch, _ = engine_install._requirements(wheel, variant)
    python = engine.packages_of(built) / "bin" / "python"
    sources = ["--no-index", "--find-links", tmp_path, "--no-deps", "--dest", tmp_path / "taken"]
    run(python, "-m", "pip", "download", *sources, torch)
    assert [path.name for path in (tmp_path / "taken").iterdir()] == [f"{taken}-py3-none-any.whl"]


def test_vllm_program_belongs_to_the_engine(built: Engine) -> None:
    assert built.vllm.read_text().startswith(f"#!{built.python}")


def test_checked_engine_has_no_complaint(built: Engine) -> None:
    assert engine_install.complaint(built.python, built.version) is None
    assert "instead of 9" in str(engine_install.complaint(built.python, "9"))


def test_torchvision_beside_cpu_torch_is_complained_about(built: Engine) -> None:
    intruder = engine_install.site_packages(built.root) / "torchvision"
    intruder.mkdir()
    (intruder / "__init__.py").touch()
    assert "torchvision is installed" in str(engine_install.complaint(built.python, built.version))
    (intruder / "__init__.py").unlink()
    intruder.rmdir()


def test_missing_torch_says_how_to_get_it(built: Engine) -> None:
    reporter = FakeReporter()
    pip = engine_install._Pip(engine.packages_of(built), reporter)
    with pytest.raises(PdError) as caught:
        engine_install._install_torch(pip, "torch==9.9+cpu", "cpu")
    assert reporter.said == [
        "installing torch==9.9+cpu",
        "installing torch==9.9+cpu from PyTorch's index",
    ]
    text = str(caught.value)
    assert "installing torch==9.9+cpu failed: No matching distribution found" in text
    assert "pip download" in text
    assert "PIP_FIND_LINKS" in text
    assert caught.value.where is not None
    assert "torch==9.9+cpu" in Path(caught.value.where).read_text()


def test_environment_keeps_foreign_packages_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    clean = engine_install.clean_environment()
    assert "PYTHONPATH" not in clean
    assert "PIP_TARGET" not in clean
    assert clean["PIP_FIND_LINKS"] == "/wheels"
    assert clean["PATH"] == os.environ["PATH"]
