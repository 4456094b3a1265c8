"""AWS KMS as a server of its own: moto's, with the one thing that it does wrong mended.

securesystemslib sends a digest to be signed, as AWS recommends. moto 5.2.5 hashes that
digest once more: it says of `MessageType` that DIGEST is not yet implemented. The mend
is in the server's process alone, so the process that signs is as it is with AWS.
"""

from __future__ import annotations

import sys
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from moto.kms import utils
from moto.server import ThreadedMotoServer


def sign_rsa(self: Any, message: bytes, signing_algorithm: str) -> Any:
    """Sign a digest with an RSA key."""
    find = self._RSAPrivateKey__padding_and_hash_algorithm
    padding, algorithm = find(signing_algorithm)
    return self.private_key.sign(message, padding, Prehashed(algorithm))


def sign_ecdsa(self: Any, message: bytes, signing_algorithm: str) -> Any:
    """Sign a digest with an ECDSA key."""
    algorithm = self._ECDSAPrivateKey__hash_algorithm(signing_algorithm)
    return self.private_key.sign(message, ec.ECDSA(Prehashed(algorithm)))


def main() -> None:
    """Serve until standard input ends; the first line printed is the port."""
    if "as-it-is" not in sys.argv:
        utils.RSAPrivateKey.sign = sign_rsa  # type: ignore[method-assign]
        utils.ECDSAPrivateKey.sign = sign_ecdsa  # type: ignore[method-assign]
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
