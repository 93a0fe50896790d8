"""Ports for servers that must be told one, or that come back to theirs."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from penstock.clock import SystemClock


def free_ports(count: int) -> list[int]:
    """Find ports that nobody has, below those that the system gives to whoever asks for any.

    So they are still free when a server that was killed comes back, or another takes its place.
    """
    first, above = 10_000, 32_768
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if given.exists():
        lowest = int(given.read_text().split()[0])
        above = lowest if lowest > first + 1_000 else above
    begin = int(SystemClock().random() * (above - first))
    with ExitStack() as stack:
        ports: list[int] = []
        for at in range(above - first):
            port = first + (begin + at) % (above - first)
            listening = stack.enter_context(socket.socket())
            with suppress(OSError):
                listening.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == count:
                break
    assert len(ports) == count, "there are no free ports"
    return ports
