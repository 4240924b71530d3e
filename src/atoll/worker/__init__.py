"""What a site runs: its session with the server, the exchange of models, the loops of scripts, and answers to tasks."""
