"""The smallest federation that can be steered from a test, without PyTorch."""
