"""The router as rendered for a cluster, with a stand-in for the Kubernetes API: it finds engines by
their labels, is ready with one of each role only, and forgets an engine whose pod goes."""

from __future__ import annotations

import http.server
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from pdlaunch import engine, recipe_loader
from pdlaunch.console import Terminal
from pdlaunch.planner import ModelLocation
from pdlaunch.render import cluster, kubernetes

NAMESPACE = "serving"
# Each pod has an address of its own, and all engines have one port.
ADDRESSES = {"router": "127.0.0.9", "prefill": "127.0.0.2", "decode": "127.0.0.3"}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Api(http.server.ThreadingHTTPServer):
    """Lets one list and watch the pods of one namespace, as the rendered Role does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ApiHandler)
        self.events: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue()
        self.refused: list[str] = []


class ApiHandler(Handler):
    server: Api

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if asked.path != f"/api/v1/namespaces/{NAMESPACE}/pods":
            self.server.refused.append(self.path)
            self.answer(403, {"kind": "Status", "status": "Failure", "code": 403})
        elif "watch" not in parse_qs(asked.query):
            found = {"kind": "PodList", "apiVersion": "v1", "items": []}
            self.answer(200, found | {"metadata": {"resourceVersion": "1"}})
        else:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while (event := self.server.events.get()) is not None:
                line = json.dumps({"type": event[0], "object": event[1]}).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()


class Engine(http.server.ThreadingHTTPServer):
    """Answers as much as the router asks of an engine, and keeps the requests."""

    daemon_threads = True

    def __init__(self, address: str) -> None:
        super().__init__((address, cluster.ENGINE_PORT), EngineHandler)
        self.requests: list[dict[str, Any]] = []


class EngineHandler(Handler):
    server: Engine

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": "m"}]} if "models" in self.path else {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(json.loads(body))
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        choices = [{"index": 0, "text": "hello", "finish_reason": "stop"}]
        given = {"kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "p"}}
        self.answer(200, {"choices": choices, "usage": usage} | given)


@contextmanager
def serving(server: http.server.HTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def templates() -> dict[str, dict[str, Any]]:
    """The rendered pods, by component."""
    recipe = recipe_loader.load(recipe_loader.find("qwen3-0.6b-gpu"), ()).recipe
    settings = cluster.Settings("small", NAMESPACE, "image", "side-channel")
    model = ModelLocation(recipe.model, is_local=False)
    plan = cluster.planned(recipe, settings, engine.planned("cuda"), model)
    return {
        document.body["metadata"]["labels"][cluster.COMPONENT]: document.body["spec"]["template"]
        for document in kubernetes.documents(recipe, plan, settings)
        if document.body["kind"] == "Deployment"
    }


def pod(templates: dict[str, dict[str, Any]], role: str, *, ready: bool = True) -> dict[str, Any]:
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": role,
            "namespace": NAMESPACE,
            "resourceVersion": "2",
            "labels": templates[role]["metadata"]["labels"],
        },
        "spec": {"containers": []},
        "status": {"phase": "Running", "podIP": ADDRESSES[role], "conditions": [condition]},
    }


@contextmanager
def router(templates: dict[str, dict[str, Any]], api: Api, folder: Path) -> Iterator[None]:
    """The rendered command, as the pod would run it."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{api.server_port}"}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "users": [{"name": "it", "user": {}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    (container,) = templates["router"]["spec"]["containers"]
    argv = [word.replace("$(POD_IP)", ADDRESSES["router"]) for word in container["args"]]
    program = engine.ensure("cpu", Terminal()).router
    with (folder / "router.log").open("w") as log:
        process = subprocess.Popen(
            [str(program), *argv],
            env={**os.environ, "KUBECONFIG": str(folder / "kubeconfig")},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until(holds: Callable[[], bool], what: str, within_s: float = 60) -> None:
    deadline_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.2)


def get(path: str) -> tuple[int, dict[str, Any]]:
    try:
        found = httpx.get(f"http://{ADDRESSES['router']}:{cluster.ROUTER_PORT}{path}", timeout=5)
        content = found.json() if path == "/readiness" else {}
        return found.status_code, content
    except httpx.TransportError:
        return 0, {}


def healthy() -> tuple[int, int]:
    """Prefill and decode engines that the router would send requests to."""
    _, content = get("/readiness")
    return tuple(content.get(role, {}).get("healthy", -1) for role in ("prefill", "decode"))


def test_router_follows_the_pods_of_its_deployment(
    templates: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    api = Api()
    engines = {role: Engine(ADDRESSES[role]) for role in ("prefill", "decode")}
    with ExitStack() as stack:
        for server in (api, *engines.values()):
            stack.enter_context(serving(server))
        stack.callback(api.events.put, None)
        stack.enter_context(router(templates, api, tmp_path))

        until(lambda: get("/liveness")[0] == 200, "the router does not start")
        assert get("/readiness")[0] == 503

        stranger = pod(templates, "prefill")
        stranger["metadata"]["labels"] = {"app.kubernetes.io/component": "prefill"}
        api.events.put(("ADDED", stranger))
        api.events.put(("ADDED", pod(templates, "prefill", ready=False)))
        api.events.put(("ADDED", pod(templates, "decode")))
        until(lambda: healthy() == (0, 1), "decode is not found")
        assert get("/readiness")[0] == 503

        api.events.put(("MODIFIED", pod(templates, "prefill")))
        until(lambda: healthy() == (1, 1), "prefill is not found")
        assert get("/readiness")[0] == 200

        answer = httpx.post(
            f"http://{ADDRESSES['router']}:{cluster.ROUTER_PORT}/v1/completions",
            json={"model": "m", "prompt": "Hello", "max_tokens": 3},
        )
        assert answer.status_code == 200
        (for_prefill,) = engines["prefill"].requests
        (for_decode,) = engines["decode"].requests
        assert for_prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert for_decode["kv_transfer_params"]["do_remote_prefill"] is True

        going = pod(templates, "prefill")
        going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        api.events.put(("MODIFIED", going))
        until(lambda: healthy() == (0, 1), "prefill is not forgotten")
        assert get("/readiness")[0] == 503
        assert not api.refused
