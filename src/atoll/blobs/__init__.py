"""Blobs: immutable files that travel in parts, among them model files and objects."""
