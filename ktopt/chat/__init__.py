"""`ktopt chat`: a conversation with a model in a terminal."""
