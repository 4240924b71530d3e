"""Swarms at the server: which worker is reached, and which one holds, aggregates and checks what."""
