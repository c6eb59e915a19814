"""Colours of the variants, the same in every figure. They differ also for readers with colour-vision deficiencies."""

COLOURS = {
    "softmax": "#4d4d4d",
    "smgk": "#d55e00",
    "mgk": "#0072b2",
    "smgk-hard": "#e69f00",
    "mgk-hard": "#56b4e9",
    "smgk-em": "#8c2d04",
    "gaussian": "#7570b3",
    "mgk-em": "#08306b",
    "linear": "#999999",
    "mlk": "#009e73",
    "smlk": "#cc79a7",
    "diff": "#009e73",
    "mla": "#e69f00",
    "smgk-query-shifts": "#cc79a7",
}
# Names of the variants in figures.
NAMES = {
    "softmax": "softmax",
    "smgk": "sMGK",
    "mgk": "MGK",
    "smgk-hard": "sMGK hard",
    "mgk-hard": "MGK hard",
    "smgk-em": "sMGK EM",
    "gaussian": "Gaussian",
    "mgk-em": "MGK EM",
    "linear": "linear",
    "mlk": "MLK",
    "smlk": "sMLK",
    "diff": "differential",
    "mla": "latent (MLA)",
    "smgk-query-shifts": "sMGK, shifts per query head",
}
OTHER = "#6a51a3"  # variants without a colour


def colour_of(variant: str) -> str:
    """Return the colour of a variant."""
    return COLOURS.get(variant, OTHER)


def name_of(variant: str) -> str:
    """Return the name of a variant in figures."""
    return NAMES.get(variant, variant)
