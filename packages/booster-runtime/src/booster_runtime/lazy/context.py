"""`LazyInitContext`: models built inside have no values until they are boosted or materialized.

What is replaced while a context is open is in this file, too: an initialiser that loops, and what transformers opens
files with.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from booster_core.checkpoint_io import checkpoint_io_class
from booster_core.errors import ConfigError, LazyInitError
from booster_runtime.lazy.files import record_read
from booster_runtime.lazy.recorder import Recorder
from booster_runtime.lazy.tensor import DEVICE, LazyTensor, recorder_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from typing_extensions import Self

    from booster_core.checkpoint_io import ModelFiles

_DEQUANTIZED = ("fp8", "mxfp4")
"""What `CheckpointIO.open_model` reads the values of."""
_OPEN: list[Recorder] = []
"""The recording of the context that the process is in, if any."""


class LazyInitContext:
    """Builds models without memory: construction is recorded, and done when the model is boosted.

    Inside of the ``with`` block, tensors that a model makes for its parameters and buffers have shapes and no values.
    `Booster.boost`, under any plugin, or `materialize` replays their construction; values and the state of torch's
    random generators are then what they would be without the context, bit for bit. transformers' ``from_pretrained`` of
    a local folder inside of the block records which file each tensor comes from, and reads it then. An optimizer may
    be built from the model's parameters before; ``model.to(dtype)``, tying and further initialisation may follow the
    block.

    What can't be recorded runs at once, with real values, and is counted in ``run_eagerly``.

    Args:
        default_device: Where tensors are made that do not name a device, and drawn; a function is called for it at
            once, such as ``get_current_device``. Torch's default device when ``None``.

    Raises:
        ConfigError: If ``default_device`` is not a device with memory of its own.
        LazyInitError: On entering, if the process is inside of such a context already.
    """

    def __init__(
        self, default_device: torch.device | str | int | Callable[[], torch.device | str | int] | None = None
    ) -> None:
        self.default_device = None if default_device is None else _device_of(default_device)
        self.recorder = Recorder()
        self._stack = ExitStack()

    @property
    def run_eagerly(self) -> dict[str, int]:
        """How often each operation ran at once, with real values, because it could not be recorded."""
        return dict(self.recorder.run_eagerly)

    def __enter__(self) -> Self:
        if _OPEN:
            msg = "`LazyInitContext` is entered inside of another one. One context may hold any number of models."
            raise LazyInitError(msg)
        if not self.recorder.is_open:
            msg = "This `LazyInitContext` was used already. Make a new one for each `with` block."
            raise LazyInitError(msg)
        with ExitStack() as stack:
            _OPEN.append(self.recorder)
            stack.callback(_OPEN.clear)
            stack.enter_context(_recording(self.recorder))
            if self.default_device is not None:
                stack.enter_context(self.default_device)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self.recorder.is_open = False


def _device_of(asked: Any) -> torch.device:
    """Return the device that ``default_device`` stands for."""
    device = torch.device(asked() if callable(asked) and not isinstance(asked, type) else asked)
    if device.type == "meta":
        msg = "`default_device='meta'` has no values to initialise. Leave it out: the model takes no memory."
        raise ConfigError(msg)
    return device


@contextmanager
def continued(model: nn.Module) -> Iterator[None]:
    """Record what is added to a lazy model within the body, as if its context were open; for any other do nothing."""
    recorders = {
        id(tensor.lazy_recorder): tensor.lazy_recorder
        for tensor in model.parameters()
        if isinstance(tensor, LazyTensor)
    }
    if _OPEN or len(recorders) != 1:
        yield
        return
    (recorder,) = recorders.values()
    recorder.is_open = True
    _OPEN.append(recorder)
    try:
        with _recording(recorder):
            yield
    finally:
        _OPEN.clear()
        recorder.is_open = False


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operation to the recorder, also those that no lazy tensor takes part in."""

    def __init__(self, recorder: Recorder, files: _RecordedFiles) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._files = files

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._files.replace()  # transformers may have been imported since: it builds models before it opens files
        if func is DEVICE:
            return args[0].lazy_device
        if LazyTensor in types:
            return recorder_of((args, kwargs)).dispatch(func, args, kwargs or {})
        return self._recorder.dispatch(func, args, kwargs or {})


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    """Record what the body does with tensors."""
    files = _RecordedFiles(recorder)
    files.replace()
    try:
        with _recorded_trunc_normal(recorder), _Mode(recorder, files):
            yield
        files.check_read()
    finally:
        files.restore()


@contextmanager
def _recorded_trunc_normal(recorder: Recorder) -> Iterator[None]:
    """Record initialisers that loop until their values fit as one operation each.

    Without this they would be right as well, but every turn of the loop would replay what its values depend on.
    """
    original: Any = getattr(torch.nn.init, "_no_grad_trunc_normal_", None)
    if original is None:
        yield
        return

    def trunc_normal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, LazyTensor):
            result: torch.Tensor = original(tensor, *args, **kwargs)
            return result
        recorder.record_call("torch.nn.init.trunc_normal_", original, tensor, *args, **kwargs)
        return tensor

    torch.nn.init._no_grad_trunc_normal_ = trunc_normal
    try:
        yield
    finally:
        torch.nn.init._no_grad_trunc_normal_ = original


class _RecordedFiles:
    """Lets transformers' ``from_pretrained`` get lazy tensors, until `restore`.

    Weights that are released in 8 or 4 bits come as the values that they stand for, so that ranges of them can be read:
    transformers fills a model without quantization. Other threads open files as ever: what they read is not this
    context's model.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._owner = threading.get_ident()
        self._modeling: Any = None
        self._originals: dict[str, Any] = {}
        self._is_dequantized = self._is_awaited = False
        self._folders: dict[Path, ModelFiles] = {}

    def replace(self) -> None:
        """Replace in transformers' own module, once that is imported, what opens files and what chooses a quantizer."""
        modeling: Any = sys.modules.get("transformers.modeling_utils")
        if self._modeling is None and hasattr(modeling, "safe_open"):
            self._modeling = modeling
            for name, own in (("safe_open", self._open), ("get_hf_quantizer", self._choose_quantizer)):
                if hasattr(modeling, name):
                    self._originals[name] = getattr(modeling, name)
                    setattr(modeling, name, own)

    def restore(self) -> None:
        """Put the originals back."""
        for name, original in self._originals.items():
            setattr(self._modeling, name, original)

    def check_read(self) -> None:
        """Raise where a quantized model was read past this object: without its scales."""
        if self._is_awaited:
            msg = (
                "The weights of this model are quantized, and transformers has read them by another way than "
                "safetensors files of a local folder. Leave out `disable_mmap`, or call `from_pretrained` outside of "
                "`LazyInitContext` with a `quantization_config` that has `dequantize=True`."
            )
            raise LazyInitError(msg)

    def _choose_quantizer(self, config: Any, asked: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.check_read()
        places = [each for each in (config, config.get_text_config(decoder=True)) if _method_of(each) is not None]
        is_own = threading.get_ident() == self._owner
        self._is_dequantized = self._is_awaited = is_own and bool(places) and _method_of(places[0]) in _DEQUANTIZED
        if self._is_dequantized:
            asked = None
            for place in places:
                vars(place).pop("quantization_config", None)  # the text model's configuration may be the model's
        return self._originals["get_hf_quantizer"](config, asked, *args, **kwargs)

    def _open(self, filename: Any, framework: str = "pt", *args: Any, **kwargs: Any) -> Any:
        opened = self._originals["safe_open"](filename, framework, *args, **kwargs)
        device = kwargs.get("device", args[0] if args else "cpu")
        is_torch = framework in ("pt", "torch", "pytorch")
        if threading.get_ident() == self._owner and is_torch and str(device) == "cpu":
            path, self._is_awaited = Path(filename), False
            if not self._is_dequantized:
                return _LazyFile(opened, checkpoint_io_class().open_model(path.resolve()), self._recorder)
            folder = path.absolute().parent  # where the scales are, perhaps in another file; links lead elsewhere
            if folder not in self._folders:
                self._folders[folder] = checkpoint_io_class().open_model(folder, dequantized=True)
            return _LazyFile(opened, self._folders[folder], self._recorder)
        return opened


def _method_of(config: Any) -> str | None:
    """Return how the weights are quantized that a model's configuration belongs to."""
    settings = getattr(config, "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return getattr(method, "value", method)


class _LazyFile:
    """What ``safe_open`` returns, with lazy tensors in it.

    Args:
        opened: The file, as transformers opens it.
        files: Its tensors and perhaps those of others in its folder, by the names that they have here.
        recorder: The recording.
    """

    def __init__(self, opened: Any, files: ModelFiles, recorder: Recorder) -> None:
        self.opened = opened
        self.files = files
        self._recorder = recorder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.opened.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opened, name)

    def keys(self) -> list[str]:
        names = {key if key in self.files.tensors else key.removesuffix("_blocks"): None for key in self.opened.keys()}  # noqa: SIM118 - no dict
        return [name for name in names if name in self.files.tensors]

    def get_tensor(self, name: str) -> torch.Tensor:
        return record_read(self._recorder, self.files, name)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: self.get_tensor(name) for name in self.keys()}

    def get_slice(self, name: str) -> _LazySlice:
        return _LazySlice(self, name)


class _LazySlice:
    """What ``get_slice`` returns, with lazy tensors in it."""

    def __init__(self, file: _LazyFile, name: str) -> None:
        self._file = file
        self._name = name
        self._meta = file.files.tensors[name]

    def get_shape(self) -> list[int]:
        return list(self._meta.shape)

    def get_dtype(self) -> str:
        if self._meta.dtype == torch.float32:  # also where it is quantized in the file
            return "F32"
        name: str = self._file.opened.get_slice(self._name).get_dtype()
        return name

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = self._file.get_tensor(self._name)
        return tensor if index is Ellipsis else tensor[index].clone()
