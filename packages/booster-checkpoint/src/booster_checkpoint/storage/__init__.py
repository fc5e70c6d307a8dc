"""Where files are: `Location`, on a disk or at a URL; and the interface `Storage` with the drivers behind it."""

from booster_checkpoint.storage.interface import Storage, WriteStream, storage_for
from booster_checkpoint.storage.location import LocalLocation, Location, StoredLocation, leaves_folder, locate
from booster_checkpoint.storage.open_file import OpenFile

__all__ = [
    "LocalLocation",
    "Location",
    "OpenFile",
    "Storage",
    "StoredLocation",
    "WriteStream",
    "leaves_folder",
    "locate",
    "storage_for",
]
