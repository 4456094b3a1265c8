"""Help of options that several commands have, so that each says the same of them."""

from fastfedul.methods.fast_fedul.skews import PAPERS_DAMPING

METHOD = "Method that forgets; `fastfedul methods` lists them."
METHOD_OR_OWN = f"{METHOD} [or your own: package.module:Class]"
SKEW = (
    "How the others' training pulls the model back. kronecker: most where their "
    "updates differ most. scalar: the same part of everything in every round, as in "
    "the paper. none: not at all."
)
SKEW_DEFAULT = "kronecker; scalar with --damping"
DAMPING = (
    "Damping of skew scalar: the part that a round pulls back, 0 to 1; the paper's "
    "alpha with a minus. More keeps accuracy, less removes more. Below 0, down to -1: "
    "the paper's formula as printed, without a bound."
)
DAMPING_DEFAULT = f"{PAPERS_DAMPING:g}"
SETTING_FORM, SETTING_EXAMPLE = "NAME=VALUE", "minimum_coverage=0.5"
SETTING = (
    f"Another setting of the method, such as {SETTING_EXAMPLE}; `fastfedul methods "
    "METHOD` lists them. Can be repeated."
)
ERASE_FLAGS = "--erase/--keep-history"
ERASE = "Also erase the clients' updates from the ledger, or keep them there."
