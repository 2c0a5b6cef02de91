"""Running an optimized model: text piece by piece, and what it took in time and memory."""
