"""AutoByte: a communication scheduler for data-parallel training.

``import autobyte.torch as ab`` is what a training script uses; this package
itself does not import PyTorch.
"""

from autobyte._lib import AutoByteError, library_path, version

__all__ = ["AutoByteError", "__version__", "library_path", "version"]


def __getattr__(name: str) -> str:
    if name == "__version__":
        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
