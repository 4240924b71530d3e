"""The server of a run: it takes updates over HTTP, decides about rounds and runs workflows."""
