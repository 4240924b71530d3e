"""A worker's session with the server: join, heartbeats, tickets, retries, the ranks of one worker, and leaving."""
