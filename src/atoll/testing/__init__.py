"""Helpers for tests of plugins and scripts.

`contracts` has suites of tests that every codec, reducer, outer optimizer and payload type must pass: subclass a suite
and name your implementation in it. `run` starts a server and sites inside a test.
"""
