"""Published files: found where pip looks, taken only by hash, explained when they are not."""

from __future__ import annotations

import functools
import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_upstream import FakeReporter
from pdlaunch import packages, pip_config
from pdlaunch.errors import PdError
from pdlaunch.pip_config import Sources
from pdlaunch.upstream import PublishedFile

CONTENT = b"the published file"
FILE = PublishedFile("some-thing", "some_thing-1.0.tar.gz", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder laid out as a package index, with one file."""
    root = tmp_path / "index"
    page = root / "simple" / FILE.project / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../{FILE.filename}#sha256=whatever">{FILE.filename}</a>')
    (root / FILE.filename).write_bytes(CONTENT)
    return root


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(index: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(index))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def test_found_in_a_folder_of_links(index: Path) -> None:
    path = packages.fetch(FILE, FakeReporter(), Sources((str(index),), ()))
    assert path.read_bytes() == CONTENT


def test_found_in_an_index_on_disk(index: Path) -> None:
    sources = Sources((), ((index / "simple").as_uri(),))
    assert packages.fetch(FILE, FakeReporter(), sources).read_bytes() == CONTENT


def test_found_in_an_index_on_the_network(server: str) -> None:
    reporter = FakeReporter()
    path = packages.fetch(FILE, reporter, Sources((), (f"{server}/simple/",)))
    assert path.read_bytes() == CONTENT
    assert reporter.said == [f"downloading {FILE.filename}"]


def test_found_on_a_page_of_links(server: str) -> None:
    sources = Sources((f"{server}/simple/{FILE.project}/",), ())
    assert packages.fetch(FILE, FakeReporter(), sources).read_bytes() == CONTENT


def test_second_fetch_asks_nobody(index: Path) -> None:
    packages.fetch(FILE, FakeReporter(), Sources((str(index),), ()))
    reporter = FakeReporter()
    packages.fetch(FILE, reporter, Sources((), ()))
    assert reporter.said == []


def test_file_with_another_hash_is_not_taken(index: Path, cache: Path) -> None:
    (index / FILE.filename).write_bytes(b"tampered with")
    with pytest.raises(PdError, match="sha256 differs"):
        packages.fetch(FILE, FakeReporter(), Sources((str(index),), ()))
    assert not packages.cached_path(FILE).exists()


def test_next_source_is_tried_after_one_that_fails(server: str, index: Path) -> None:
    sources = Sources(
        ("/nonexistent", str(index / "simple")), ("http://127.0.0.1:9", server + "/simple")
    )
    assert packages.fetch(FILE, FakeReporter(), sources).read_bytes() == CONTENT


def test_failure_names_package_sources_and_what_to_set(index: Path) -> None:
    sources = Sources((), ("http://127.0.0.1:9/simple", (index / "other").as_uri()))
    with pytest.raises(PdError) as caught:
        packages.fetch(FILE, FakeReporter(), sources)
    text = str(caught.value)
    assert "some_thing-1.0.tar.gz of the package some-thing" in text
    assert "http://127.0.0.1:9/simple: " in text
    assert "Connection refused" in text
    assert "not there" in text
    assert "PIP_FIND_LINKS" in text


def test_unknown_project_on_the_network_is_not_there(server: str) -> None:
    file = PublishedFile("other", "other-1.tar.gz", FILE.sha256)
    with pytest.raises(PdError, match="not there"):
        packages.fetch(file, FakeReporter(), Sources((), (server + "/simple",)))


def test_pip_listing_lets_a_command_win_over_global() -> None:
    listing = "global.index-url='a'\ndownload.index-url='b'\n:env:.timeout='3'\ninstall.cert='c'\n"
    assert pip_config.parse_listing(listing) == {"index-url": "b", "cert": "c"}


def test_environment_wins_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = http://a.invalid/\nfind-links = /a /b\ntimeout = 7\n")
    environ = {
        "PATH": "/usr/bin",
        "PIP_CONFIG_FILE": str(config),
        "PIP_INDEX_URL": "http://e.invalid/",
    }
    sources = pip_config.configured_sources(environ)
    assert sources.indexes[0] == "http://e.invalid/"
    assert sources.find_links == ("/a", "/b")
    assert sources.timeout_s == 7


def test_no_index_leaves_the_links_only() -> None:
    settings = {"no-index": "1", "extra-index-url": "http://e.invalid/", "find-links": "/a"}
    assert pip_config.sources_of(settings) == Sources(("/a",), ())
