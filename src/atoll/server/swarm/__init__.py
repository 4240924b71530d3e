"""The server's side of a swarm: it finds out which workers reach each other, and chooses aggregators and checkers."""
