"""Variants of attention along a few axes, and presets: the settings of the paper and of the authors' code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mgk._core.validation import fail, flag, number, one_of, positive_integer

AXES = {
    "similarity": ("gaussian", "dot", "between", "linear"),
    "keys": ("independent", "shifted"),
    "prior": ("uniform", "learned", "em"),
    "assignment": ("soft", "hard"),
    "variance": ("fixed", "learned", "em"),
}


@dataclass(frozen=True)
class Variant:
    """The kind of attention that a layer computes.

    Args:
        similarity: ``"gaussian"`` (Eq. 9), ``"dot"`` (Eq. 8), ``"between"`` (a learned τ per head, 0 is dot and 1
            gaussian) or ``"linear"`` (Eq. 14).
        keys: ``"independent"``, one projection per component, or ``"shifted"``, one projection and a learned shift per
            component.
        prior: ``"uniform"``, ``"learned"`` by gradient descent, or ``"em"``, updated from the responsibilities (Soft-E
            in Table 4).
        assignment: ``"soft"`` (Eq. 10) or ``"hard"`` (Eq. 12).
        variance: Variance per head and component: ``"fixed"``, ``"learned"`` in log space, or ``"em"`` (Eq. 13).
        normalise: If True, queries and keys are scaled to norm 1, as in the paper's remark on Eq. 6.
        components: Number of components, if the variant fixes it. Default: the layer's ``num_components``.
        em_momentum: Weight of the old prior and variance in an EM update.
        variance_floor: Minimum variance of ``"em"``.

    Examples:
        >>> variant = mgk.Variant(similarity="between", keys="independent", variance="learned")
        >>> mgk.Attention(64, 2, variant=variant, num_components=3)(torch.randn(1, 10, 64)).shape
        torch.Size([1, 10, 64])
    """

    similarity: str = "gaussian"
    keys: str = "shifted"
    prior: str = "learned"
    assignment: str = "soft"
    variance: str = "fixed"
    normalise: bool = False
    components: int | None = None
    em_momentum: float = 0.0
    variance_floor: float = 1e-4

    def __post_init__(self) -> None:
        for axis, known in AXES.items():
            one_of(axis, getattr(self, axis), known)
        flag("normalise", self.normalise)
        if self.components is not None:
            positive_integer("components", self.components)
        number("em_momentum", self.em_momentum, 0, 1)
        number("variance_floor", self.variance_floor, 0, above=True)
        if self.assignment == "hard":
            if self.prior != "uniform":
                fail("prior", "must be 'uniform' with assignment 'hard', which ignores it (Eq. 12)")
            if self.variance != "fixed":
                fail("variance", "must be 'fixed' with assignment 'hard', the limit of equal variances going to 0")
        if self.similarity == "linear" and (
            self.assignment == "hard" or self.prior == "em" or self.variance != "fixed" or self.normalise
        ):
            required = "soft assignment, a uniform or learned prior, fixed variance and normalise=False"
            fail("similarity", f"'linear' requires {required}")


VARIANTS = {
    "softmax": Variant("dot", "independent", "uniform", components=1),
    "linear": Variant("linear", "independent", "uniform", components=1),
    "mgk": Variant("gaussian", "independent", "learned"),
    "smgk": Variant("gaussian", "shifted", "learned"),
    "mlk": Variant("linear", "independent", "learned"),
    "smlk": Variant("linear", "shifted", "learned"),
    "mgk-hard": Variant("gaussian", "independent", "uniform", "hard"),
    "mgk-em": Variant("gaussian", "independent", "em"),
    "smgk-hard": Variant("gaussian", "shifted", "uniform", "hard"),
    "smgk-em": Variant("gaussian", "shifted", "em"),
    "gaussian": Variant("gaussian", "independent", "uniform", components=1),
}


@dataclass(frozen=True)
class LinearForm:
    """Deviations of the linear variants from Eq. 14."""

    mix_before_map: bool = False  # φ(Σ π k) instead of Σ π φ(k)
    normalise: bool = True  # divide by φ(q)·z
    length_scaled: bool = False  # features of queries and keys times S^(-1/4)
    l1_features: bool = False  # features of each token divided by their sum
    width_scaled: bool = False  # output times 1/√D

    def check_supported(self, **options: Any) -> None:
        """Check that options for parts of a sequence are None if the output is scaled by the sequence length."""
        for name, option in options.items():
            if self.length_scaled and option is not None:
                fail(name, "is not supported by preset 'ref-lra', whose linear attention is scaled by the whole length")

    def output_factor(self, length: int, head_dim: int) -> float:
        """Return the factor by which outputs and weights are multiplied."""
        return (length**-0.5 if self.length_scaled else 1.0) * (head_dim**-0.5 if self.width_scaled else 1.0)


@dataclass(frozen=True)
class Preset:
    """Settings that the paper leaves to the implementation.

    Examples:
        >>> mgk.PRESETS["ref-lm"].component_scales  # the authors' language model: unequal variances
        (1.0, 3.0)
        >>> attention = mgk.Attention(64, 2, variant="mgk", preset="ref-lm")
    """

    variance_width: int | None = None  # σ² = √variance_width; None is the head dimension
    component_scales: tuple[float, ...] | None = None  # factors of 1/σ² per component
    prior_sharing: str = "head"  # one prior per "head", per "layer", or per head and key "position"
    prior_clamped: bool = False  # π is a parameter clamped to [0, 1] instead of a softmax
    shifts_anchored: bool = False  # k − μ_r, μ_1 = 0 and the others N(0, 0.5²), instead of k + b_r, b ~ N(0, 1)
    max_positions: int | None = None
    bias: bool = True
    dropout: float = 0.0
    linear: LinearForm = LinearForm()


PRESETS = {
    "paper": Preset(),
    "ref-lra": Preset(
        variance_width=32,
        prior_sharing="layer",
        prior_clamped=True,
        shifts_anchored=True,
        dropout=0.1,
        linear=LinearForm(mix_before_map=True, normalise=False, length_scaled=True),
    ),
    "ref-lm": Preset(
        component_scales=(1.0, 3.0),
        prior_sharing="position",
        prior_clamped=True,
        shifts_anchored=True,
        max_positions=256,
        bias=False,
        linear=LinearForm(l1_features=True, width_scaled=True),
    ),
}
