"""The router: an OpenAI-compatible HTTP proxy that sends each request to a replica that holds its text."""
