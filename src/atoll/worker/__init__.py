"""The worker side of a site: its session with the server, model exchange, training loops, and answers to tasks."""
