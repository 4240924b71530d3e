"""Helpers for tests of plugins and scripts.

`contracts` has contract suites: to test your implementation, subclass a suite and name the implementation in it. `run`
starts a server and sites inside a test.
"""
