"""Codecs: how updates, and differences between versions, are written as bytes."""
