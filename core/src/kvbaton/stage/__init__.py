"""One stage: what joins a hand-off machine, a connector and an inference engine."""
