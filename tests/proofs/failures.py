"""The known failures of P/D serving over NIXL, the test of each, and what stock vLLM cannot show.

Kinds, not cases. `run_faults.py` runs the tests on our connector and on upstream's, and writes the
table of docs/faults.md.
"""

from __future__ import annotations

from dataclasses import dataclass

PAIR = "tests/e2e/test_faults.py"
RANKS = "tests/e2e/test_rank_faults.py"
NO_RANKS = "from two ranks to one it hands nothing over, without any fault, in three starts"


@dataclass(frozen=True)
class Known:
    """One kind of failure."""

    id: str
    what: str
    right: str
    # Where the test is, and its name. Of a patch, if `patch` names one: the test is in its tree.
    file: str
    test: str
    patch: str = ""
    # Why upstream's connector does not fail the test, or is not asked.
    stock: str = ""


KNOWN = (
    Known(
        "A1",
        "decode aborts while it waits for KV",
        "cancel, fence, free",
        PAIR,
        "test_a1_decode_aborts_while_it_waits",
    ),
    Known(
        "A2",
        "registrations whose request never reaches prefill",
        "dropped on cancel, and bounded in number and age",
        PAIR,
        "test_a2_registrations_that_never_get_a_prefill",
    ),
    Known(
        "A3",
        "a stale registration with the id of a newer one",
        "the newer one is served",
        PAIR,
        "test_a3_an_older_registration_with_the_same_id",
    ),
    Known(
        "A4",
        "prefill refuses its leg",
        "decode's request ends with an error",
        PAIR,
        "test_a4_prefill_refuses_its_leg",
    ),
    Known(
        "A5",
        "prefill cannot reach decode's side channel",
        "decode's request ends, nothing is kept",
        PAIR,
        "test_a5_prefill_cannot_reach_decode",
    ),
    Known(
        "A6", "a WRITE fails after it was posted", "decode is told", PAIR, "test_a6_a_write_fails"
    ),
    Known(
        "A7",
        "a registration reaches some of prefill's ranks",
        "it is sent again",
        RANKS,
        "test_a7_a_registration_reaches_one_rank_only",
        stock=NO_RANKS,
    ),
    Known(
        "A8",
        "decode is queued for longer than prefill's lease",
        "the lease lasts while decode says that it wants the KV",
        PAIR,
        "test_a8_decode_is_queued_longer_than_the_lease",
    ),
    Known(
        "A9",
        "decode has all of the prompt in its prefix cache",
        "prefill frees its blocks at once",
        PAIR,
        "test_a9_decode_has_all_of_the_prompt",
        stock="decode's full hit releases prefill's blocks there too",
    ),
    Known(
        "A11",
        "prefill dies while decode waits",
        "the request ends within the bound",
        PAIR,
        "test_a11_prefill_dies_while_decode_waits",
    ),
    Known(
        "A12",
        "prefill holds its blocks after a push",
        "freed when the last WRITE has landed",
        PAIR,
        "test_a12_prefill_releases_its_blocks_on_completion",
        stock="a WRITE that has landed releases them in 0.32.0, too",
    ),
    Known(
        "C2",
        "one of several WRITEs cannot be posted",
        "failures are counted like completions",
        RANKS,
        "test_c2_one_rank_cannot_post_its_write",
        stock=NO_RANKS,
    ),
    Known(
        "B1",
        "the lease ends while a WRITE still reads",
        "blocks are kept until every WRITE has ended",
        PAIR,
        "test_b1_a_write_outlasts_the_lease",
    ),
    Known(
        "B2",
        "a WRITE waits for a handshake until its blocks belong to others",
        "ownership is checked when it is posted",
        PAIR,
        "test_b2_a_handshake_outlasts_the_lease",
    ),
    Known(
        "B3",
        "two live requests with one id",
        "each gets the KV of its own prompt",
        PAIR,
        "test_b3_two_requests_with_one_id",
    ),
    Known(
        "B4",
        "decode's prompt is not prefill's",
        "an error, never a shift",
        PAIR,
        "test_b4_the_prompts_differ_in_length",
    ),
    Known(
        "B6",
        "one WRITE fails while its siblings go on",
        "decode waits for all",
        RANKS,
        "test_b6_one_rank_fails_while_the_other_still_writes",
        stock=NO_RANKS,
    ),
    Known(
        "B8",
        "parameters of a past request are used again",
        "refused",
        PAIR,
        "test_b8_parameters_are_used_again",
    ),
    Known(
        "B9",
        "adapters are not part of the match",
        "an error unless both legs name the same",
        "tests/e2e/one_pair/test_combinations.py",
        "test_adapter_on_one_leg_is_an_error_not_an_answer",
        stock="its pair has no stock variant",
    ),
    Known(
        "B10",
        "quantized KV with other scales",
        "refused in the handshake",
        "tests/v1/kv_connector/unit/test_nixl_kv_scales.py",
        "test_a_peer_with_other_scales_is_refused",
        patch="nixl-compare-the-scales-of-quantized-kv-caches",
    ),
    Known(
        "B11",
        "decode has a part of the prompt in its prefix cache",
        "blocks are paired by position",
        PAIR,
        "test_b11_decode_has_a_part_of_the_prompt",
        stock="a hit of whole blocks leaves lists whose ends belong together",
    ),
    Known(
        "C-1",
        "parameters with nothing but do_remote_prefill",
        "a local prefill, with a warning",
        PAIR,
        "test_c_1_and_c_2_parameters_that_lack_most",
    ),
    Known(
        "C-2",
        "parameters without remote_request_id",
        "it is optional",
        PAIR,
        "test_c_1_and_c_2_parameters_that_lack_most",
    ),
    Known(
        "C-4",
        "notifications that are none",
        "dropped and counted",
        PAIR,
        "test_c_4_notifications_that_are_none",
    ),
    Known(
        "C-5",
        "late and repeated completions",
        "unknown ids are ignored",
        PAIR,
        "test_c_5_clients_leave_when_their_kv_arrives",
        stock="the core that ignores late results is patched in the same build",
    ),
    Known(
        "D1",
        "malformed frames on the side channel",
        "each is answered with an error",
        PAIR,
        "test_d1_frames_that_are_no_handshake",
        stock="its listener is the hardened one of the same build",
    ),
    Known(
        "D3",
        "prefill is replaced at the same address",
        "the next request shakes hands with the new one",
        PAIR,
        "test_d3_prefill_is_replaced",
        stock="a new process comes with a new engine id, and stock shakes hands with that too",
    ),
    Known(
        "D4",
        "dead peers beside a new one",
        "the new one is served at once",
        PAIR,
        "test_d4_dead_peers_beside_a_new_one",
    ),
    Known(
        "D5",
        "bad messages beside good ones",
        "each is handled for itself",
        PAIR,
        "test_d5_bad_messages_beside_good_ones",
    ),
    Known(
        "D6",
        "hostile registrations",
        "no byte of another request's KV changes",
        PAIR,
        "test_d6_hostile_registrations_change_no_byte",
        stock="it looks at messages only while it steps, so an idle one shows no memory to compare",
    ),
    Known(
        "D7",
        "the side channel's host is localhost across hosts",
        "the launcher plans an address that the peer can reach",
        "tests/launcher/test_two_hosts.py",
        "test_local_is_a_routable_address_when_the_other_role_is_elsewhere",
        stock="it is for the user to set; `pdlaunch` plans it for both",
    ),
)
