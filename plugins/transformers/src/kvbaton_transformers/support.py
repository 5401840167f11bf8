"""Which models can be served: decoders with full attention.  Everything else is refused, with what is missing.

Two questions.  :func:`check` asks a configuration, without weights and before any worker starts.  :func:`probe` asks a built model
(or its weightless skeleton) by running two tokens through it and watching what it does with its cache; the answer is also
the shape of the cache to allocate.
"""
