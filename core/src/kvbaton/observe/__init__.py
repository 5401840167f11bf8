"""What is seen of a runtime from outside: metrics, logs, traces.  Ordinary observers (:mod:`kvbaton.hooks`)."""
