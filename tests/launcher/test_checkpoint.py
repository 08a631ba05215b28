"""What is told of a model's folder without loading it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints import write_weights
from pdlaunch.checkpoint import damage, read_config, read_weights


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    write_weights(file, 1000)
    return file


def test_whole_file_is_not_damaged(whole: Path) -> None:
    assert damage(whole) is None
    assert read_weights(whole.parent).problem is None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "ends within its header"),
        (b"\x10\0\0", "ends within its header"),
        (b"\0" * 1000, "no header of a safetensors file"),
        ((8).to_bytes(8, "little") + b"[1, 2]  ", "no header of a safetensors file"),
        ((8).to_bytes(8, "little") + b'{"a": 1}', "no header of a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS"),
    ],
)
def test_what_is_no_safetensors_file_is_damaged(whole: Path, content: bytes, told: str) -> None:
    whole.write_bytes(content)
    assert told in str(damage(whole))
    assert str(damage(whole)) in str(read_weights(whole.parent).problem)


@pytest.mark.parametrize("size_bytes", [999, 1001])
def test_length_that_differs_from_the_header_is_damage(whole: Path, size_bytes: int) -> None:
    with whole.open("r+b") as stream:
        stream.truncate(size_bytes)
    assert f"is {size_bytes} bytes long, and by its header 1000" in str(damage(whole))


def test_one_complete_format_of_weights_is_enough(tmp_path: Path) -> None:
    for name, shard in {"model.safetensors": "a.safetensors", "pytorch_model.bin": "b.bin"}.items():
        index = {"weight_map": {"x": shard}}
        (tmp_path / f"{name}.index.json").write_text(json.dumps(index))
    write_weights(tmp_path / "a.safetensors", 700)
    found = read_weights(tmp_path)
    assert (found.missing, found.total_bytes, found.problem) == ((), 700, None)


def test_file_that_the_index_does_not_name_may_be_damaged(tmp_path: Path) -> None:
    index = {"weight_map": {"x": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_weights(tmp_path / "a.safetensors", 700)
    (tmp_path / "consolidated.safetensors").write_bytes(b"damaged")
    assert read_weights(tmp_path).problem is None


def test_interrupted_download_is_missing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    assert read_weights(tmp_path).missing == ("model.safetensors",)


@pytest.mark.parametrize(("text", "told"), [("{bad", "is not JSON"), ("[1]", "is no mapping")])
def test_broken_config_is_told(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    content, problem = read_config(file)
    assert content is None and told in str(problem)
