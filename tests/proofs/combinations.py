"""What push was tried with, and the tests that show it: written to docs/support.md.

.venv/bin/python tests/proofs/combinations.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support.md"
EXACT = "same tokens as one engine"
HEAD = """# What works with push

Written by `tests/proofs/combinations.py` from the tests that show each row: on a real pair of CPU
engines over UCX where the test is one of `tests/e2e`, in the patched vLLM where a patch is named.
Tests marked slow run with `make test-slow`, the others with `make test`. No row has been run on a
GPU.

| combination | what happens | shown by |
|---|---|---|
"""
_E2E = "tests/e2e"
_UNIT = "tests/v1/kv_connector/unit/test_nixl_streaming_connector.py"
_CONNECTOR = "nixl-streaming-push-connector"


@dataclass(frozen=True)
class Combination:
    """One row. `variant` is the id of a test's parameters; `patch` names what has the test, if not
    this repository."""

    what: str
    happens: str
    file: str
    test: str
    variant: str = ""
    patch: str = ""

    @property
    def shown_by(self) -> str:
        variant = f" [{self.variant}]" if self.variant else ""
        where = f"patch {self.patch}" if self.patch else Path(self.file).name
        return f"`{self.test}`{variant} in {where}"


def _kind(what: str, variant: str, happens: str = EXACT) -> Combination:
    test = "test_answer_is_that_of_one_engine"
    return Combination(what, happens, f"{_E2E}/one_pair/test_combinations.py", test, variant)


def _same(what: str, file: str, variant: str = "") -> Combination:
    test = "test_answers_are_those_of_one_engine"
    return Combination(what, EXACT, f"{_E2E}/{file}", test, variant)


COMBINATIONS = (
    _same(
        "prompts of 1 to 4,000 tokens: shorter than a block, k blocks, one more and one less; "
        "chunks below the prompt; plain and streamed; prefix caches on both sides",
        "one_pair/test_push.py",
    ),
    _same("no prefix caches", "test_push_uncached.py"),
    Combination(
        "a part of the prompt in one side's prefix cache",
        EXACT,
        f"{_E2E}/one_pair/test_push.py",
        "test_answers_when_one_side_has_a_prefix_cached",
    ),
    Combination(
        "one prompt that many ask at once",
        EXACT,
        f"{_E2E}/one_pair/test_push.py",
        "test_answers_to_one_prompt_that_many_ask_at_once",
    ),
    Combination(
        "prefill's leg first, decode's after it",
        EXACT,
        f"{_E2E}/one_pair/test_push.py",
        "test_answers_with_legs_one_after_the_other",
    ),
    _kind("`max_tokens` 1", "one token"),
    _kind("`n` above 1", "several choices"),
    _kind("a list of prompts", "several prompts"),
    _kind("`logprobs`", "log probabilities"),
    _kind("`prompt_logprobs`", "log probabilities of the prompt"),
    _kind("`echo`", "prompt echoed"),
    _kind("sampling with a seed", "sampled"),
    _kind("structured output", "structured output"),
    _kind("`min_tokens`", "a least number of tokens"),
    _kind("`stop`", "stop string"),
    _kind("penalties", "penalties"),
    _kind("`truncate_prompt_tokens`", "prompt cut"),
    _kind("a prompt that is too long", "prompt too long", "the error one engine gives"),
    _same("TP 1 to 2", "test_layouts.py", "TP 1 to 2"),
    _same("TP 2 to 1", "test_layouts.py", "TP 2 to 1"),
    _same("TP 2 to 2", "test_layouts.py", "TP 2 to 2"),
    _same("prefill of two pipeline stages", "test_layouts.py", "PP 2 to 1"),
    Combination(
        "LoRA adapters, the same on both legs",
        EXACT,
        f"{_E2E}/one_pair/test_combinations.py",
        "test_answers_with_an_adapter_are_those_of_one_engine",
    ),
    Combination(
        "LoRA adapters that differ between the legs by name or weights, or on one leg only",
        "an error, per request",
        f"{_E2E}/one_pair/test_combinations.py",
        "test_adapter_on_one_leg_is_an_error_not_an_answer",
    ),
    _same(
        "sliding window in some layers",
        "test_architectures.py",
        "some layers with a sliding window",
    ),
    _same(
        "sliding window in all layers", "test_architectures.py", "all layers with a sliding window"
    ),
    _same("Mamba 2 beside attention", "test_architectures.py", "some layers with a state"),
    _same("latent attention (MLA)", "test_architectures.py", "latent attention"),
    _same("latent attention, TP 1 to 2", "test_architectures.py", "latent attention, TP 1 to 2"),
    _same(
        "preemption on prefill",
        "test_small_caches.py",
        "prefill preempts",
    ),
    _same(
        "preemption on decode",
        "test_small_caches.py",
        "decode preempts",
    ),
    _same(
        "full caches on both sides",
        "test_small_caches.py",
        "requests queue on both sides",
    ),
    Combination(
        "both sides full of what the other has no room for",
        EXACT,
        f"{_E2E}/test_small_caches.py",
        "test_sides_that_are_full_of_each_others_prompts_make_room",
    ),
    Combination(
        "`MultiConnector` with a second connector",
        EXACT,
        f"{_E2E}/test_by_hand.py",
        "test_push_beside_another_connector",
    ),
    Combination(
        "block sizes that differ",
        "refused request by request, with the reason; a recipe with two is refused before",
        f"{_E2E}/test_by_hand.py",
        "test_pair_of_two_block_sizes_is_refused_request_by_request",
    ),
    Combination(
        "FP8 KV caches with other scales",
        "refused in the handshake",
        "tests/v1/kv_connector/unit/test_nixl_kv_scales.py",
        "test_a_peer_with_other_scales_is_refused",
        patch="nixl-compare-the-scales-of-quantized-kv-caches",
    ),
    Combination(
        "decode of several pipeline stages",
        "refused at start",
        _UNIT,
        "test_decode_in_stages_is_refused",
        patch=_CONNECTOR,
    ),
    Combination(
        "`bidirectional_kv_xfer`",
        "refused at start",
        _UNIT,
        "test_bidirectional_transfer_is_refused",
        patch=_CONNECTOR,
    ),
    Combination(
        "another KV layout or kernel block size",
        "refused request by request, with the reason",
        _UNIT,
        "test_other_kernel_blocks_or_layouts_are_refused",
        patch=_CONNECTOR,
    ),
)


def page() -> str:
    rows = [f"| {each.what} | {each.happens} | {each.shown_by} |" for each in COMBINATIONS]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), "utf-8")
