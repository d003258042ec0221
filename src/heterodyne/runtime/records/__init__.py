"""What is noted of a run: metrics, timeline, progress, and where they are kept."""
