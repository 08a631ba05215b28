"""Prompts that scatter a cache, against a model of the queue that vLLM takes free blocks from."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import pytest

from pdlaunch.bench import scatter

BLOCK = 32


class Pool:
    """Free blocks as vLLM's block pool keeps them: cached ones go to the back, others to the front,
    and a prompt that is cached takes its blocks from wherever they are."""

    def __init__(self, blocks: int) -> None:
        # vLLM keeps block 0 for itself.
        self.free = deque(range(1, blocks))
        self.cached: dict[tuple[int, ...], int] = {}

    def take(self, count: int) -> list[int]:
        taken = [self.free.popleft() for _ in range(count)]
        self.cached = {key: block for key, block in self.cached.items() if block not in taken}
        return taken

    def serve(self, prompts: list[scatter.Prompt]) -> int:
        """Prompts of one request, at once; how many were in the cache."""
        hits, held = 0, []
        for prompt in prompts:
            key = tuple(prompt[:BLOCK])
            if key in self.cached:
                hits += 1
                self.free.remove(self.cached[key])
                held.append((self.cached[key], *self.take(len(prompt) // BLOCK)))
            else:
                first, second = self.take(1 + len(prompt) // BLOCK)
                self.cached[key] = first
                held.append((first, second))
        for first, second in held:
            self.free.appendleft(second)
            self.free.append(first)
        return hits


def runs(blocks: list[int]) -> int:
    """Ranges of consecutive blocks."""
    return 1 + sum(after != before + 1 for before, after in pairwise(blocks))


@pytest.mark.parametrize("blocks", [512, 768])
@pytest.mark.parametrize("in_work", [1, 7, scatter.AT_ONCE])
def test_free_blocks_lie_scattered_over_the_whole_cache(blocks: int, in_work: int) -> None:
    pool = Pool(blocks)
    hits = 0
    for batch in scatter.batches(blocks, BLOCK, seed=1):
        for first in range(0, len(batch), in_work):
            hits += pool.serve(batch[first : first + in_work])
    assert hits > blocks / 2
    order = list(pool.free)
    assert len(order) == blocks - 1
    for first in range(0, len(order) - 62, 63):
        assert runs(order[first : first + 63]) > 50
    # Not only near each other: far apart, too.
    apart = sum(abs(after - before) for before, after in pairwise(order)) / len(order)
    assert apart > blocks / 5


def test_a_fresh_cache_is_not_scattered() -> None:
    assert runs(Pool(768).take(63)) == 1


@pytest.mark.parametrize("block_tokens", [32, 128])
def test_a_prompt_fills_one_block_and_is_like_no_other(block_tokens: int) -> None:
    batches = list(scatter.batches(600, block_tokens, seed=1))
    prompts = [prompt for batch in batches for prompt in batch]
    assert {len(prompt) for prompt in prompts} == {block_tokens + 1}
    assert len({tuple(prompt[:block_tokens]) for prompt in prompts}) == len(prompts) // 2
    assert max(map(len, batches)) <= scatter.AT_ONCE
