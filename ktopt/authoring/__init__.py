"""Writing rule files: `ktopt init`, `ktopt migrate` and `ktopt fmt`."""
