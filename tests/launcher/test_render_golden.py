"""What recipes of production come out as, to the letter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from golden_files import FILES, FOLDER


@pytest.mark.parametrize("name", FILES)
def test_output_is_what_it_was(name: str) -> None:
    kept = (FOLDER / name).read_text(encoding="utf-8")
    assert FILES[name]() == kept, "if that is meant: `make golden`, and read the difference"


def test_nothing_else_is_kept() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)


def test_every_line_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs/p5en.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`([^`\n]+)`", page))
    missing = set(words()) - explained
    assert not missing


def words() -> Iterator[str]:
    """What somebody may ask about: flags, variables, kinds, resources, and what pods set."""
    # The second has replicas.
    names = ("qwen3-32b-p5en", "llama-3.3-70b-p5en")
    commands = "".join(FILES[f"{name}.dry-run.sh"]() for name in names)
    yield from re.findall(r"^ *(--[\w-]+)", commands, re.MULTILINE)
    yield from re.findall(r"(?:^ *|-u )([A-Z][A-Z0-9_]+)(?==| )", commands, re.MULTILINE)
    for document in yaml.safe_load_all(FILES["qwen3-32b-p5en.k8s.yaml"]()):
        yield document["kind"]
        if document["kind"] != "Deployment":
            continue
        spec = document["spec"]["template"]["spec"]
        yield from spec.keys() & {
            "enableServiceLinks",
            "automountServiceAccountToken",
            "terminationGracePeriodSeconds",
        }
        (container,) = spec["containers"]
        yield from (word for word in container["args"] if word.startswith("--"))
        yield from (each["name"] for each in container["env"])
        yield from (key for key in container if key.endswith("Probe"))
        yield from container["resources"]["limits"]
        yield from container["resources"]["requests"]
        yield from container["securityContext"]["capabilities"].get("add", ())
