"""The version of this package, in one place."""

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("atoll")
except PackageNotFoundError:  # run from a source tree that was never installed
    VERSION = "0"
