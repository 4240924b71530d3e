"""The HTTP interface at the server: authentication, handlers, and tensors on their way in and out."""
