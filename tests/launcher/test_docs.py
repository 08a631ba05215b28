"""What the pages say against what there is: commands, targets, files, metrics, settings."""

from __future__ import annotations

import ast
import enum
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import pytest
import yaml

import recipe_page
from command_lines import commands, parse, pdlaunch_words
from pdlaunch import recipe_loader, series
from pdlaunch.bench.workload import WORKLOADS
from pdlaunch.cli import cli
from pdlaunch.series import Series

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "patches/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")),
)
# Commands whose NAME is that of a deployment: by default its recipe's.
RUNNING = {"ask", "down", "logs", "status"}
# Every fence names what it holds, so that no command is taken for something else.
FENCES = {"sh", "yaml", "text", "mermaid"}
# What pages tell to run beside pdlaunch and make: no options of theirs are checked here.
OTHER_PROGRAMS = {
    *(".", "curl", "eval", "export", "git", "pip", "rm"),
    *(".venv/bin/python", ".venv/bin/ruff", ".venv/bin/mypy"),
}
STREAMING = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/streaming"
STATS = f"{STREAMING}/stats.py"
WIRE = f"{STREAMING}/wire.py"
DESIGN_PAGE = "docs/design/nixl_streaming_push.md"
_FENCE = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_SETTING = re.compile(
    r'(?:option|get_from_extra_config)\(\s*"(push_\w+|kv_lease_duration)",\s*([^()]+?)\s*\)'
)


@pytest.fixture(scope="module")
def shipped() -> Series:
    return series.load()


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest) -> str:
    return (ROOT / request.param).read_text(encoding="utf-8")


def test_fences_say_what_they_hold(page: str) -> None:
    assert {language for language, _ in _FENCE.findall(page)} <= FENCES


def test_commands_are_ones_that_are_checked(page: str) -> None:
    for line in shell_lines(page):
        for program, *_ in commands(line):
            assert program in {"pdlaunch", "make", *OTHER_PROGRAMS}, line


def test_commands_and_their_options_exist() -> None:
    typed = [words for name in PAGES for words in pdlaunch_commands((ROOT / name).read_text())]
    inline = [code for name in PAGES for code in inline_code((ROOT / name).read_text())]
    mentioned = [words for code in inline if (words := pdlaunch_words(code))]
    assert len(typed) > 60 and len(mentioned) > 20
    for words in typed:
        parse(words, incomplete=False)
    for words in mentioned:
        parse(words, incomplete=True)


def test_patches_that_are_named_are_in_the_series(shipped: Series) -> None:
    known = {patch.name.removesuffix(".patch") for patch in shipped.patches}
    for name in PAGES:
        for words in pdlaunch_commands((ROOT / name).read_text()):
            if words[0] == "patch":
                assert {word for word in words if re.match("(nixl|core|bugfix)-", word)} <= known


def test_readme_knows_every_command() -> None:
    readme = (ROOT / "README.md").read_text()
    for name, command in cli.commands.items():
        assert f"pdlaunch {name}" in readme
        for sub in command.commands if isinstance(command, click.Group) else ():
            assert f"{name} {sub}" in readme


def test_make_targets_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {
        target
        for line in (*shell_lines(page), *inline_code(page))
        if line.startswith("make ")
        for target in shlex.split(line, comments=True)[1:]
    }
    assert named <= targets


def test_links_lead_to_files(page: str, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["page"]
    for link in re.findall(r"\]\(([^)]+)\)", page):
        if "://" not in link:
            assert ((ROOT / name).parent / link.partition("#")[0]).exists(), link


def test_paths_lead_to_files(page: str) -> None:
    folders = "launcher|tests/(?:launcher|patches|e2e|simulation|upstream)|recipes"
    text = "\n".join((*shell_lines(page), *inline_code(page)))
    for path in re.findall(rf"(?<![\w/])(?:{folders})/[\w./-]*", text):
        assert (ROOT / path.rstrip(".")).exists(), path


def test_recipes_and_processes_that_are_named_exist() -> None:
    named = 0
    for name in PAGES:
        made = {"mine", "mine.yaml", "NAME", "RECIPE"}
        for words in pdlaunch_commands((ROOT / name).read_text()):
            given = arguments(words)
            # Whatever was started under a name of its own is called by it from then on.
            made |= {words[words.index("--name") + 1]} if "--name" in words else set()
            recipe = given.get("recipe") or (given.get("name") if words[0] in RUNNING else None)
            if recipe and recipe not in made:
                named += 1
                backend = [f"backend={given['backend']}"] if given.get("backend") else []
                settings = (*backend, *given.get("overrides", ()))
                recipe_loader.load(recipe_loader.find(recipe), settings)
            if words[0] == "logs" and given.get("process"):
                assert re.fullmatch(r"(prefill|decode)-\d|router", given["process"])
    assert named > 20


def test_texts_of_troubleshooting_are_printed_by_the_code(shipped: Series) -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    sources = sorted((ROOT / "launcher/pdlaunch").rglob("*.py"))
    # Long messages are written as several strings.
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in sources))
    code += new_file(shipped, f"{STREAMING}/failure_log.py")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    texts = [text for row in rows for text in _CODE.findall(row.split("|")[1])]
    assert len(texts) > 20
    for text in texts:
        if re.fullmatch(r"(prefill|decode)-0|doctor|LIBFABRIC", text) or text in reasons(shipped):
            continue
        # One word may be anything in the code.
        assert re.search("[ _]", text) and text in code, text


def test_reasons_of_troubleshooting_are_those_of_the_protocol(shipped: Series) -> None:
    rows = table((ROOT / "docs/troubleshooting.md").read_text(), "reason")
    assert {row[0].strip("`") for row in rows} == reasons(shipped) - {"other"}


def test_metrics_of_operations_exist(shipped: Series) -> None:
    stats = new_file(shipped, STATS)
    rows = table((ROOT / "docs/operations.md").read_text(), "question")
    for _, metric in rows:
        name = _CODE.findall(metric)[0].removesuffix("_total")
        assert f'"{name}"' in stats, name


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    # The theme has news of its own on every build.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [*call, tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert "WARNING" not in built.stdout + built.stderr
    for name in PAGES:
        place = re.sub(r"(README)?\.md$", "", name)
        assert (tmp_path / place / "index.html").is_file(), name
    for made in tmp_path.rglob("index.html"):
        for link in re.findall(r'(?:href|src)="([^"#?]+)', made.read_text()):
            assert urlsplit(link).scheme or (made.parent / link).exists(), f"{made}: {link}"
    assert 'class="mermaid"' in (tmp_path / "docs" / "push-mode" / "index.html").read_text()


def test_table_of_recipes_is_that_of_the_folder() -> None:
    rows = table((ROOT / "README.md").read_text(), "recipe")
    named = [name for row in rows for name in re.findall(r"\(recipes/([^)]*)\.yaml\)", row[0])]
    assert sorted(named) == sorted(recipe_loader.shipped())


def test_recipes_that_nobody_has_run_say_so() -> None:
    for links, _, is_run in table((ROOT / "README.md").read_text(), "recipe"):
        for file in re.findall(r"\(([^)]*)\)", links):
            text = (ROOT / file).read_text()
            assert ("# Not run by us" in text or "run by none" in text) == (is_run == "no"), file


def test_table_of_metrics_is_that_of_the_patches(shipped: Series) -> None:
    stats = new_file(shipped, STATS)
    codes = enumeration(new_file(shipped, WIRE), "FailureCode")
    expected = {
        f"{name}{suffix}": {
            label: list(dict.fromkeys(values[position] for values in keys))
            for position, label in enumerate(labels)
        }
        for table, suffix in (("_COUNTERS", "_total"), ("_GAUGES", ""), ("_HISTOGRAMS", ""))
        for name, (_, labels, keys) in constant(stats, table, FailureCode=codes).items()
    }
    rows = table((ROOT / "README.md").read_text(), "metric")
    found = {}
    for name, labels, *_ in rows:
        parts = [_CODE.findall(part) for part in labels.split(";") if part.strip()]
        found[name.strip("`")] = {label: values for label, *values in parts}
    assert found == expected
    page = new_file(shipped, DESIGN_PAGE)
    for name in expected:
        assert f"| `{name}` |" in page
    for code in codes:
        assert f"`{code.value}`" in page


def test_table_of_settings_is_that_of_the_patches(shipped: Series) -> None:
    code = "\n".join(
        added_lines(shipped, path)
        for path in dict.fromkeys(each.path for patch in shipped.patches for each in patch.touched)
        if path.startswith("vllm/")
    )
    expected = {key: constant(f"VALUE = {value}", "VALUE") for key, value in _SETTING.findall(code)}
    assert "push_min_bytes" in expected
    rows = table((ROOT / "README.md").read_text(), "key")
    found = {key.strip("`"): json.loads(default.strip("`")) for key, default, *_ in rows}
    assert found == expected
    for key in expected:
        assert f"| `{key}` |" in new_file(shipped, DESIGN_PAGE)


def test_modes_are_those_of_recipes() -> None:
    reference = yaml.safe_load((ROOT / "recipes/reference.yaml").read_text())
    modes = [
        row[0].strip("`") for row in table((ROOT / "README.md").read_text(), "`transfer.mode`")
    ]
    assert reference["transfer"]["mode"] in modes
    for mode in modes:
        recipe_loader.load(recipe_loader.find("tiny-qwen3-cpu"), (f"transfer.mode={mode}",))
    assert len(modes) == 3


def test_table_of_workloads_is_that_of_the_benchmark() -> None:
    rows = table((ROOT / "README.md").read_text(), "workload")
    found = {name.strip("`"): what for name, what in rows}
    assert found == {each.name: each.what for each in WORKLOADS}


def test_page_of_keys_is_that_of_the_schema() -> None:
    kept = recipe_page.PAGE.read_text(encoding="utf-8")
    assert recipe_page.page() == kept, "if that is meant: `make pages`, and read the difference"


def test_version_of_the_base_is_the_same_everywhere(shipped: Series) -> None:
    version = shipped.upstream.version
    assert f"vLLM {version}" in (ROOT / "README.md").read_text()
    assert f"Base: vLLM {version}." in (ROOT / "CHANGELOG.md").read_text()
    assert f"base-{version}.." in (ROOT / "CONTRIBUTING.md").read_text()


def test_changelog_names_every_patch(shipped: Series) -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    for patch in shipped.patches:
        assert f"- {patch.subject}\n" in changelog


def test_nothing_of_this_machine_is_in_tracked_files() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    private = set(of_this_machine())
    assert len(paths) > 50
    for path in paths:
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not [each for each in private if each in text], path


def shell_lines(text: str) -> list[str]:
    """The commands in a page's blocks of shell, continued lines in one."""
    blocks = [body.replace("\\\n", " ") for name, body in _FENCE.findall(text) if name == "sh"]
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


def pdlaunch_commands(text: str) -> list[list[str]]:
    """What a page's blocks of shell give to pdlaunch."""
    found = [words for line in shell_lines(text) for words in commands(line)]
    return [words[1:] for words in found if words[0] == "pdlaunch"]


def arguments(words: list[str]) -> dict[str, Any]:
    """A command line's arguments and options by their names in the code."""
    command: click.Command = cli
    rest = list(words)
    while isinstance(command, click.Group):
        command = command.commands[rest.pop(0)]
    return command.make_context(command.name, rest).params


def reasons(shipped: Series) -> set[str]:
    """Why a transfer fails, as labels and logs have it."""
    return {code.value for code in enumeration(new_file(shipped, WIRE), "FailureCode")}


def inline_code(text: str) -> list[str]:
    return _CODE.findall(_FENCE.sub("", text))


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the table whose first column has this heading."""
    lines = text.splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def new_file(shipped: Series, path: str) -> str:
    """A file that the series creates, as its last patch leaves it."""
    lines: list[str] = []
    for patch in shipped.patches:
        for file in patch.diff:
            if file.path != path:
                continue
            assert lines or file.is_added_file
            # From the end, so that the hunks before it still name the right lines.
            for hunk in reversed(file):
                begin = max(0, hunk.source_start - 1)
                assert [line[1:] for line in hunk.source] == (
                    lines[begin : begin + hunk.source_length]
                )
                lines[begin : begin + hunk.source_length] = [line[1:] for line in hunk.target]
    return "".join(lines)


def added_lines(shipped: Series, path: str) -> str:
    """What the series adds to a file, patch by patch."""
    return "".join(
        line.value
        for patch in shipped.patches
        for file in patch.diff
        if file.path == path
        for hunk in file
        for line in hunk
        if line.is_added
    )


def constant(source: str, name: str, **imported: Any) -> Any:
    """A constant of a module that cannot be imported here, from the constants it is made of."""
    known: dict[str, Any] = dict(imported)
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(targets[0], ast.Name) and targets[0].id.strip("_").isupper():
            known[targets[0].id] = eval(ast.unparse(node.value), known)
    return known[name]


def enumeration(source: str, name: str) -> type[enum.Enum]:
    """An enumeration of such a module."""
    (found,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    members = [
        (ast.unparse(node.targets[0]), ast.literal_eval(node.value))
        for node in found.body
        if isinstance(node, ast.Assign)
    ]
    return enum.Enum(name, members)


def of_this_machine() -> Iterator[str]:
    """Where the checkout lies and where pip looks; the README names PyTorch's index."""
    yield str(ROOT)
    settings = [value for key, value in os.environ.items() if key.startswith(("PIP_", "UV_"))]
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    for place in re.findall(r"[^\s'\"]+", "\n".join([*settings, listed.stdout])):
        url = urlsplit(place)
        if url.hostname and not url.hostname.endswith("pytorch.org"):
            yield url.hostname
        elif url.scheme == "file" or place.startswith("/"):
            yield url.path.rstrip("/")
