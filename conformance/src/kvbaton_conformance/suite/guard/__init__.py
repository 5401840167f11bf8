"""The guard level: core's guard alone against a scripted plugin."""
