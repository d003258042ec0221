"""Forward and backward of a rank's part of the model: what it runs, when, and what it exchanges with other stages."""
