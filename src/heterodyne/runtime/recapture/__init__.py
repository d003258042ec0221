"""What the script changes between two steps: seen before the next one, and followed by capturing the model as it is now."""
