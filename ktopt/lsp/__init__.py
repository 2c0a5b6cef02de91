"""`ktopt lsp`: a language server for rule files. Findings as one types, completion, hover, hints, and fixes.

server.py speaks the protocol and keeps what is open; analysis.py has each text checked, as `ktopt check` does; cursor.py says where
in a text a cursor stands, from the lines around it, so that completion works while the file doesn't parse. Each of the other files
answers one kind of request from these, without knowing of the protocol's connection. pygls comes with the extra `ktopt[lsp]`;
nothing else of ktopt imports this package.
"""
