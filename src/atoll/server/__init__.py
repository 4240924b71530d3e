"""The server of a run: it receives updates over HTTP, opens and closes rounds, and executes workflows."""
