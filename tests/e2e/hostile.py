"""A peer that means harm. Runs with an engine's Python: hostile.py WHAT JSON.

`garbage`: malformed frames for the side channel at `host`:`port`.
`listening`: exits with 0 if that side channel still answers a handshake.
`notifications`: `count` messages that are none, to the engine there.
`fuzz`: `count` broken frames and `count` broken notifications, to `prefill` and `decode`; sealed
with the secret, where there is one.
`registrations`: shakes hands with `prefill` and `decode` as a decode engine would, with memory and
a side channel of its own, and sends what it should not, for the requests in `victims`.
"""

import dataclasses
import json
import os
import random
import sys
import threading
import time
from typing import Any

import msgspec
import torch
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handshake import (
    request_metadata,
    side_channel_secret,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    GET_META_MSG,
    NixlAgentMetadata,
    NixlHandshakePayload,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.streaming import wire
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.streaming.auth import MessageAuth
from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

RANDOM = random.Random(20261130)


def _socket(context: Any, host: str, port: int, kind: int) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 500)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.connect(f"tcp://{host}:{port}")
    return socket


def _payload(host: str, port: int) -> NixlHandshakePayload:
    context = zmq.Context()
    socket = _socket(context, host, port, zmq.REQ)
    try:
        # With the secret of the environment, where there is one.
        return request_metadata(socket, f"{host}:{port}", 0, 0, timeout_s=10).payload
    finally:
        socket.close()
        context.term()


def garbage(host: str, port: int) -> None:
    context = zmq.Context()
    frames = [
        [b""],
        [b"", b""],
        [b"", os.urandom(40)],
        [b"", msgspec.msgpack.encode((GET_META_MSG, 99, 99))],
        [b"", msgspec.msgpack.encode((GET_META_MSG, 0, 0)), b"more", b"and more"],
        [b"", msgspec.msgpack.encode((GET_META_MSG, "zero"))],
        [b"", b"\xff" * 100_000],
    ]
    for each in frames:
        socket = _socket(context, host, port, zmq.DEALER)
        socket.send_multipart(each)
        time.sleep(0.1)
        socket.close()
    context.term()


def listening(host: str, port: int) -> None:
    _payload(host, port)


class Peer:
    """A NIXL agent that is no engine's."""

    def __init__(self) -> None:
        self.name = f"hostile-{os.getpid()}"
        self.agent = NixlWrapper(self.name, nixl_agent_config(backends=["UCX"]))

    def meet(self, engine: dict[str, Any]) -> str:
        """Load the agent of an engine, so that it can be sent notifications."""
        payload = _payload(engine["host"], engine["port"])
        metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
        name = self.agent.add_remote_agent(metadata.agent_metadata)
        return name.decode() if isinstance(name, bytes) else name

    def tell(self, agent: str, message: bytes) -> None:
        self.agent.send_notif(agent, notif_msg=message)
        self.agent.get_new_notifs()

    def listen(self, like: dict[str, Any], engine_id: str) -> tuple[int, NixlAgentMetadata]:
        """Answer handshakes as a copy of an engine with memory here: the port, and the engine."""
        payload = _payload(like["host"], like["port"])
        theirs = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=NixlAgentMetadata)
        size = max(theirs.block_lens) * theirs.num_blocks
        self.memory = torch.zeros(size, dtype=torch.uint8)
        address = self.memory.data_ptr()
        self.agent.register_memory(self.agent.get_reg_descs([(address, size, 0, "")], "DRAM"))
        mine = dataclasses.replace(
            theirs,
            engine_id=engine_id,
            agent_metadata=self.agent.get_agent_metadata(),
            kv_caches_base_addr=[address] * len(theirs.kv_caches_base_addr),
        )
        encoded = msgspec.msgpack.encode(
            NixlHandshakePayload(
                compatibility_hash=payload.compatibility_hash,
                agent_metadata_bytes=msgspec.msgpack.encode(mine),
            )
        )
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            while True:
                identity, *_ = socket.recv_multipart()
                stamp = msgspec.msgpack.encode(time.perf_counter())
                socket.send_multipart((identity, b"", encoded, stamp))

        threading.Thread(target=serve, daemon=True).start()
        return port, theirs


def notifications(engine: dict[str, Any], count: int) -> None:
    peer = Peer()
    agent = peer.meet(engine)
    for number in range(count):
        junk = os.urandom(RANDOM.randrange(200))
        shapes = (
            junk,
            b"\xff\xfe" + junk,
            b"no separator",
            b"PUSH_REG:" + junk,
            b"PDS1:" + junk,
            b"HB:" + junk,
            b"PDA1:" + junk,
        )
        peer.tell(agent, shapes[number % len(shapes)])
    # Until they have left.
    time.sleep(1)


def _broken(message: bytes) -> bytes:
    """A message with some of its bytes changed, left out or added."""
    broken = bytearray(message)
    for _ in range(RANDOM.randrange(1, 6)):
        at = RANDOM.randrange(len(broken) + 1)
        change = RANDOM.randrange(4)
        if change == 0 and at < len(broken):
            broken[at] = RANDOM.randrange(256)
        elif change == 1:
            del broken[at : at + RANDOM.randrange(1, 9)]
        elif change == 2:
            broken[at:at] = RANDOM.randbytes(RANDOM.randrange(1, 9))
        else:
            broken = broken[:at] or bytearray(b"x")
    return bytes(broken)


def fuzz(prefill: dict[str, Any], decode: dict[str, Any], count: int) -> None:
    context = zmq.Context()
    request = msgspec.msgpack.encode((GET_META_MSG, 0, 0))
    for engine in (prefill, decode):
        socket = _socket(context, engine["host"], engine["port"], zmq.DEALER)
        for _ in range(count // 2):
            frames = [_broken(request) for _ in range(RANDOM.choice((1, 1, 1, 2, 5)))]
            socket.send_multipart([b"", *frames] if RANDOM.random() < 0.8 else frames)
        socket.close()
    context.term()

    peer = Peer()
    auth = MessageAuth(side_channel_secret(), peer.name)
    messages = [
        wire.encode(each)
        for each in (
            wire.Register(
                "r", "t", "p", "e", "127.0.0.1", 9, 1, 32, 64, bytes(32), [wire.Blocks(0, [1, 2])]
            ),
            wire.Cancel("r", "t", "p", b"metadata"),
            wire.Alive(["r"], ["t"]),
            wire.Written("r"),
            wire.Commit("r", 3),
            wire.Failed("r", "why"),
            wire.Fenced("r"),
        )
    ]
    for engine in (prefill, decode):
        agent = peer.meet(engine)
        for number in range(count // 2):
            message = _broken(messages[number % len(messages)])
            # Some with a seal that is right, some with one that is broken too.
            kind = RANDOM.random()
            if kind < 0.7:
                message = auth.seal(agent, message)
            elif kind < 0.9:
                message = _broken(auth.seal(agent, message))
            peer.tell(agent, message)
    time.sleep(2)


def registrations(prefill: dict[str, Any], decode: dict[str, Any], victims: list[Any]) -> None:
    peer = Peer()
    to_prefill, to_decode = peer.meet(prefill), peer.meet(decode)
    mine = f"hostile-engine-{os.getpid()}"
    port, victim_engine = peer.listen(decode, mine)
    blocks = victim_engine.num_blocks

    def register(**changes: Any) -> bytes:
        fields: dict[str, Any] = {
            "registration_id": f"hostile-{RANDOM.random()}",
            "transfer_id": "nobody",
            "peer_request_id": "",
            "engine_id": mine,
            "host": "127.0.0.1",
            "port": port,
            "tp_size": 1,
            "block_size": 32,
            "num_tokens": 64,
            "digest": bytes(32),
            "groups": [wire.Blocks(0, [1, 2])],
        }
        return bytes(wire.encode(wire.Register(**(fields | changes))))

    for victim in victims:
        of_victim = {
            "transfer_id": victim["transfer_id"],
            "peer_request_id": victim.get("peer_request_id", ""),
            "num_tokens": victim["num_tokens"],
        }
        ids = list(range(-(-victim["num_tokens"] // 32)))
        theirs = {"engine_id": victim_engine.engine_id, **decode}
        to_tell = [
            # Somebody else's transfer, with a guess of the prompt.
            register(**of_victim, groups=[wire.Blocks(0, ids)]),
            # Blocks that do not exist, also of itself.
            register(**of_victim, groups=[wire.Blocks(0, [blocks + 5 + i for i in ids])]),
            register(groups=[wire.Blocks(0, [2**31 - 1, 2**31 - 2])]),
            # In the name of the victim's decode engine, and of its registration.
            register(**of_victim, **theirs, groups=[wire.Blocks(0, ids)]),
            register(**of_victim, **theirs, registration_id=victim["registration_id"]),
            register(**of_victim, registration_id=victim["registration_id"]),
            # Another host, where nobody is.
            register(**of_victim, host="127.0.0.1", port=9),
            # Positions that do not fit.
            register(**of_victim, groups=[wire.Blocks(32, ids)]),
            register(**of_victim, groups=[wire.Blocks(0, ids), wire.Blocks(0, ids)]),
            register(**of_victim, tp_size=64),
            register(**of_victim, block_size=64),
        ]
        # Each of them again, as a replay would.
        for message in (*to_tell, *to_tell):
            peer.tell(to_prefill, message)
            peer.tell(to_decode, message)
        for answer in (
            wire.Written(victim["registration_id"]),
            wire.Commit(victim["registration_id"], 0),
            wire.Fenced(victim["registration_id"]),
            wire.Failed(victim["registration_id"], "hostile"),
        ):
            for _ in range(3):
                peer.tell(to_decode, wire.encode(answer))
                peer.tell(to_prefill, wire.encode(answer))
    # P tries the addresses it was given.
    until = time.monotonic() + 8
    while time.monotonic() < until:
        peer.agent.get_new_notifs()
        time.sleep(0.05)
    written = int(peer.memory.count_nonzero())
    print(json.dumps({"bytes_got": written}))


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    sys.stdout.flush()
    # NIXL's threads need not end well.
    os._exit(0)
