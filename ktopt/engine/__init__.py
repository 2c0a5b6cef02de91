"""Requests in, pieces of text out: engines that run a model for whoever asks, in the terminal or over a network."""
