"""Prompts that leave the free blocks of an engine's KV cache in random order. Pure: sends nothing.

vLLM takes blocks from the front of a queue, and gives back at its end what its prefix cache may use
again. So each block gets a prompt of its own, and all prompts come again in random order: they find
their blocks in the cache, and give them back in that order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

Prompt = list[int]

# Prompts of one request; more would fill a CPU engine's queue to no end.
AT_ONCE: Final = 64
# A prompt's number is written in two tokens that every vocabulary has and that mean nothing.
_ZERO, _ONE = 3, 4


def batches(blocks: int, block_tokens: int, seed: int) -> Iterator[list[Prompt]]:
    """Requests to send one after the other, each with so many prompts, for one token each.

    A prompt a block: a few are no longer cached when they come again, for each prompt in work also
    has a block that it fills in part. They take the place of others, and no block is left out.
    """
    prompts = [_prompt(number, block_tokens) for number in range(blocks)]
    again = prompts.copy()
    random.Random(seed).shuffle(again)  # noqa: S311 - an order, and the same one every time
    for each in (prompts, again):
        for first in range(0, len(each), AT_ONCE):
            yield each[first : first + AT_ONCE]


def _prompt(number: int, block_tokens: int) -> Prompt:
    """A block's worth of tokens and one more: that block is in the prefix cache, and the next
    one, which is not full, is none of it."""
    digits = [_ONE if number >> bit & 1 else _ZERO for bit in range(block_tokens)]
    return [*digits, _ZERO]
