"""The verdict of a run: as values, as JSON, as one page."""
