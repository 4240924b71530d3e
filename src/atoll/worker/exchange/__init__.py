"""Pulling versions, forming and sending updates, and the files that a site keeps between rounds."""
