"""Blobs: immutable files that are sent in parts. Model files and published objects are blobs."""
