"""A disk that fails at the nth thing done to it: the process dies, the power goes, or it is full.

`Disk` takes the place of what Python writes through (`io.open` and functions of `os`) for the files
below one folder. It keeps, for files and for folders, what has been flushed: after a power cut,
that alone is sure to be there.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

OPEN = io.open
Fault = Callable[[Callable[[], Any]], None]


class Node:
    """A file or folder, under whatever name: what is flushed of it."""

    def __init__(self, path: Path) -> None:
        self.flushed: Any  # its bytes, or its entries
        self.entries: dict[str, Node] = {}  # of a folder, flushed or not
        if path.is_dir():
            self.entries = {child.name: Node(child) for child in path.iterdir()}
            self.flushed = dict(self.entries)
        else:
            self.flushed = path.read_bytes()

    @property
    def is_folder(self) -> bool:
        return isinstance(self.flushed, dict)


class FaultyFile(io.FileIO):
    disk: Disk

    def write(self, data: Any) -> int:
        self.disk.about_to("write", self.name, lambda: super(FaultyFile, self).write(half(data)))
        return super().write(data)


def half(data: Any) -> Any:
    view = memoryview(data).cast("B")
    return view[: len(view) // 2]


class Disk:
    """Below `root`, `fault` is called instead of the `moment`th operation; 0: never.

    `fault` gets a function that does the operation by half where that is possible (a write).
    """

    def __init__(
        self, root: Path, moment: int = 0, fault: Callable[[Callable[[], Any]], None] | None = None
    ):
        self.root, self.moment, self.fault = root, moment, fault
        self.done: list[str] = []  # the operations so far
        self.tree = Node(root)
        self.watch: Callable[[], None] = lambda: None

    def about_to(
        self, operation: str, path: Any, by_half: Callable[[], Any] = lambda: None
    ) -> None:
        name = Path(os.fspath(path)).relative_to(self.root)
        self.watch()
        self.done.append(f"{operation} {name}")
        if len(self.done) == self.moment and self.fault:
            self.fault(by_half)

    # --- what is flushed -------------------------------------------------------------------------

    def node(self, path: Path) -> Node:
        node = self.tree
        for part in path.relative_to(self.root).parts:
            node = node.entries[part]
        return node

    def after_power_cut(self, target: Path, *, names: bool, data: bool) -> None:
        """Write to `target` what is there after a power cut: what was flushed, and of the rest
        the new `names`, the new `data`, or neither. Data that was never flushed is half there."""
        paths = [path for path in self.root.rglob("*") if path.is_file()]
        written = {id(self.node(path)): path.read_bytes() for path in paths}

        def content(node: Node) -> bytes:
            current = written.get(id(node), node.flushed)
            return current if data else node.flushed or bytes(half(current))

        def restore(node: Node, path: Path) -> None:
            if not node.is_folder:
                path.write_bytes(content(node))
                return
            path.mkdir()
            for name, child in (node.entries if names else node.flushed).items():
                restore(child, path / name)

        restore(self.tree, target)

    # --- in place of Python's functions ----------------------------------------------------------

    def open(
        self, file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any
    ) -> Any:
        if isinstance(file, int) or not self.holds(file) or not set(mode) & set("wax+"):
            return OPEN(file, mode, buffering, *rest, **named)
        path = Path(file)
        if not path.exists() or "w" in mode:
            self.about_to("open", path)
        created = not path.exists()
        raw = FaultyFile(path, mode.replace("b", "").replace("t", ""))
        raw.disk = self
        if created:
            node = Node(path)
            self.node(path.parent).entries[path.name] = node
        if buffering == 0:
            return raw
        binary = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, *rest, **named)

    def fsync(self, real: Any, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if self.holds(path):
            self.about_to("fsync", path)
            node = self.node(path)
            node.flushed = dict(node.entries) if node.is_folder else path.read_bytes()
        real(descriptor)

    def mkdir(self, real: Any, path: Any, *rest: Any, **named: Any) -> None:
        if self.holds(path) and not Path(path).exists() and Path(path).parent.exists():
            self.about_to("mkdir", path)
            real(path, *rest, **named)
            self.node(Path(path).parent).entries[Path(path).name] = Node(Path(path))
        else:
            real(path, *rest, **named)

    def rename(self, real: Any, old: Any, new: Any, **named: Any) -> None:
        if self.holds(old):
            self.about_to("rename", old)
            real(old, new, **named)
            old, new = Path(old), Path(new)
            node = self.node(old.parent).entries.pop(old.name)
            self.node(new.parent).entries[new.name] = node
        else:
            real(old, new, **named)

    def remove(self, real: Any, path: Any, *, dir_fd: int | None = None) -> None:
        folder = Path() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        whole = folder / path
        if self.holds(whole) and os.path.lexists(whole):
            self.about_to("remove", whole)
            real(path, dir_fd=dir_fd)
            del self.node(whole.parent).entries[whole.name]
        else:
            real(path, dir_fd=dir_fd)

    def holds(self, path: Any) -> bool:
        return Path(os.fspath(path)).is_relative_to(self.root)

    @contextmanager
    def in_place(self) -> Iterator[Disk]:
        replaced = {
            "fsync": self.fsync,
            "mkdir": self.mkdir,
            "rename": self.rename,
            "replace": self.rename,
            "remove": self.remove,
            "unlink": self.remove,
            "rmdir": self.remove,
        }
        with mock.patch("io.open", self.open), mock.patch("builtins.open", self.open):
            patches = [
                mock.patch.object(os, name, _calling(function, getattr(os, name)))
                for name, function in replaced.items()
            ]
            for patch in patches:
                patch.start()
            try:
                yield self
            finally:
                for patch in patches:
                    patch.stop()


def _calling(function: Any, real: Any) -> Any:
    return lambda *arguments, **named: function(real, *arguments, **named)


def killed(by_half: Callable[[], Any]) -> None:
    by_half()
    os._exit(9)


def full(by_half: Callable[[], Any]) -> None:
    by_half()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def in_a_fork(action: Callable[[], Any]) -> bool:
    """Do `action` in a process of its own; True if it came to its end, False if it was killed."""
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 9), f"the process ended with {code}"
        return code == 0
    code = 1
    try:
        action()
        code = 0
    finally:
        os._exit(code)


def copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
