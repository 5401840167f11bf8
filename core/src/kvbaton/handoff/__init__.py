"""The hand-off protocol as three sans-IO machines: source (P), destination (D), coordinator (C).

An event goes in as a method call, a list of frozen effects comes out; no machine has a clock, a socket, a thread or a
callback.  :mod:`~kvbaton.handoff.table` has the phases and transitions, :mod:`~kvbaton.handoff.effects` what a machine
may ask for.  Whoever drives a machine carries out its effects in order.
"""
