"""The server's side of a swarm: track which workers reach each other, and assign aggregation and checks to them."""
