"""Figures of the paper, for comparison: main accuracy, backdoor accuracy.

Thanh Trung Huynh et al., "Fast-FedUL: A Training-Free Federated Unlearning with
Provable Skew Resilience", ECML PKDD 2024: the tables on the edge-case backdoor, on
the pixel backdoor (supplement) and on the variants. Its third data set is OCTMNIST.
"""

from __future__ import annotations

Scores = tuple[float, float]

MAIN_TABLES: dict[str, dict[str, dict[str, Scores]]] = {
    "edge-case": {
        "mnist": {
            "before": (0.9833, 0.7340),
            "retrained": (0.9846, 0.0000),
            "federaser": (0.9757, 0.0027),
            "cdp": (0.9808, 0.7287),
            "pga": (0.8320, 0.0080),
            "kd": (0.9792, 0.0319),
            "fast-fedul-paper": (0.9737, 0.0027),
        },
        "cifar10": {
            "before": (0.9773, 0.8724),
            "retrained": (0.9640, 0.0009),
            "federaser": (0.9591, 0.0050),
            "cdp": (0.9577, 0.7612),
            "pga": (0.8089, 0.0638),
            "kd": (0.9583, 0.0261),
            "fast-fedul-paper": (0.9546, 0.0061),
        },
        "oct": {
            "before": (0.8966, 0.9711),
            "retrained": (0.8990, 0.0040),
            "federaser": (0.8951, 0.0040),
            "cdp": (0.8959, 0.9664),
            "pga": (0.8435, 0.0000),
            "kd": (0.8721, 0.0141),
            "fast-fedul-paper": (0.8817, 0.0047),
        },
    },
    "pixel": {
        "mnist": {
            "before": (0.9878, 0.9220),
            "retrained": (0.9875, 0.0036),
            "federaser": (0.9878, 0.0036),
            "cdp": (0.9878, 0.9056),
            "pga": (0.8092, 0.0346),
            "kd": (0.9876, 0.0780),
            "fast-fedul-paper": (0.9847, 0.0018),
        },
        "cifar10": {
            "before": (0.9657, 0.8913),
            "retrained": (0.9520, 0.0092),
            "federaser": (0.9474, 0.0096),
            "cdp": (0.9463, 0.7952),
            "pga": (0.7683, 0.0273),
            "kd": (0.9467, 0.0529),
            "fast-fedul-paper": (0.9413, 0.0132),
        },
        "oct": {
            "before": (0.8837, 0.8869),
            "retrained": (0.8847, 0.0083),
            "federaser": (0.8551, 0.0240),
            "cdp": (0.8810, 0.8729),
            "pga": (0.7844, 0.0137),
            "kd": (0.8550, 0.0475),
            "fast-fedul-paper": (0.8752, 0.0073),
        },
    },
}
"""By attack, data set and method."""

VARIANTS: dict[str, dict[str, Scores]] = {
    "edge-case": {
        "fast-fedul-paper": (0.9737, 0.0027),
        "fast-fedul-1": (0.9689, 0.1074),
        "fast-fedul-2": (0.8051, 0.0000),
        "fast-fedul-3": (0.8527, 0.0013),
    },
    "pixel": {
        "fast-fedul-paper": (0.9847, 0.0018),
        "fast-fedul-1": (0.9654, 0.1542),
        "fast-fedul-2": (0.8143, 0.0000),
        "fast-fedul-3": (0.8732, 0.0007),
    },
}
"""On MNIST, by attack and variant."""

TIMES: dict[str, float] = {
    "fast-fedul-paper": 1,
    "cdp": 2,
    "kd": 26,
    "pga": 110,
    "federaser": 1600,
    "retrained": 1000,
}
"""Unlearning time as a multiple of Fast-FedUL's, from the text."""

MEAN_ANGLE_BELOW = 10.0
SKEW_IGNORANT_ANGLE_RATIO = 2.6
"""Mean deviation of the last layer in degrees, and how much larger without skew."""

CRITERIA: dict[str, tuple[bool, bool, bool, bool, bool]] = {
    "retrain": (True, True, True, True, False),
    "federaser": (True, True, True, True, False),
    "cdp": (False, True, False, True, True),
    "pga": (False, False, False, True, True),
    "kd": (True, True, True, False, False),
    "fast-fedul-paper": (True, True, True, True, True),
}
"""The paper's marks for C1 to C5: utility, irreversible learning, non-determinism,
privacy, efficiency."""
