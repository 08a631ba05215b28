"""The series as data: names, messages, order, hash."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_upstream import FakeUpstream
from pdlaunch import series
from pdlaunch.errors import PdError
from pdlaunch.series import Patch

PATCH = b"""\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: A Person <person@example.org>
Date: Sun, 29 Nov 2026 12:00:00 +0000
Subject: [NIXL] Harden the handshake listener so that a subject of this length is
 folded

A malformed frame ended the thread on prefill.

Forwarded: no
Test: tests/a.py::test_one,
 tests/b.py
Test: tests/c.py::TestC::test_two[x-1]
Wire: no
---
diff --git a/vllm/a.py b/vllm/a.py
index 1111111111111111111111111111111111111111..2222222222222222222222222222222222222222 100644
--- a/vllm/a.py
+++ b/vllm/a.py
@@ -1 +1 @@
-a
+b
diff --git a/tests/a.py b/tests/a.py
new file mode 100644
index 0000000000000000000000000000000000000000..2222222222222222222222222222222222222222
--- /dev/null
+++ b/tests/a.py
@@ -0,0 +1 @@
+a
"""


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("[NIXL] Harden handshake listener", "nixl-harden-handshake-listener"),
        ("[Core][NIXL] Report D's final blocks (v1)", "core-nixl-report-d-s-final-blocks-v1"),
        ("Untagged", "untagged"),
        ("[Docs] Érklär", "docs-erklar"),
    ],
)
def test_name_is_the_subject_with_its_area_first(subject: str, name: str) -> None:
    assert series.file_name(subject) == f"{name}.patch"


def test_message_is_read_unfolded() -> None:
    patch = Patch("a.patch", PATCH)
    assert patch.subject.endswith("of this length is folded")
    assert patch.body.startswith("A malformed frame")
    assert "diff --git" not in patch.body


def test_tests_come_from_all_trailers_and_continued_lines() -> None:
    assert Patch("a.patch", PATCH).tests == (
        "tests/a.py::test_one",
        "tests/b.py",
        "tests/c.py::TestC::test_two[x-1]",
    )


def test_touched_files_say_what_happens_to_them() -> None:
    touched = Patch("a.patch", PATCH).touched
    assert [(t.path, t.added, t.removed) for t in touched] == [
        ("vllm/a.py", False, False),
        ("tests/a.py", True, False),
    ]


def test_order_ignores_comments_and_blank_lines() -> None:
    assert series.names_in_order("# one\n\na.patch # why\nb.patch\n") == ("a.patch", "b.patch")


def test_hash_depends_on_order_content_and_base(upstream: FakeUpstream) -> None:
    def hash_of(order: str) -> str:
        (upstream.patches / "series").write_text(order)
        return upstream.series().hash

    (upstream.patches / "a.patch").write_bytes(PATCH)
    (upstream.patches / "b.patch").write_bytes(PATCH.replace(b"+b", b"+c"))
    hashes = [hash_of(order) for order in ("", "a.patch", "a.patch\nb.patch", "b.patch\na.patch")]
    base = upstream.patches / "UPSTREAM"
    base.write_text(base.read_text() + "# another base\n")
    assert len({*hashes, upstream.series().hash}) == 5
    assert hash_of("# only a comment\n\na.patch") != hashes[1]


def test_hash_does_not_depend_on_comments(upstream: FakeUpstream) -> None:
    before = upstream.series().hash
    (upstream.patches / "series").write_text("# other words\n")
    assert upstream.series().hash == before


def test_version_suffix_is_a_valid_local_version(upstream: FakeUpstream) -> None:
    assert upstream.series().version_suffix == f"pd.0.h{upstream.series().hash[:8]}"


def test_named_patch_without_a_file_is_an_error(upstream: FakeUpstream) -> None:
    (upstream.patches / "series").write_text("gone.patch\n")
    with pytest.raises(PdError, match=r"gone\.patch: named in the series"):
        upstream.series()


def test_patch_named_twice_is_an_error(upstream: FakeUpstream) -> None:
    (upstream.patches / "series").write_text("a.patch\na.patch\n")
    with pytest.raises(PdError, match=r"a\.patch: named twice"):
        upstream.series()


def test_unreadable_base_names_the_file(upstream: FakeUpstream) -> None:
    (upstream.patches / "UPSTREAM").write_text("version = 0.32.0")
    with pytest.raises(PdError, match="UPSTREAM"):
        upstream.series()


def test_shipped_series_loads() -> None:
    shipped = series.load()
    assert shipped.upstream.version == "0.32.0"
    assert {patch.name for patch in shipped.patches} == {
        path.name for path in Path(series.patches_dir()).glob("*.patch")
    }


def test_missing_architecture_names_those_there_are(upstream: FakeUpstream) -> None:
    with pytest.raises(PdError, match=r"no cpu wheel for riscv64(?s:.)*x86_64"):
        upstream.series().upstream.wheel("cpu", "riscv64")
