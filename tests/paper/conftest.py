"""The small poisoned federation of the methods' tests."""

from tests.unlearn.conftest import small_run

__all__ = ["small_run"]
