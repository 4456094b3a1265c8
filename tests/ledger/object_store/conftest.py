"""A real S3 server for the tests of this folder, and the environment to reach it."""

from tests.support.s3_server import reached, server

__all__ = ["reached", "server"]
