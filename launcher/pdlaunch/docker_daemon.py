"""Speaks to Docker daemons through Docker's SDK, and says what their errors mean. Plans nothing.

The SDK is an extra, and slow to import: only `backend` imports this module, where it is wanted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

from docker import APIClient
from docker.context import ContextAPI
from docker.errors import DockerException, ImageNotFound, NotFound
from requests.exceptions import RequestException

from pdlaunch.containers import LAUNCH_LABEL
from pdlaunch.errors import PdError, UsageError
from pdlaunch.recipe import SSH

# What the SDK raises, and what it lets through of the libraries under it.
FAILURES = (DockerException, RequestException, OSError)

_TIMEOUT_S = 120
# What a daemon says when it cannot make or start a container, and what helps.
_REMEDIES: Mapping[str, str] = {
    "could not select device driver": "install the NVIDIA container toolkit on that host",
    "nvidia-container-cli": "see that nvidia-smi works on that host",
    "/dev/infiniband": "install EFA's driver on that host, or set efa_interfaces to 0",
    "bind source path does not exist": "put the model on that host, at the same path",
    "error setting rlimit": "that daemon may not raise limits itself: start it with more rights",
    "permission denied": "join the group docker on that host and log in again",
}


def here(environ: Mapping[str, str] = os.environ) -> str:
    """The endpoint of this machine's daemon, found as docker's own client finds it.

    Raises:
        UsageError: that client is set to the daemon of another machine.
    """
    endpoint = environ.get("DOCKER_HOST")
    if not endpoint:
        endpoint = str(ContextAPI.kwargs_from_context(environment=dict(environ))["base_url"])
    if not endpoint.startswith("unix://"):
        raise UsageError(
            f"docker's client is set to {endpoint}, which is no socket of this machine",
            where="DOCKER_HOST, or `docker context show`",
            next_step=f"unset it, and name other hosts in the recipe: {SSH}USER@ADDRESS",
        )
    return endpoint


def connect(endpoint: str) -> APIClient:
    """A client of a daemon, which has answered.

    Raises:
        PdError: it does not.
    """
    with explained(f"the Docker daemon at {endpoint} does not answer", endpoint):
        # ssh's own client knows the user's settings, keys and agent.
        return APIClient(base_url=endpoint, version="auto", timeout=_TIMEOUT_S, use_ssh_client=True)


def image_labels(endpoint: str, image: str) -> Mapping[str, str]:
    """The labels of an image on a daemon's host.

    Raises:
        PdError: it is not there, or the daemon does not answer.
    """
    with (
        closing(connect(endpoint)) as client,
        explained(f"cannot look for the image {image}", endpoint),
    ):
        try:
            found = client.inspect_image(image)  # type: ignore[no-untyped-call]
        except ImageNotFound:
            bring = (
                f"docker save {image} | docker -H {endpoint} load"
                if endpoint.startswith(SSH)
                else f"pdlaunch build image --tag {image}"
            )
            raise PdError(
                f"there is no image {image}",
                where=endpoint,
                next_step=f"{bring}; or docker -H {endpoint} pull {image}; "
                "or name another with --set docker.image=",
            ) from None
    return found["Config"].get("Labels") or {}


def remove(
    client: APIClient, label: str, value: str, *, but_of_launch: str | None = None
) -> list[str]:
    """Kill and remove containers by a label; those that would not go, and why.

    but_of_launch: a launch whose containers stay.
    """
    survivors = []
    for each in client.containers(all=True, filters={"label": f"{label}={value}"}):
        if but_of_launch is not None and each["Labels"].get(LAUNCH_LABEL) == but_of_launch:
            continue
        try:
            # With the volumes that have no name.
            client.remove_container(each["Id"], force=True, v=True)
        except NotFound:
            continue
        except FAILURES as error:
            survivors.append(f"container {each['Names'][0].lstrip('/')} ({reason(error)})")
    return survivors


def sweep(endpoint: str, launch_id: str) -> list[str]:
    """Kill and remove what is left of a launch; what would not go, or may still be there."""
    try:
        with closing(connect(endpoint)) as client:
            return [f"{each} at {endpoint}" for each in remove(client, LAUNCH_LABEL, launch_id)]
    except (PdError, *FAILURES):
        return [f"containers at {endpoint}, which does not answer"]


@contextmanager
def explained(what: str, endpoint: str) -> Iterator[None]:
    """The SDK's errors as ours."""
    try:
        yield
    except FAILURES as error:
        why = reason(error)
        remedy = next((text for sign, text in _REMEDIES.items() if sign in why.lower()), None)
        raise PdError(
            f"{what}: {why}",
            where=endpoint,
            next_step=remedy or f"see that it runs and lets you in: docker -H {endpoint} version",
        ) from error


def reason(error: Exception) -> str:
    """What the daemon says, or why it says nothing, in one line."""
    said = getattr(error, "explanation", None) or error
    return " ".join(str(said).split())[:300]
