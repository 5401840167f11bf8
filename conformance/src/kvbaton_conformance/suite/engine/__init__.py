"""The engine level: a ``StageEngine`` alone."""
