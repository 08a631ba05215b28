"""Stands in for a Docker daemon in tests of the launcher, on a socket in a folder.

    fake_docker.py FOLDER             serves FOLDER/docker.sock until it is ended
    fake_docker.py ssh HOSTS ARGS     what `ssh` would be: reaches the daemon of HOSTS/NAME

It answers the calls that the launcher makes, as version 1.41 of the API has them, and is stricter
than a daemon: a field, a parameter or a type that is not known here is an error. Containers are
processes of this machine without a file system of their own. In FOLDER lie

    images.json      labels by image
    broken.json      words that a container's name ends with: what its start fails with
    slow             seconds that each start takes
    requests.jsonl   every request, as it came
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

VERSION = "1.41"


class Map:
    """A schema of objects whose keys are free."""

    def __init__(self, value: Any) -> None:
        self.value = value


class OneOf:
    """A schema of certain words."""

    def __init__(self, *words: str) -> None:
        self.words = words


CREATE = {
    "Image": str,
    "Entrypoint": [str],
    "Cmd": [str],
    "Env": [str],
    "Labels": Map(str),
    "HostConfig": {
        "NetworkMode": OneOf("host"),
        "IpcMode": OneOf("host", "private"),
        "Init": bool,
        "ShmSize": int,
        "LogConfig": {"Type": OneOf("json-file"), "Config": Map(str)},
        "Mounts": [
            {"Type": OneOf("bind", "volume"), "Source": str, "Target": str, "ReadOnly": bool}
        ],
        "DeviceRequests": [{"Count": int, "Capabilities": [[str]]}],
        "Devices": [{"PathOnHost": str, "PathInContainer": str, "CgroupPermissions": str}],
        "CapAdd": [OneOf("IPC_LOCK")],
        "Ulimits": [{"Name": OneOf("memlock", "stack"), "Soft": int, "Hard": int}],
        "CpusetCpus": str,
    },
}
# By method and path: the parameters of the query.
CALLS: dict[tuple[str, str], dict[str, type]] = {
    ("GET", "/version"): {},
    ("GET", "/images/{name}/json"): {},
    ("POST", "/containers/create"): {"name": str},
    ("GET", "/containers/json"): {
        **{"all": bool, "limit": int, "size": bool, "trunc_cmd": bool, "filters": str}
    },
    ("GET", "/containers/{name}/json"): {},
    ("GET", "/containers/{name}/logs"): {
        **{"stdout": bool, "stderr": bool, "follow": bool, "timestamps": bool},
        **{"tail": str, "since": int},
    },
    ("PUT", "/containers/{name}/archive"): {"path": str},
    ("POST", "/containers/{name}/start"): {},
    ("POST", "/containers/{name}/kill"): {"signal": str},
    ("DELETE", "/containers/{name}"): {"v": bool, "force": bool, "link": bool},
}
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]+")


class Refusal(Exception):
    """An answer that says what is wrong."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check(value: Any, schema: Any, where: str) -> None:
    """Raises where a value is not of the schema."""
    if isinstance(schema, dict):
        check(value, dict, where)
        for key, each in value.items():
            if key not in schema:
                raise Refusal(400, f"{where}: there is no field {key}")
            check(each, schema[key], f"{where}.{key}")
    elif isinstance(schema, list):
        check(value, list, where)
        for each in value:
            check(each, schema[0], f"{where}[]")
    elif isinstance(schema, Map):
        check(value, dict, where)
        for key, each in value.items():
            check(each, schema.value, f"{where}.{key}")
    elif isinstance(schema, OneOf):
        if value not in schema.words:
            raise Refusal(400, f"{where}: {value!r} is none of {schema.words}")
    elif type(value) is not schema:
        raise Refusal(400, f"{where}: {value!r} is not of type {schema.__name__}")


@dataclass
class Container:
    """One container, and what it has said."""

    id: str
    name: str
    config: dict[str, Any]
    root: Path
    popen: subprocess.Popen[bytes] | None = None
    said: list[tuple[str, bytes]] = field(default_factory=list)
    is_silent: bool = False
    files: list[str] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def start(self) -> None:
        words = [*self.config.get("Entrypoint", ()), *self.config.get("Cmd", ())]
        for path in self.files:
            words = [word.replace(f"/{path}", str(self.root / path)) for word in words]
        env = dict(each.split("=", 1) for each in self.config.get("Env", ()))
        # The first two are the image's; by the last tests find what belongs to them.
        own = {name: os.environ[name] for name in ("PATH", "HOME", "XDG_STATE_HOME")}
        self.popen = subprocess.Popen(
            words,
            env=own | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, args=(self.popen,), daemon=True).start()

    def _listen(self, popen: subprocess.Popen[bytes]) -> None:
        for line in popen.stdout or ():
            now = time.time_ns()
            at = datetime.fromtimestamp(now // 10**9, UTC)
            self.said.append((f"{at:%Y-%m-%dT%H:%M:%S}.{now % 10**9:09d}Z", line))
        popen.wait()
        self.is_silent = True

    def end(self) -> None:
        if self.popen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()

    def inspected(self) -> dict[str, Any]:
        code = 0 if self.popen is None or self.is_running else self.popen.returncode
        return {
            "Id": self.id,
            "Name": f"/{self.name}",
            "Config": {
                "Tty": False,
                **{name: self.config.get(name) for name in ("Image", "Entrypoint", "Cmd")},
                **{name: self.config.get(name) for name in ("Env", "Labels")},
            },
            "HostConfig": self.config.get("HostConfig", {}),
            "State": {
                "Status": "running" if self.is_running else "exited" if self.popen else "created",
                "Running": self.is_running,
                "OOMKilled": False,
                "ExitCode": 128 - code if code < 0 else code,
            },
        }


class Daemon:
    """What a daemon knows and does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.containers: dict[str, Container] = {}
        self.lock = threading.RLock()

    def setting(self, name: str, default: Any) -> Any:
        path = self.folder / name
        return json.loads(path.read_text()) if path.is_file() else default

    def image(self, name: str) -> dict[str, Any]:
        images = self.setting("images.json", {})
        if name not in images:
            raise Refusal(404, f"No such image: {name}")
        return {"Id": "sha256:1", "RepoTags": [name], "Config": {"Labels": images[name]}}

    def create(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        check(body, CREATE, "body")
        if "Image" not in body:
            raise Refusal(400, "no image")
        if not NAME.fullmatch(name):
            raise Refusal(400, f"Invalid container name ({name})")
        self.image(body["Image"])
        for mount in body.get("HostConfig", {}).get("Mounts", ()):
            if mount["Type"] == "bind" and not Path(mount["Source"]).exists():
                raise Refusal(
                    400,
                    'invalid mount config for type "bind": bind source path does not exist: '
                    + mount["Source"],
                )
        with self.lock:
            for other in self.containers.values():
                if other.name == name:
                    raise Refusal(
                        409,
                        f'Conflict. The container name "/{name}" is already in use by container '
                        f'"{other.id}".',
                    )
            made = Container(secrets.token_hex(32), name, body, self.folder / "roots" / name)
            self.containers[made.id] = made
        return {"Id": made.id, "Warnings": []}

    def find(self, name: str) -> Container:
        for each in self.containers.values():
            if name in (each.id, each.name):
                return each
        raise Refusal(404, f"No such container: {name}")

    def listed(self, filters: str) -> list[dict[str, Any]]:
        wanted = json.loads(filters or "{}")
        check(wanted, {"label": [str]}, "filters")
        labels = dict(each.split("=", 1) for each in wanted.get("label", ()))
        return [
            {
                "Id": each.id,
                "Names": [f"/{each.name}"],
                "Image": each.config["Image"],
                "Labels": each.config.get("Labels", {}),
                "State": "running" if each.is_running else "exited",
            }
            for each in list(self.containers.values())
            if labels.items() <= each.config.get("Labels", {}).items()
        ]

    def put(self, name: str, path: str, packed: bytes) -> None:
        container = self.find(name)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(container.root / path.lstrip("/"), filter="data")
            container.files += [member.name for member in archive if member.isfile()]

    def start(self, name: str) -> None:
        container = self.find(name)
        time.sleep(self.setting("slow", 0))
        for word, message in self.setting("broken.json", {}).items():
            if container.name.endswith(word):
                raise Refusal(500, message)
        with self.lock:
            if name in self.containers:
                container.start()

    def kill(self, name: str, number: str) -> None:
        container = self.find(name)
        if container.popen is None or not container.is_running:
            raise Refusal(409, f"Container {name} is not running")
        container.popen.send_signal(getattr(signal, number))

    def remove(self, name: str, force: bool) -> None:
        with self.lock:
            container = self.find(name)
            if container.is_running and not force:
                raise Refusal(409, "You cannot remove a running container")
            del self.containers[container.id]
            container.end()


class Handler(BaseHTTPRequestHandler):
    """Takes requests apart, and refuses those that the API has not."""

    protocol_version = "HTTP/1.1"
    daemon: Daemon

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_POST = do_PUT = do_DELETE = do_GET

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self.dispatch(body)
        except Refusal as refusal:
            self.reply(refusal.status, {"message": str(refusal)})

    def dispatch(self, body: bytes) -> None:
        url = urlsplit(self.path)
        is_json = self.headers.get("Content-Type") == "application/json"
        with self.daemon.lock, (self.daemon.folder / "requests.jsonl").open("a") as file:
            told = {"call": f"{self.command} {self.path}", "body": None}
            file.write(json.dumps(told | ({"body": json.loads(body)} if is_json else {})) + "\n")
        path = url.path.removeprefix(f"/v{VERSION}")
        if path == url.path and path != "/version":
            raise Refusal(400, f"{path}: not of version {VERSION}")
        for (method, pattern), parameters in CALLS.items():
            match = re.fullmatch(pattern.replace("{name}", "(?P<name>[^/]+(?::[^/]+)?)"), path)
            if method == self.command and match:
                query = self.query(url.query, parameters)
                self.call(pattern, match.groupdict().get("name", ""), query, body)
                return
        raise Refusal(404, "page not found")

    def query(self, text: str, parameters: dict[str, type]) -> dict[str, str]:
        query = dict(parse_qsl(text, strict_parsing=bool(text)))
        for name, value in query.items():
            if name not in parameters:
                raise Refusal(400, f"there is no parameter {name}")
            kind = parameters[name]
            if kind is int and not re.fullmatch(r"-?\d+", value):
                raise Refusal(400, f"{name}: {value!r} is no whole number")
            if kind is bool and value not in ("0", "1", "True", "False"):
                raise Refusal(400, f"{name}: {value!r} is not true or false")
        return query

    def call(self, pattern: str, name: str, query: dict[str, str], body: bytes) -> None:
        daemon = self.daemon
        match self.command, pattern:
            case "GET", "/version":
                self.reply(200, {"ApiVersion": VERSION, "MinAPIVersion": "1.24"})
            case "GET", "/images/{name}/json":
                self.reply(200, daemon.image(name))
            case "POST", "/containers/create":
                self.reply(201, daemon.create(query["name"], json.loads(body)))
            case "GET", "/containers/json":
                self.reply(200, daemon.listed(query.get("filters", "")))
            case "GET", "/containers/{name}/json":
                self.reply(200, daemon.find(name).inspected())
            case "GET", "/containers/{name}/logs":
                self.logs(daemon.find(name), query)
            case "PUT", _:
                daemon.put(name, query["path"], body)
                self.reply(200, None)
            case "POST", "/containers/{name}/start":
                daemon.start(name)
                self.reply(204, None)
            case "POST", "/containers/{name}/kill":
                daemon.kill(name, query["signal"])
                self.reply(204, None)
            case _:
                daemon.remove(name, query.get("force") in ("1", "True"))
                self.reply(204, None)

    def reply(self, status: int, body: Any) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def logs(self, container: Container, query: dict[str, str]) -> None:
        since = int(query.get("since", 0))
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.docker.raw-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent = 0
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                is_silent = container.is_silent
                for stamp, text in container.said[sent:]:
                    sent += 1
                    if datetime.fromisoformat(stamp).timestamp() < since:
                        continue
                    entry = f"{stamp} ".encode() + text
                    frame = b"\x01\0\0\0" + len(entry).to_bytes(4) + entry
                    self.wfile.write(f"{len(frame):x}\r\n".encode() + frame + b"\r\n")
                if is_silent:
                    break
                time.sleep(0.02)
            self.wfile.write(b"0\r\n\r\n")


class Server(ThreadingUnixStreamServer):
    """Does not mind that a client that was killed hears no more."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def serve(folder: Path) -> None:
    address = folder / "docker.sock"
    address.unlink(missing_ok=True)
    daemon = Daemon(folder)
    server = Server(str(address), type("Bound", (Handler,), {"daemon": daemon}))

    def stop(*_: object) -> None:
        # As a daemon ends: its containers with it.
        for container in daemon.containers.values():
            container.end()
        address.unlink(missing_ok=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)
    (folder / "ready").touch()
    server.serve_forever()


def ssh(hosts: Path, words: list[str]) -> int:
    """Between standard input and output and the socket of the host that the words name."""
    *_, host, command = words
    address = hosts / host / "docker.sock"
    if command != "docker system dial-stdio" or not address.exists():
        sys.stderr.write(f"ssh: connect to host {host} port 22: Connection refused\n")
        return 255
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(address))

        def send() -> None:
            while chunk := os.read(0, 65536):
                peer.sendall(chunk)
            peer.shutdown(socket.SHUT_WR)

        threading.Thread(target=send, daemon=True).start()
        while chunk := peer.recv(65536):
            os.write(1, chunk)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "ssh":
        sys.exit(ssh(Path(sys.argv[2]), sys.argv[3:]))
    serve(Path(sys.argv[1]))
