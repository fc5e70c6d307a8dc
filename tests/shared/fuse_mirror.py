"""A FUSE file system that shows a folder, for tests: each mount has a page cache of its own, written back late.

Two mounts of one folder behave as two hosts that mount one NFS export: a host that writes a part of a page writes the
whole page back, as it knows it, and a host may see what it has read before. Run as a program::

    python fuse_mirror.py FOLDER MOUNTPOINT

While there is a file ``FOLDER.fails``, reads beyond the number of bytes in it fail, as from a bad disk.

It speaks the kernel's protocol itself, so that nothing has to be installed; it needs root's rights and ``/dev/fuse``.
"""
# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH108, PTH116 - it answers system calls by system calls

import contextlib
import ctypes
import errno
import os
import stat
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path

_MAX_WRITE = 1 << 20
_WRITEBACK_CACHE, _ATOMIC_TRUNC, _BIG_WRITES, _MAX_PAGES = 1 << 16, 1 << 3, 1 << 5, 1 << 22
_IN = struct.Struct("<IIQQIIIHH")
_libc = ctypes.CDLL(None, use_errno=True)


class Mirror:
    """Answers the kernel's requests.

    Args:
        folder: What is shown.
        descriptor: The kernel's end.
    """

    def __init__(self, folder, descriptor):
        self.descriptor = descriptor
        self.paths = {1: str(folder)}
        self.nodes = {str(folder): 1}
        self.next = 2

    def serve(self):
        while True:
            try:
                request = os.read(self.descriptor, _MAX_WRITE + 8192)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            _, opcode, unique, node, *_ = _IN.unpack_from(request)
            call = self.CALLS.get(opcode)
            if opcode in (2, 36, 42):  # forget, interrupt: no answer
                continue
            try:
                answer, code = (
                    (b"", errno.ENOSYS) if call is None else (call(self, node, request[_IN.size :]) or b"", 0)
                )
            except OSError as error:
                answer, code = b"", error.errno or errno.EIO
            except Exception:  # noqa: BLE001 - without an answer, whoever asked would wait for ever
                traceback.print_exc()
                answer, code = b"", errno.EIO
            with contextlib.suppress(FileNotFoundError):  # interrupted meanwhile
                os.write(self.descriptor, struct.pack("<IiQ", 16 + len(answer), -code, unique) + answer)

    # ---- names and attributes

    def child(self, node, name):
        return f"{self.paths[node]}/{os.fsdecode(name.rstrip(bytes(1)))}"

    def attributes(self, path):
        s = os.lstat(path)
        seconds = [int(t) for t in (s.st_atime, s.st_mtime, s.st_ctime)]
        nanos = [ns % 10**9 for ns in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        return struct.pack(
            "<6Q10I", s.st_ino, s.st_size, s.st_blocks, *seconds, *nanos,
            s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def entry(self, path):
        attributes = self.attributes(path)
        if path not in self.nodes:
            self.nodes[path], self.next = self.next, self.next + 1
            self.paths[self.nodes[path]] = path
        return struct.pack("<4Q2I", self.nodes[path], 0, 0, 0, 0, 0) + attributes

    def forget(self, path):
        node = self.nodes.pop(path, None)
        if node is not None:  # the kernel may still ask for it
            self.paths[node] = f"{path} (deleted)"

    def lookup(self, node, data):
        return self.entry(self.child(node, data))

    def get_attributes(self, node, data):
        return struct.pack("<QII", 0, 0, 0) + self.attributes(self.paths[node])

    def set_attributes(self, node, data):
        valid, _, _, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode = struct.unpack_from("<II6Q4I", data)
        path = self.paths[node]
        if valid & 1:
            os.chmod(path, stat.S_IMODE(mode))
        if valid & 8:
            os.truncate(path, size)
        if valid & 48:
            s = os.stat(path)
            times = (atime * 10**9 + atime_ns, mtime * 10**9 + mtime_ns)
            now = time.time_ns()
            kept = (s.st_atime_ns, s.st_mtime_ns)
            os.utime(path, ns=tuple(
                (now if valid & (128 << n) else times[n]) if valid & (16 << n) else kept[n] for n in range(2)
            ))  # fmt: skip
        return self.get_attributes(node, data)

    # ---- folders

    def mkdir(self, node, data):
        path = self.child(node, data[8:])
        os.mkdir(path, struct.unpack_from("<I", data)[0])
        return self.entry(path)

    def unlink(self, node, data):
        path = self.child(node, data)
        os.unlink(path)
        self.forget(path)

    def rmdir(self, node, data):
        path = self.child(node, data)
        os.rmdir(path)
        self.forget(path)

    def rename(self, node, data, skip=8):
        new = struct.unpack_from("<Q", data)[0]
        old_name, new_name = data[skip:].split(b"\0")[:2]
        old, target = self.child(node, old_name), self.child(new, new_name)
        os.rename(old, target)
        self.forget(target)
        for path in [path for path in self.nodes if path == old or path.startswith(f"{old}/")]:
            number = self.nodes.pop(path)
            self.nodes[target + path[len(old) :]] = number
            self.paths[number] = target + path[len(old) :]

    def rename2(self, node, data):
        if struct.unpack_from("<I", data, 8)[0]:
            raise OSError(errno.EINVAL, "no flags")
        self.rename(node, data, 16)

    def opendir(self, node, data):
        return struct.pack("<QII", 0, 0, 0)

    def readdir(self, node, data):
        _, offset, size = struct.unpack_from("<QQI", data)
        found = sorted(os.scandir(self.paths[node]), key=lambda entry: entry.inode())
        content = b""
        for number, entry in enumerate(found[offset:], start=offset + 1):
            name = os.fsencode(entry.name)
            kind = 4 if entry.is_dir() else 8
            packed = struct.pack("<QQII", entry.inode(), number, len(name), kind) + name
            packed += bytes(-len(packed) % 8)
            if len(content) + len(packed) > size:
                break
            content += packed
        return content

    # ---- files

    def new_file(self, path, flags):
        flags &= ~(os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_EXCL | os.O_CREAT)
        # The kernel reads the rest of a page of which a part is written.
        descriptor = os.open(path, flags | (os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY))
        return struct.pack("<QII", descriptor, 0, 0)

    def open_file(self, node, data):
        return self.new_file(self.paths[node], struct.unpack_from("<I", data)[0])

    def create(self, node, data):
        flags, mode = struct.unpack_from("<II", data)
        path = self.child(node, data[16:])
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | (flags & os.O_EXCL), mode))
        entry = self.entry(path)
        return entry + self.new_file(path, flags)

    def read(self, node, data):
        handle, offset, size = struct.unpack_from("<QQI", data)
        with contextlib.suppress(FileNotFoundError):
            if offset + size > int(Path(f"{self.paths[1]}.fails").read_text()):
                raise OSError(errno.EIO, "a bad sector")
        return os.pread(handle, size, offset)

    def write(self, node, data):
        handle, offset, size = struct.unpack_from("<QQI", data)
        return struct.pack("<II", os.pwrite(handle, data[40 : 40 + size], offset), 0)

    def fsync(self, node, data):
        pass

    def release(self, node, data):
        handle = struct.unpack_from("<Q", data)[0]
        os.close(handle)

    def statfs(self, node, data):
        s = os.statvfs(self.paths[1])
        return struct.pack(
            "<5Q4I24x", s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize, s.f_namemax, s.f_frsize, 0
        )

    def init(self, node, data):
        offered = struct.unpack_from("<4I", data)[3]
        flags = offered & (_WRITEBACK_CACHE | _ATOMIC_TRUNC | _BIG_WRITES | _MAX_PAGES)
        return struct.pack("<4I2H2I2HII28x", 7, 31, 1 << 17, flags, 16, 12, _MAX_WRITE, 1, _MAX_WRITE // 4096, 0, 0, 0)[
            :64
        ]

    CALLS = {  # noqa: RUF012 - not changed
        1: lookup, 3: get_attributes, 4: set_attributes, 9: mkdir, 10: unlink, 11: rmdir, 12: rename, 14: open_file,
        15: read, 16: write, 17: statfs, 18: release, 20: fsync, 25: fsync, 26: init, 27: opendir, 28: readdir,
        29: fsync, 30: fsync, 35: create, 38: fsync, 45: rename2,
    }  # fmt: skip


@contextlib.contextmanager
def mounted_mirror(folder, point):
    """Show a folder at another one while the body runs.

    Raises:
        OSError: If that is not possible here.
    """
    command = [sys.executable, __file__, str(folder), str(point)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while not os.path.ismount(point):
            if server.poll() is not None:
                raise OSError(server.stderr.read().strip().splitlines()[-1])
            if time.monotonic() > deadline:
                raise OSError(errno.ETIMEDOUT, "the mirror does not answer")
            time.sleep(0.02)
        yield
    finally:
        subprocess.run(["umount", "-l", str(point)], capture_output=True, check=False)
        server.kill()
        server.wait()
        server.stderr.close()


def main(folder, point):
    descriptor = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if _libc.mount(b"mirror", os.fsencode(point), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    Mirror(Path(folder).resolve(), descriptor).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
