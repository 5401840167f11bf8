"""What a transport, and the whole hand-off over it, make of a model's KV cache on this machine: ``kvbaton bench``.

A *model* (:mod:`~kvbaton.bench.models`) says how many bytes a token has; *traffic* (:mod:`~kvbaton.bench.traffic`) cuts
a request's worth of them into the segments that a hand-off would have; :mod:`~kvbaton.bench.wire` moves
those between two real processes, and :mod:`~kvbaton.bench.handoffs` hands over whole requests through a runtime.
:mod:`~kvbaton.bench.measured` holds what was found, with what it needs to be read: the machine, and how busy it was.
"""
