"""What an engine's log says of NIXL, and what speaks against it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlaunch.plan import ProcessPlan
from pdlaunch.transport import Transport, doubts, read, said
from test_planner import named, planned, recipe

# As NIXL 1.5.1 and UCX 1.23 write them.
NIXL = "2026-11-30 03:05:14 NIXL INFO    _api.py:405 Backend {} was instantiated\n"
UCX = (
    "[1796057147.515379] [vm:9630 :0]      ucp_worker.c:1997 UCX  INFO    0x55 {} "
    "rma_am(tcp/eth0)  amo_am(tcp/lo)  am(tcp/eth0 cma/memory)  ka(tcp/lo)\n"
)
# As the sources of NIXL 1.5.1 write it: no machine here has EFA.
FABRIC = "I1130 16:45:46.747391    9630 libfabric_topology.cpp:163] Discovered {}\n"
AROUND = "(Worker pid=979) INFO 11-30 03:05:14 [base_worker.py:539] Initializing NIXL wrapper\n"

EFA = Transport(("LIBFABRIC",), ("efa",))
NO_PROVIDER = Transport(("LIBFABRIC",))


def log(folder: Path, *lines: str) -> Path:
    path = folder / "prefill-0.log"
    path.write_text("".join(lines))
    return path


def engine(backends: list[str] | None, **env: str) -> ProcessPlan:
    transfer = {} if backends is None else {"transfer": {"backends": backends}}
    return named(planned(recipe(**transfer, prefill={"env": env})), "prefill-0")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "not known"),
        ([NIXL.format("UCX")], "UCX (transports not known)"),
        # Each worker says it.
        ([NIXL.format("UCX")] * 4, "UCX (transports not known)"),
        (["(Worker_TP0 pid=7) " + NIXL.format("UCX")], "UCX (transports not known)"),
        (
            [UCX.format("intra-node cfg#0"), NIXL.format("UCX")],
            "UCX (cma/memory, tcp/eth0)",
        ),
        ([UCX.format("inter-node cfg#2"), NIXL.format("UCX")], "UCX (cma/memory, tcp/eth0)"),
        # What it uses to itself moves no KV.
        ([UCX.format("self cfg#0"), NIXL.format("UCX")], "UCX (transports not known)"),
        ([FABRIC.format("16 EFA devices"), NIXL.format("LIBFABRIC")], "LIBFABRIC (efa)"),
        (
            [FABRIC.format("1 tcp devices (TCP fallback)"), NIXL.format("LIBFABRIC")],
            "LIBFABRIC (tcp)",
        ),
        ([NIXL.format("LIBFABRIC")], "LIBFABRIC (provider not known)"),
        (
            [NIXL.format("UCX"), NIXL.format("LIBFABRIC")],
            "LIBFABRIC (provider not known), UCX (transports not known)",
        ),
        ([NIXL.format("GDS")], "GDS"),
    ],
)
def test_a_log_tells_the_backend(tmp_path: Path, lines: list[str], told: str) -> None:
    assert str(read(log(tmp_path, AROUND, *lines, AROUND))) == told


@pytest.mark.parametrize(
    "line",
    [
        "user said: " + NIXL.format("LIBFABRIC"),
        NIXL.format("LIBFABRIC").replace("instantiated", "instantiated not"),
        NIXL.format("evil\x1b[2J"),
        NIXL.format("X" * 40),
        "Backend LIBFABRIC was instantiated\n",
    ],
)
def test_only_nixls_own_lines_count(tmp_path: Path, line: str) -> None:
    assert read(log(tmp_path, AROUND, line)) == Transport()


def test_what_an_engine_said_before_it_was_restarted_does_not_count(tmp_path: Path) -> None:
    path = log(tmp_path, NIXL.format("UCX"))
    born_byte = path.stat().st_size
    assert read(path, born_byte) == Transport()
    with path.open("a") as file:
        file.write(NIXL.format("LIBFABRIC"))
    assert read(path, born_byte).backends == ("LIBFABRIC",)
    assert read(path).backends == ("LIBFABRIC", "UCX")


def test_a_log_that_is_gone_tells_nothing(tmp_path: Path) -> None:
    assert read(tmp_path / "none.log") == Transport()


names = st.one_of(
    st.text(max_size=40), st.from_regex(r"[a-z_0-9]+/[\w:.]+"), st.from_regex(r"[A-Z][A-Z_]+")
)


@settings(deadline=None)
@given(
    pieces=st.lists(
        st.one_of(
            st.text(max_size=40),
            names.map(NIXL.format),
            names.map(lambda each: FABRIC.format(f"3 {each} devices")),
            names.map(lambda each: UCX.format("inter-node cfg#1").replace("tcp/eth0", each)),
        )
    )
)
def test_whatever_is_in_a_log_names_have_the_right_form(pieces: list[str]) -> None:
    seen = said("".join(pieces))
    assert all(re.fullmatch(r"[A-Z0-9_]{1,32}", each) for each in seen.backends)
    assert all(re.fullmatch(r"[a-zA-Z0-9_;-]{1,32}", each) for each in seen.providers)
    assert all(re.fullmatch(r"[a-zA-Z0-9_:./-]{3,65}", each) for each in seen.ucx)
    assert max(len(each) for each in vars(seen).values()) <= 16


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        (engine(None), Transport(("UCX",))),
        (engine(["UCX"]), Transport()),
        (engine(["LIBFABRIC"]), EFA),
        (engine(["LIBFABRIC"], FI_PROVIDER="efa"), EFA),
        # libfabric takes what it was told, or nothing.
        (engine(["LIBFABRIC"], FI_PROVIDER="efa"), NO_PROVIDER),
        (engine(["LIBFABRIC"], FI_PROVIDER="cxi"), Transport(("LIBFABRIC",), ("cxi",))),
    ],
)
def test_what_moves_kv_as_asked_is_not_doubted(asked: ProcessPlan, seen: Transport) -> None:
    assert doubts(asked, seen) == []


@pytest.mark.parametrize(
    ("asked", "seen", "told"),
    [
        (
            engine(["LIBFABRIC"]),
            Transport(("UCX",), ucx=("tcp/eth0",)),
            "asks for LIBFABRIC, and prefill-0 moves KV over UCX (tcp/eth0): not over EFA",
        ),
        (engine(["LIBFABRIC"]), Transport(), "prefill-0 does not say what it uses: it may be TCP"),
        (engine(["LIBFABRIC"]), NO_PROVIDER, "does not say which provider of libfabric"),
        (
            engine(["LIBFABRIC"]),
            Transport(("LIBFABRIC",), ("tcp",)),
            "prefill-0 moves KV over TCP: libfabric found no EFA, and took tcp",
        ),
        (
            engine(["LIBFABRIC"]),
            Transport(("LIBFABRIC",), ("tcp;ofi_rxm",)),
            "prefill-0 moves KV over TCP",
        ),
        (
            engine(["LIBFABRIC"], FI_PROVIDER="efa"),
            Transport(("LIBFABRIC",), ("verbs",)),
            "moves KV over verbs, and FI_PROVIDER asks for efa",
        ),
        (
            engine(["LIBFABRIC", "UCX"]),
            Transport(("LIBFABRIC", "UCX"), ("efa",)),
            "prefill-0 has UCX beside LIBFABRIC, and NIXL chooses between them",
        ),
        (engine(["UCX"]), Transport(("POSIX",)), "over POSIX, and the recipe asks for UCX"),
    ],
)
def test_what_may_move_kv_over_tcp_is_doubted(
    asked: ProcessPlan, seen: Transport, told: str
) -> None:
    (doubt,) = doubts(asked, seen)
    assert told in doubt


def test_nixl_is_asked_to_name_the_provider_where_there_is_a_choice() -> None:
    assert engine(["LIBFABRIC"]).env["NIXL_LOG_LEVEL"] == "INFO"
    assert "NIXL_LOG_LEVEL" not in engine(None).env
    assert engine(["LIBFABRIC"], NIXL_LOG_LEVEL="WARN").env["NIXL_LOG_LEVEL"] == "WARN"
