"""Judges hosts, ports and the ways between them. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

from pdlaunch.doctor.facts import Deployment, Facts
from pdlaunch.doctor.findings import Finding, error, not_checked, ok, warning
from pdlaunch.planner import ENGINES_ONLY_ENV
from pdlaunch.preparation import can_start
from pdlaunch.recipe_checks import ROLES, is_loopback, named_ports

_FIREWALL = (
    "allow it in the firewalls between the hosts (on EC2: a security group that allows itself), "
    "and check the address"
)


def placement(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Which processes belong to this machine."""
    if deployment is None:
        return
    plan = deployment.plan
    here = [process.name for process in plan.own if process.is_here]
    elsewhere = [
        f"{process.name} on {process.host}" for process in plan.processes if not process.is_here
    ]
    if not any(map(can_start, plan.own)):
        role = plan.own[0].role
        what = f"{role} does not belong" if plan.only else "no role of the recipe belongs"
        yield warning(
            "placement",
            f"{what} to this machine, whose devices and limits were not compared with it: "
            f"{', '.join(elsewhere)}",
            "run pdlaunch doctor on those hosts; if one of them is this machine, say by which "
            f"address: --set {role}.host=ADDRESS",
            where=f"{role}.host",
        )
        return
    yield ok("placement", "; ".join([*([f"here: {', '.join(here)}"] if here else []), *elsewhere]))


def addresses(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Whether peers can use the addresses that the engines would tell them."""
    if deployment is None:
        return
    engines = deployment.plan.engines
    secret = ENGINES_ONLY_ENV[0]
    for role in ROLES:
        hosts = sorted({process.host for process in engines if process.role == role})
        others = [each.host for each in engines if not is_loopback(each.host)]
        for host in hosts:
            if is_loopback(host) and others:
                yield error(
                    "side-channel",
                    f"{role} would tell its peers to reach it at {host}, which means another "
                    f"machine to {others[0]}",
                    "name an address that the other hosts can reach; a host's own name often "
                    "resolves to loopback through /etc/hosts",
                    where=f"{role}.host",
                )
            elif _is_public(host) and not facts.machine.has_side_channel_secret:
                yield warning(
                    "side-channel",
                    f"{host} is a public address, and who reaches the side channel of {role} can "
                    "read and write its KV cache",
                    f"export the same {secret} on every host, or use private addresses",
                    where=f"{role}.host",
                )
            else:
                yield ok("side-channel", f"peers reach {role} at {host}{_guarded(facts, host)}")


def _guarded(facts: Facts, host: str) -> str:
    if facts.machine.has_side_channel_secret:
        return f", and need the {ENGINES_ONLY_ENV[0]} that is set here"
    return "" if is_loopback(host) else f"; so does everybody else there: no {ENGINES_ONLY_ENV[0]}"


def ports(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """The ports that the recipe names for this machine."""
    if deployment is None:
        return
    if deployment.up:
        yield not_checked("ports", f"{', '.join(deployment.up)} runs here and has them")
        return
    for each in facts.unusable_ports:
        remedy = f"name another port, or set {each.key} to null to have a free one chosen"
        if "taken" in each.why:
            remedy = f"stop what holds it, {remedy}"
        yield error("ports", f"port {each.port} {each.why}", remedy, where=each.key)
    kept = facts.machine.ephemeral_ports
    here = {process.role for process in deployment.plan.own if process.is_here}
    named = [
        (".".join(key), port)
        for key, _, first, count in named_ports(deployment.recipe)
        if key[0] in here
        for port in range(first, first + count)
    ]
    for key, port in named:
        if kept is not None and kept[0] <= port <= kept[1]:
            yield warning(
                "ports",
                f"port {port} lies in {kept[0]}-{kept[1]}, which the kernel gives to outgoing "
                "connections: any of them may have it when the engine starts",
                f"name a port below {kept[0]}, or reserve it: "
                f"sysctl net.ipv4.ip_local_reserved_ports={port}",
                where=key,
            )
    if named and not facts.unusable_ports:
        yield ok("ports", f"free: {', '.join(str(port) for _, port in named)}")


def peers(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """Whether processes on other hosts can be reached from here."""
    if deployment is None or facts.peers is None:
        return
    for peer in facts.peers:
        what = "side channel" if peer.is_side_channel else "HTTP port"
        seen = f"{what} {peer.port} of {peer.process} on {peer.host}"
        if peer.problem is None:
            # Proxies and load balancers accept connections for whatever is behind them.
            yield ok("reachability", f"{seen} accepts TCP connections; who listens was not asked")
        elif peer.problem == "refused":
            yield ok("reachability", f"{seen}: the host answers, nothing listens there yet")
        else:
            role = peer.process.rpartition("-")[0] or peer.process
            yield error("reachability", f"{seen}: {peer.problem}", _FIREWALL, where=f"{role}.host")


def proxies(facts: Facts, deployment: Deployment | None) -> Iterator[Finding]:
    """A proxy in the environment must not stand between the processes."""
    machine = facts.machine
    if deployment is None or not machine.proxy:
        return
    bypass = {"no": machine.no_proxy}
    hosts = sorted({process.host for process in deployment.plan.processes})
    through = [host for host in hosts if not proxy_bypass_environment(host, bypass)]
    if through:
        yield warning(
            "proxy",
            f"requests to {', '.join(through)} would go through the proxy "
            f"{_without_credentials(machine.proxy)}",
            f"export NO_PROXY={','.join(filter(None, [machine.no_proxy, *through]))}",
        )
    else:
        yield ok("proxy", "the processes are reached without the proxy")


def _without_credentials(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


def _is_public(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False
