"""Files at URLs: the interface `Storage`, the drivers behind it, and paths to files and folders there."""

from booster_checkpoint.storage.interface import Storage, WriteStream, leaves_folder, storage_for
from booster_checkpoint.storage.location import local_path, scheme_of
from booster_checkpoint.storage.remote_path import RemoteFile, RemotePath, path_at, read_heads

__all__ = [
    "RemoteFile",
    "RemotePath",
    "Storage",
    "WriteStream",
    "leaves_folder",
    "local_path",
    "path_at",
    "read_heads",
    "scheme_of",
    "storage_for",
]
