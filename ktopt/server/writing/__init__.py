"""An engine's events as OpenAI's answers, whole or as chunks of a stream."""
