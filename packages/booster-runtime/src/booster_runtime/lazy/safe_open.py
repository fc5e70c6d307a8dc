"""Stands in for ``safetensors.safe_open`` while a context is open, so that ``from_pretrained`` reads nothing.

transformers, diffusers and timm open files by it and take each tensor whole; they get lazy ones, and the files are read
when the model is boosted.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from booster_runtime.checkpoint.safetensors_file import SafetensorsFile
from booster_runtime.lazy.files import FileRead, empty_like

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from typing_extensions import Self

    from booster_runtime.lazy.recorder import Recorder


@contextmanager
def lazy_files(recorder: Recorder) -> Iterator[None]:
    """Let ``safe_open`` return lazy tensors within the body, wherever a module has imported it already.

    A module that is imported meanwhile keeps the stand-in, which then opens files as the original does. So it does in
    other threads: what they open is not this context's model.
    """
    import safetensors

    original: Any = safetensors.safe_open
    owner = threading.get_ident()

    def open_lazily(filename: Any, framework: str = "pt", *args: Any, **kwargs: Any) -> Any:
        opened = original(filename, framework, *args, **kwargs)
        device = kwargs.get("device", args[0] if args else "cpu")
        if (
            not recorder.is_open
            or threading.get_ident() != owner
            or framework not in ("pt", "torch", "pytorch")
            or str(device) != "cpu"
        ):
            return opened
        return _LazyFile(opened, Path(filename).resolve(), recorder)

    _replace_everywhere(original, open_lazily)
    try:
        yield
    finally:
        _replace_everywhere(open_lazily, original)


def _replace_everywhere(old: Any, new: Any) -> None:
    """Let each imported module's ``safe_open`` be another function."""
    for module in list(sys.modules.values()):
        # `None` bars an import, and anything may stand in for a module. Not `getattr`, which would import lazy ones.
        if isinstance(module, ModuleType) and vars(module).get("safe_open") is old:
            module.safe_open = new  # type: ignore[attr-defined]


class _LazyFile:
    """What ``safe_open`` returns, with lazy tensors in it."""

    def __init__(self, opened: Any, path: Path, recorder: Recorder) -> None:
        self._opened = opened
        self._path = path
        self._recorder = recorder
        file = SafetensorsFile(path)
        self._metas = file.tensors
        file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def get_tensor(self, name: str) -> torch.Tensor:
        read = FileRead(self._recorder.files, self._path, name, self._metas[name])
        return self._recorder.record_source("a tensor of a file", read, empty_like(read.meta))

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self._opened.keys()}  # noqa: SIM118 - no dict, it has no iterator

    def get_slice(self, name: str) -> _LazySlice:
        return _LazySlice(self._opened.get_slice(name), self, name)


class _LazySlice:
    """What ``get_slice`` returns, with lazy tensors in it."""

    def __init__(self, opened: Any, file: _LazyFile, name: str) -> None:
        self._opened = opened
        self._file = file
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._file.get_tensor(self._name)
        return tensor if index is Ellipsis else tensor[index].clone()
