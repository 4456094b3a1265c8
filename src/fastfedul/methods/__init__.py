"""Methods that forget: one file or folder for each.

>>> import fastfedul as ff
>>> ff.methods.FastFedUL(skew=ff.methods.Scalar(0.07)).skew
Scalar(damping=0.07, damped='all')
"""

from typing import TYPE_CHECKING

from fastfedul.lazy_names import lazy_names

if TYPE_CHECKING:
    from fastfedul.methods.cdp import CDP as CDP
    from fastfedul.methods.fast_fedul.method import FastFedUL as FastFedUL
    from fastfedul.methods.fast_fedul.removal import Removal as Removal
    from fastfedul.methods.fast_fedul.skews import Kronecker as Kronecker
    from fastfedul.methods.fast_fedul.skews import NoSkew as NoSkew
    from fastfedul.methods.fast_fedul.skews import Scalar as Scalar
    from fastfedul.methods.federaser import FedAccum as FedAccum
    from fastfedul.methods.federaser import FedEraser as FedEraser
    from fastfedul.methods.fedrecover import FedRecover as FedRecover
    from fastfedul.methods.kd import KD as KD
    from fastfedul.methods.pga import PGA as PGA
    from fastfedul.methods.protocol import Method as Method
    from fastfedul.methods.protocol import Needs as Needs
    from fastfedul.methods.protocol import UnlearnRequest as UnlearnRequest
    from fastfedul.methods.protocol import UnlearnResult as UnlearnResult
    from fastfedul.methods.retrain import Retrain as Retrain

_NAMES = {
    "methods.protocol": ("Method", "Needs", "UnlearnRequest", "UnlearnResult"),
    "methods.fast_fedul.method": ("FastFedUL",),
    "methods.fast_fedul.skews": ("Kronecker", "NoSkew", "Scalar"),
    "methods.fast_fedul.removal": ("Removal",),
    "methods.retrain": ("Retrain",),
    "methods.federaser": ("FedAccum", "FedEraser"),
    "methods.fedrecover": ("FedRecover",),
    "methods.pga": ("PGA",),
    "methods.kd": ("KD",),
    "methods.cdp": ("CDP",),
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)
