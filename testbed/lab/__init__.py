"""One lab: its sandbox, its network, its processes, and the record of it."""

from importlib.util import find_spec

if find_spec("distutils") is None:
    # Mininet imports distutils, which Python 3.12 took out of the standard library. setuptools puts its own in place by
    # a .pth file, which is read for a virtual environment but not for a directory that is only on PYTHONPATH.
    import _distutils_hack  # type: ignore[import-not-found, import-untyped, unused-ignore]

    _distutils_hack.add_shim()
