"""The server's side of the HTTP interface: authentication, request handlers, uploads and downloads."""
