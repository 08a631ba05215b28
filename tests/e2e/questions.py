"""What the tests ask: prompts of chosen lengths, the same ones in every run.

A question's `salt` keeps it from other askings' prefix caches; it never changes the answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

BLOCK_TOKENS = 32
# Special tokens and the raw bytes lie elsewhere in the tiny model's vocabulary.
_WORDS = range(260, 512)
_SEED = 20261129


@dataclass(frozen=True)
class Question:
    """One request, whichever way it is sent."""

    name: str
    prompt: tuple[int, ...] = ()
    chat: str = ""
    answer_tokens: int = 16
    salt: str = ""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": self.answer_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": self.chat}]
        else:
            body["prompt"] = list(self.prompt)
        if self.salt:
            body["cache_salt"] = self.salt
        return body

    def salted(self, salt: str) -> Question:
        return replace(self, salt=salt)


def words(tokens: int, seed: object) -> tuple[int, ...]:
    """A prompt of so many tokens of the tiny model; another seed, another prompt."""
    chosen = random.Random(f"{_SEED} {seed}")
    return tuple(chosen.choice(_WORDS) for _ in range(tokens))


def _lengths() -> Iterable[int]:
    yield from (1, 2, 3, 5, 7, 13, 17, 50, 100, 150, 200, 300, 700, 1500, 2000, 3000, 4000)
    # Around the ends of blocks; 8, 16, 24 and so on are the ends of 256-token chunks as well.
    for blocks in (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 24, 32, 124):
        end = blocks * BLOCK_TOKENS
        yield from (end - 1, end, end + 1)


COMPLETIONS = tuple(
    Question(f"{tokens} tokens", prompt=words(tokens, tokens)) for tokens in _lengths()
)
CHATS = tuple(
    Question(f"chat {number}", chat=text)
    for number, text in enumerate(
        (
            "hi",
            "What is the capital of France?",
            "Tell me a story about a lighthouse and the winter sea. " * 12,
            "How many rivers flow through this city? " * 40,
        )
    )
)
# Each begins like one of the others, or is all of its beginning: prefix caches answer in part.
HALVES = tuple(
    Question(
        f"{shared} shared tokens of {tokens}",
        prompt=words(of, of)[:shared] + words(tokens - shared, f"half {tokens}"),
    )
    for of, shared, tokens in (
        (64, 32, 65),
        (512, 256, 513),
        (1024, 500, 1024),
        (2000, 1000, 2000),
        (2000, 1024, 1024),
        (1500, 1500, 1501),
    )
)
EVERYTHING = (*COMPLETIONS, *CHATS, *HALVES)


def some(step: int, longest_tokens: int = 4000) -> tuple[Question, ...]:
    """Every so many of all, short ones and long ones up to a length."""
    return tuple(each for each in EVERYTHING[::step] if len(each.prompt) <= longest_tokens)


def salted(questions: Iterable[Question], salt: str) -> tuple[Question, ...]:
    """The same questions, unknown to any prefix cache that has not seen the salt."""
    return tuple(each.salted(salt) for each in questions)
