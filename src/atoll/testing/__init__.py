"""Helpers for tests of plugins and scripts.

`codecs`, `reducers`, `outer` and `payloads` are contract suites: to test your implementation, subclass a suite and name
the implementation in it. `run` starts a server and sites inside a test.
"""
