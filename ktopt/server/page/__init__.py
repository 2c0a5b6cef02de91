"""The page at /, a static file."""
