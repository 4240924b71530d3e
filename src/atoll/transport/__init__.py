"""HTTP between workers and servers: typed calls, resumable transfers of parts, objects under references, and TLS."""
