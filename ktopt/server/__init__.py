"""The HTTP server: OpenAI's API and KTransformers' flags over an engine. `app.py` puts the parts together."""
