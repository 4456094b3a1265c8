"""Write scikit-learn's breast cancer table as a file that `fastfedul train` reads.

Each row has 30 measurements of a tumour; the label says whether it is benign. The
array `clients` says which of five clinics has which training row.

    python make_data.py tumours.npz
"""

from __future__ import annotations

import sys

import numpy as np
from sklearn.datasets import load_breast_cancer

CLINICS = ("Aarhus", "Bergen", "Chania", "Delft", "Evora")
NUM_TEST = 169


def main(path: str) -> None:
    """Scale the columns, split off a test part and deal the rest to the clinics."""
    features, labels = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    mean, spread = features[train].mean(axis=0), features[train].std(axis=0)
    scaled = (features - mean) / spread
    np.savez(
        path,
        x_train=scaled[train],
        y_train=labels[train],
        x_test=scaled[test],
        y_test=labels[test],
        clients=np.array(CLINICS)[np.arange(len(train)) % len(CLINICS)],
    )


if __name__ == "__main__":
    main(sys.argv[1])
