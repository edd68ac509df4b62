"""The gateway: OpenAI-compatible HTTP on one side, requests on their way through the workers on the other."""
