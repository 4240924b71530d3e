"""The version of this package."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("atoll")
except PackageNotFoundError:  # runs from a source tree that is not installed
    __version__ = "0"
