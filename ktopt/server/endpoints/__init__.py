"""One file an endpoint, or a few that belong together."""
