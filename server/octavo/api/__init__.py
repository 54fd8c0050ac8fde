"""The OpenAI server: routes, request fields, answers, streams, keys, metrics, and the life of the process."""
