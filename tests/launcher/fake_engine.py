"""Stands in for `vllm serve` and `vllm-router` in tests of the launcher: same flags, same routes.

FAKE_ENGINE in the environment makes it misbehave: words separated by blanks.
    dies=CODE      exits with this code at start, after a log like vLLM's
    deaf           ignores SIGTERM
    mute           never becomes healthy
    no_kv          answers, but counts no KV
    fails          counts transfers that have failed
    close_call     prefers its tokens by less than rounding changes
    slow_decode    answers only a second after it has counted
    slow=SECONDS   takes so long for a request
    orphan         leaves a child in a session of its own, and shared memory, behind
    nixl=BACKEND   moves KV over this, whatever it was told
    later          does all of this only when it is started again
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import Request, urlopen

BYTES_A_PROMPT = 4096
FAILURES = """\
# TYPE vllm:nixl_push_transfers counter
vllm:nixl_push_transfers_total{role="receiver",outcome="failed",reason="aborted"} 1
vllm:nixl_push_transfers_total{role="receiver",outcome="failed",reason="peer_gone"} 2
# TYPE vllm:nixl_push_liveness_failures counter
vllm:nixl_push_liveness_failures_total{role="receiver"} 2
# TYPE vllm:nixl_push_hangs counter
vllm:nixl_push_hangs_total 1
# TYPE vllm:nixl_push_dropped_messages counter
vllm:nixl_push_dropped_messages_total{reason="stray"} 1
"""

NAME = "chatcmpl"
STAMPS = {
    "prefill": (
        *("received", "arrived", "scheduled", "forward_left", "write_begun", "write_done"),
        *("finished", "transfer_done"),
    ),
    "decode": (
        *("received", "arrived", "allocated", "kv_complete", "kv_collected", "kv_noticed"),
        *("scheduled", "token"),
    ),
}
ORPHAN = Path(__file__).with_name("shared_file.py")

program, *argv = sys.argv[1:]
words = [word.partition("=") for word in os.environ.get("FAKE_ENGINE", "").split()]
quirks = {name: value for name, _, value in words}
# Its log goes on when it is started again.
if "later" in quirks and not os.fstat(1).st_size:
    quirks = {}
flags = [(argv[i], argv[i + 1]) for i in range(len(argv) - 1)]
one = dict(flags)
counts = {"bytes": 0, "transfers": 0, "prompts": 0, "running": 0}
is_drained = "PDLAUNCH_STARTS_DRAINED" in os.environ
# The router's: by role, who is asked next; by address, how many requests it has.
turns: dict[str, int] = {}
loads: dict[str, int] = {}
lock = threading.Lock()


def serve() -> None:
    if "dies" in quirks:
        print("(EngineCore pid=7) ERROR 11-29 10:00:00 [core.py:1] ValueError: no such model")
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(int(quirks["dies"]))
    if "deaf" in quirks:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "orphan" in quirks:
        subprocess.Popen([sys.executable, str(ORPHAN), one["--port"]], start_new_session=True)
    instantiate()
    print(f"INFO 11-29 10:00:00 [api.py:1] serving on {one['--port']}", flush=True)
    server = ThreadingHTTPServer((one["--host"], int(one["--port"])), Handler)
    server.daemon_threads = True
    signal_default = signal.getsignal(signal.SIGTERM)
    if signal_default is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        time.sleep(1)


def instantiate() -> None:
    """What NIXL says of its backends."""
    if "--kv-transfer-config" not in one:
        return
    told = json.loads(one["--kv-transfer-config"]).get("kv_connector_extra_config", {})
    backends = [quirks["nixl"]] if "nixl" in quirks else told.get("backends", ["UCX"])
    for backend in backends:
        print(f"2026-11-29 10:00:00 NIXL INFO    _api.py:405 Backend {backend} was instantiated")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(503 if "mute" in quirks or is_drained else 200, "")
        elif self.path == "/pdlaunch/health":
            self.reply(503 if "mute" in quirks else 200, "")
        elif self.path == "/workers":
            self.reply(200, json.dumps({"workers": list(workers())}))
        else:
            self.reply(200, metrics())

    def do_POST(self) -> None:
        global is_drained
        if self.path.startswith("/pdlaunch/"):
            is_drained = self.path == "/pdlaunch/drain"
            self.reply(200, "")
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if program == "vllm-router":
            try:
                for flag in ("--prefill", "--decode"):
                    text = forward(flag, self.path, body)
            except OSError as error:
                self.reply(503, str(error))
                return
        else:
            with lock:
                counts["running"] += 1
            count()
            time.sleep(float(quirks.get("slow", 0)))
            with lock:
                counts["running"] -= 1
            if "slow_decode" in quirks and '"kv_consumer"' in one.get("--kv-transfer-config", ""):
                time.sleep(1)
            stamp()
            text = completion(json.loads(body))
        self.reply(200, text)

    def reply(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


def workers() -> Iterator[dict]:
    """What a router knows: as if it looked at each engine's health all the time."""
    for name, url in flags:
        if name in ("--prefill", "--decode"):
            try:
                with urlopen(f"{url}/health", timeout=5):
                    is_healthy = True
            except OSError:
                is_healthy = False
            yield {
                "url": url,
                "worker_type": name.strip("-"),
                "is_healthy": is_healthy,
                "load": loads.get(url, 0),
            }


def forward(flag: str, path: str, body: bytes) -> str:
    """Send a request to the next healthy engine of a role."""
    with lock:
        role = flag.strip("-")
        healthy = [
            each["url"] for each in workers() if each["worker_type"] == role and each["is_healthy"]
        ]
        if not healthy:
            raise OSError(f"no healthy {role}")
        turns[role] = turns.get(role, 0) + 1
        url = healthy[turns[role] % len(healthy)]
        loads[url] = loads.get(url, 0) + 1
    try:
        with urlopen(Request(url + path, data=body, method="POST")) as response:
            return response.read().decode()
    finally:
        with lock:
            loads[url] -= 1


def count() -> None:
    counts["prompts"] += 1
    if "no_kv" not in quirks:
        counts["bytes"] += BYTES_A_PROMPT
        counts["transfers"] += 1


def stamp() -> None:
    """What a traced engine writes of a request that takes no time."""
    config = json.loads(one.get("--kv-transfer-config", "{}"))
    folder = config.get("kv_connector_extra_config", {}).get("push_trace")
    if not folder:
        return
    side = "prefill" if config["kv_role"] == "kv_producer" else "decode"
    name = f"{NAME}-{counts['prompts']}"
    lines: list[dict] = []
    if counts["prompts"] == 1:
        lines.append(
            {"trace": 1, "side": side, "process": "all", "engine": "e", "pid": os.getpid()}
        )
    for event in STAMPS[side]:
        ids = {"transfer": name, "request": f"{name}-{side}"}
        lines.append({"ns": time.time_ns(), "event": event, "tokens": 7, "write": 0, **ids})
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / f"{side}-{os.getpid()}.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def completion(body: dict) -> str:
    if not body.get("stream"):
        asked = body.get("kv_transfer_params") or {}
        named = {"do_remote_prefill": True} if asked.get("do_remote_decode") else None
        return json.dumps({"choices": [{"text": "Paris"}], "kv_transfer_params": named})
    if "logprobs" in body:
        tops = {"token_id:7": -0.5, "token_id:8": -0.5005 if "close_call" in quirks else -2.5}
        piece = {"choices": [{"text": "Paris", "logprobs": {"top_logprobs": [tops]}}]}
        return f"data: {json.dumps(piece)}\n\ndata: [DONE]\n\n"
    name = f"{NAME}-{counts['prompts']}"
    pieces = [{"id": name, "choices": [{"delta": {"content": text}}]} for text in ("Par", "is")]
    pieces.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    pieces.append({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
    return "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + "data: [DONE]\n\n"


def metrics() -> str:
    config = json.loads(one.get("--kv-transfer-config", "{}"))
    is_prefill = config.get("kv_role") == "kv_producer"
    is_push = config.get("kv_connector") == "NixlPushConnector"
    mover = bool(config) and is_prefill == is_push
    lines = [
        "# TYPE vllm:kv_cache_usage_perc gauge",
        f'vllm:kv_cache_usage_perc{{engine="0"}} {0.25 if counts["running"] else 0}',
        "# TYPE vllm:num_requests_running gauge",
        f'vllm:num_requests_running{{engine="0"}} {counts["running"]}',
        "# TYPE vllm:request_prefill_time_seconds histogram",
        f'vllm:request_prefill_time_seconds_bucket{{le="+Inf"}} {counts["prompts"]}',
        f"vllm:request_prefill_time_seconds_count {counts['prompts']}",
        f"vllm:request_prefill_time_seconds_sum {counts['prompts'] * 0.001}",
        "# TYPE vllm:e2e_request_latency_seconds histogram",
        f'vllm:e2e_request_latency_seconds_bucket{{le="+Inf"}} {counts["prompts"]}',
        f"vllm:e2e_request_latency_seconds_count {counts['prompts']}",
        f"vllm:e2e_request_latency_seconds_sum {counts['prompts'] * 0.001}",
        "# TYPE vllm:prompt_tokens counter",
        f"vllm:prompt_tokens_total {counts['prompts'] * 7}",
        "# TYPE vllm:generation_tokens counter",
        f"vllm:generation_tokens_total {counts['prompts'] * 2}",
        "# TYPE vllm:time_to_first_token_seconds histogram",
        'vllm:time_to_first_token_seconds_bucket{le="0.1"} 0',
        f'vllm:time_to_first_token_seconds_bucket{{le="0.25"}} {counts["prompts"]}',
        f'vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {counts["prompts"]}',
        f"vllm:time_to_first_token_seconds_count {counts['prompts']}",
        f"vllm:time_to_first_token_seconds_sum {counts['prompts'] * 0.2}",
        "# TYPE vllm:cache_config_info gauge",
        'vllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1',
    ]
    if mover:
        lines += [
            "# TYPE vllm:nixl_bytes_transferred histogram",
            f'vllm:nixl_bytes_transferred_bucket{{le="+Inf"}} {counts["transfers"]}',
            f"vllm:nixl_bytes_transferred_count {counts['transfers']}",
            f"vllm:nixl_bytes_transferred_sum {counts['bytes']}",
        ]
    if is_push:
        role, side = ("sender", "before_prefill_end") if is_prefill else ("receiver", "sent")
        lines += [
            "# TYPE vllm:nixl_push_transfers counter",
            f'vllm:nixl_push_transfers_total{{role="{role}",outcome="completed",reason="none"}} '
            f"{counts['transfers']}",
            "# TYPE vllm:nixl_push_registrations counter",
            f'vllm:nixl_push_registrations_total{{side="{side}"}} {counts["transfers"]}',
            "# TYPE vllm:nixl_push_bytes counter",
            f'vllm:nixl_push_bytes_total{{phase="during_prefill"}} {counts["bytes"]}',
        ]
        if "fails" in quirks:
            lines += FAILURES.splitlines()
    return "\n".join(lines) + "\n"


serve()
