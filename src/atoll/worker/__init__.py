"""The worker of a site: its session with the server, model exchange, training loops of scripts, and task answers."""
