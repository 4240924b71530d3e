"""For the tests of plugins and of scripts: contracts that an implementation must keep, and runs inside a test.

`codecs`, `reducers`, `outer` and `payloads` are contract suites: subclass one, and say what is to be tested. `run`
starts a server and sites.
"""
