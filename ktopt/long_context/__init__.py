"""Long contexts as one calls them from Python: a config, a model that attends to blocks, and a session with its cache."""
