"""Codecs: encodings of updates, and of differences between versions, as bytes."""
