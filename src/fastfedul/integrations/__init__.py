"""The edge: where the stages meet frameworks. Each module needs its own extra."""
