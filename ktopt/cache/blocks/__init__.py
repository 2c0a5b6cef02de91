"""A context in blocks of tokens: how a block is laid out, where blocks are kept, and what is known of them."""
