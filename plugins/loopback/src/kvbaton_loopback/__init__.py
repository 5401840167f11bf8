"""The in-process reference transport of kvbaton."""
