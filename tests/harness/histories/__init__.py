"""Random histories: a real server and real workers in one thread, over a virtual clock, network and disk.

`story.play(seed)` plays one; `tools/histories.py` plays many.
"""
