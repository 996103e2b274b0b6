"""Disks that are full, break or stop answering, for tests that run as root: real file systems on real block devices.

`full_disk(bytes)` mounts a tmpfs of that size. `loop_disk(image_bytes, room_bytes)` mounts ext4 on a loop device whose
image lies on a tmpfs, which may have less room than the image: then the disk turns out to be full when blocks that were
given out are written. `cut` makes reads fail with EIO, `break_down` reads and writes.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

_FIFREEZE, _FITHAW, _SHUTDOWN = 0xC0045877, 0xC0045878, 0x8004587D


def _call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _mount(stack: ExitStack, *arguments: str) -> None:
    _call("mount", *arguments)
    stack.callback(_call, "umount", "--lazy", arguments[-1])


@contextmanager
def full_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of so many bytes, in memory."""
    with ExitStack() as stack:
        folder.mkdir()
        _mount(stack, "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder))
        yield folder


@dataclass
class LoopDisk:
    """A file system on a loop device."""

    path: Path
    image: Path

    def cut(self, num_bytes: int) -> None:
        """Reads of what the device had beyond so many bytes fail with EIO."""
        os.truncate(self.image, num_bytes)

    def break_down(self) -> None:
        """The file system gives up, as after an error of its device: all reads and writes fail with EIO."""
        descriptor = os.open(self.path, os.O_RDONLY)
        fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", 2))
        os.close(descriptor)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No write to the file system ends before the block does, or `thaw` is called."""
        self._call(_FIFREEZE)
        try:
            yield
        finally:
            self.thaw()

    def thaw(self) -> None:
        with suppress(OSError):  # it was not frozen any more
            self._call(_FITHAW)

    def _call(self, request: int) -> None:
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, request, 0)
        finally:
            os.close(descriptor)


@contextmanager
def loop_disk(folder: Path, image_bytes: int, room_bytes: int) -> Iterator[LoopDisk]:
    with ExitStack() as stack:
        back = stack.enter_context(full_disk(folder, room_bytes))
        image, path = back / "image", folder.with_name(folder.name + "-disk")
        image.touch()
        os.truncate(image, image_bytes)
        _call("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-E", "nodiscard", str(image))
        device = _call("losetup", "--find", "--show", str(image))
        stack.callback(_call, "losetup", "--detach", device)
        path.mkdir()
        _mount(stack, device, str(path))
        yield LoopDisk(path, image)


@pytest.fixture
def needs_mounts() -> None:
    """Skips where this process may not mount file systems."""
    if os.geteuid() != 0 or not os.path.exists("/dev/loop-control"):
        pytest.skip("mounting file systems needs root and loop devices")
