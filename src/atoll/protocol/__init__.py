"""The HTTP interface as both sides know it: routes, messages and the OpenAPI document."""
