"""Runs `vllm bench serve` for one line of arguments after another, in one process.

Its imports take longer than many a load. A line of stdin is a JSON list: `serve` or `prompts`, then
arguments of `vllm bench serve`. `serve` sends the requests; `prompts` only says which they would
be. A line of stdout answers with an error or null, and the prompts' tokens or null. The first line
says that the imports are done. What vLLM prints goes to stderr.
"""

import json
import os
import sys

from vllm.benchmarks.datasets import get_samples
from vllm.benchmarks.serve import add_cli_args, main
from vllm.tokenizers import get_tokenizer
from vllm.utils.argparse_utils import FlexibleArgumentParser


def work(verb: str, arguments: list[str]) -> list[list[int]] | None:
    """Do one line's work; the tokens of each prompt where they were asked for."""
    parser = FlexibleArgumentParser(description="vllm bench serve")
    add_cli_args(parser)
    parsed = parser.parse_args(arguments)
    if verb == "serve":
        main(parsed)
        return None
    return [sample.prompt for sample in get_samples(parsed, get_tokenizer(parsed.tokenizer))]


def answer(verb: str, arguments: list[str]) -> tuple[str | None, list[list[int]] | None]:
    """The same; what failed, if anything did."""
    try:
        return None, work(verb, arguments)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}", None


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answers.write("[null, null]\n")
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        answers.write(json.dumps(answer(verb, arguments)) + "\n")
