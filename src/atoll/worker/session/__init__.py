"""A worker's session with the server: join, heartbeats, requests for rounds, retries, and leaving.

Also the ranks of `torch.distributed` that form one worker.
"""
