"""HTTP between workers and servers: typed calls, resumable part transfers, published objects, and TLS."""
