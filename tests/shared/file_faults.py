"""Make the k-th file operation of a kind fail, as a disk or its permissions do.

The functions of `os`, `open` and file objects are replaced by ones that count and may raise, so it runs anywhere. What
C++ code opens by itself, as torch does with some files, is not seen. `change_manifest` changes what a step's files say,
`flip_bit` what they hold.
"""

import builtins
import contextlib
import io
import json
import mmap
import os
import pathlib
import threading
from unittest import mock

import xxhash

OPERATIONS = {
    "open": ("open",),
    "stat": ("stat", "lstat", "fstat"),
    "list": ("listdir", "scandir"),
    "read": ("read", "pread", "preadv"),
    "write": ("write", "pwrite", "ftruncate", "truncate"),
    "sync": ("fsync", "fdatasync"),
    "rename": ("rename", "replace"),
    "remove": ("unlink", "remove", "rmdir"),
    "mkdir": ("mkdir",),
}
"""Kinds of operations, and the functions of `os` that are one. ``open``, ``read`` and ``write`` are also what `open`
and its files do; a memory mapping is a ``read``."""


class FileFaults:
    """Count the operations of one kind on files below a folder, and fail one of them; a context manager.

    Args:
        root: The folder.
        operation: One of `OPERATIONS`.
        number: Which one fails, from 1 on; 0 for none.
        code: The number of the error.
        is_lasting: All later ones on the same file fail, too.

    Attributes:
        count: How many operations there were.
        hit: The path of the operation that failed; ``None`` while none did.
    """

    def __init__(self, root, operation, number=0, code=0, *, is_lasting=False):
        self.root, self.operation, self.number, self.code = str(root), operation, number, code
        self.is_lasting = is_lasting
        self.count, self.hit = 0, None
        self._lock = threading.Lock()
        self._patches = contextlib.ExitStack()

    def check(self, path):
        """Count an operation on a path or an open descriptor, and raise where it is to fail."""
        where = _path_of(path)
        if where is None or not (where == self.root or where.startswith(f"{self.root}/")):
            return
        with self._lock:
            self.count += 1
            fails = self.count == self.number or (self.is_lasting and where == self.hit)
            if fails:
                self.hit = where
        if fails:
            raise OSError(self.code, os.strerror(self.code), where)

    def __enter__(self):
        replaced = {getattr(os, name): self._checked(getattr(os, name)) for name in OPERATIONS[self.operation]}
        places = [(os, name) for name in OPERATIONS[self.operation]]
        if self.operation in ("open", "read", "write"):
            replaced[io.open] = self._open
            places += [(io, "open"), (builtins, "open")]
        if self.operation == "read":
            replaced[mmap.mmap] = self._checked(mmap.mmap)
            places.append((mmap, "mmap"))
        accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10 has copies of the functions there
        if accessor is not None:
            places += [(accessor, name) for name, value in vars(accessor).items() if _is_key(value, replaced)]
        for owner, name in places:
            new = replaced[getattr(owner, name)]
            self._patches.enter_context(mock.patch.object(owner, name, staticmethod(new) if owner is accessor else new))
        return self

    def __exit__(self, *_):
        self._patches.close()

    def _checked(self, function):
        def checked(path, *args, **options):
            folder = options.get("dir_fd")
            self.check(path if folder is None else f"{_path_of(folder)}/{os.fspath(path)}")
            return function(path, *args, **options)

        return checked

    def _open(self, file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, closefd=True, opener=None):
        if self.operation == "open" and not isinstance(file, int):
            self.check(file)
        raw = _File(self, file, mode.replace("b", "").replace("t", ""), closefd=closefd, opener=opener)
        if buffering == 0:
            return raw
        kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
        buffered = kind(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode
        return text


class _File(io.FileIO):
    """A file whose reads and writes are counted."""

    def __init__(self, faults, *args, **options):
        self._faults = faults
        super().__init__(*args, **options)

    def _check(self, operation):
        if self._faults.operation == operation:
            self._faults.check(self.fileno())

    def readinto(self, buffer):
        self._check("read")
        return super().readinto(buffer)

    def readall(self):
        self._check("read")
        return super().readall()

    def write(self, content):
        self._check("write")
        return super().write(content)


def _is_key(value, functions):
    try:
        return value in functions
    except TypeError:
        return False


def _path_of(path):
    """Return a path as text, of an open descriptor that of its file; ``None`` for what is neither."""
    if isinstance(path, int):
        try:
            return os.readlink(f"/proc/self/fd/{path}")  # noqa: PTH115 - a `Path` would be one more call of `os`
        except OSError:
            return None
    try:
        return os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - as above
    except TypeError:
        return None


def flip_bit(path, position):
    """Flip a bit of the byte at a position in a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)


def change_manifest(folder, change):
    """Change what a step's manifest says by a function of its content, and the checksum in it."""
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    content.pop("xxh3")
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    (folder / "manifest.json").write_text(json.dumps({**content, "xxh3": xxhash.xxh3_64_hexdigest(text.encode())}))
