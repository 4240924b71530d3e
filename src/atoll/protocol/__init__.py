"""The HTTP interface of server and workers: routes, messages and the OpenAPI document."""
