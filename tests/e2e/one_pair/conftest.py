"""The pair that the tests of this folder share."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest

import adapters
from pdlaunch import trace
from serving import TINY, Deployment, Reference, deployed


@pytest.fixture(scope="package")
def pair(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Engines with LoRA adapters, a trace, and a common secret: their messages are sealed.

    The engine that others are compared with comes first, not beside them on two cores.
    """
    folder = tmp_path_factory.mktemp("pair")
    secret = secrets.token_hex(16)
    settings = [
        f"transfer.extra.{trace.SETTING}={folder / 'trace'}",
        # Some tests leave KV that nobody takes, and others look whether all is free.
        "transfer.extra.kv_lease_duration=5",
        # What computes log probabilities is compiled on first use otherwise, for a minute.
        "engine.env.TORCHDYNAMO_DISABLE=1",
        "engine.args.enable-lora=true",
        f"engine.args.max-loras={len(adapters.SAME) + 1}",
        f"engine.args.max-lora-rank={adapters.RANK}",
    ]
    for role, modules in adapters.modules(folder).items():
        settings.append(f"{role}.args.lora-modules={json.dumps(modules)}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NIXL_SIDE_CHANNEL_SECRET", secret)
        with deployed(TINY, "e2e-pair", folder, *settings) as deployment:
            yield deployment
    shown = [
        path
        for path in folder.rglob("*")
        if path.is_file() and secret.encode() in path.read_bytes()
    ]
    assert not shown
