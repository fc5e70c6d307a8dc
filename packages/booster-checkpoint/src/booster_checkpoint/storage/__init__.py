"""Files at URLs: the interface `Storage`, the drivers behind it, and paths to files and folders there."""

from booster_checkpoint.storage.interface import Storage, WriteStream, leaves_folder, storage_for
from booster_checkpoint.storage.location import LocalLocation, Location, StoredLocation, locate
from booster_checkpoint.storage.remote_path import RemoteFile, RemotePath, path_at, read_heads

__all__ = [
    "LocalLocation",
    "Location",
    "RemoteFile",
    "RemotePath",
    "Storage",
    "StoredLocation",
    "WriteStream",
    "leaves_folder",
    "locate",
    "path_at",
    "read_heads",
    "storage_for",
]
