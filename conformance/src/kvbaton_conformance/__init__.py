"""The conformance kit of kvbaton."""
