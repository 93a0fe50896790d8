"""A small disk of its own for a test: a tmpfs that only a process of the test has mounted.

It is mounted in a namespace, for which nobody has to be root where the system allows that, and is
reached through that process: nothing is left behind, whatever becomes of the test.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

_CAP_SYS_ADMIN: Final = 21
_STEP_BYTES: Final = 1 << 16


class SmallDisk:
    """A directory on a file system that is soon full."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def fill(self, leave_bytes: int = 0) -> None:
        """Have a file grow until so much is left."""
        handle = os.open(self._ballast, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        try:
            with contextlib.suppress(OSError):
                while (size := self.free_bytes - leave_bytes) > 0:
                    os.write(handle, bytes(min(size, _STEP_BYTES)))
        finally:
            os.close(handle)

    def make_room(self) -> None:
        self._ballast.unlink()


@contextmanager
def small_disk(place: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mount one; skip the test where that can't be done."""
    folder = place / "disk"
    folder.mkdir()
    mount = f'mount -t tmpfs -o size={size_bytes} tmpfs "$0" && echo mounted && exec cat'
    try:
        holder = subprocess.Popen(
            ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError:
        _can_not("there is no unshare")
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        try:
            if holder.stdout.readline() != "mounted\n":
                _can_not(f"no tmpfs can be mounted: {holder.stderr.read().strip()}")
            yield SmallDisk(Path(f"/proc/{holder.pid}/root{folder}"))
        finally:
            holder.stdin.close()


def _can_not(why: str) -> None:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    capabilities = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    if os.environ.get("CI") == "true" and int(capabilities, 16) >> _CAP_SYS_ADMIN & 1:
        pytest.fail(why)
    pytest.skip(why)
