"""What a model remembers of the tokens it has seen: layers of transformers' Cache whose memory kernels read and write in place."""
