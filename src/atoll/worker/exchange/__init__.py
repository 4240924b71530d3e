"""The exchange of a worker with the server: download versions of the global model, and form and send updates.

Also the files that a site keeps between rounds.
"""
