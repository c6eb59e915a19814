"""Attention whose keys are mixtures of Gaussians.

Operators: mgk_attention, smgk_attention (Eq. 8–12), mlk_attention, smlk_attention (Eq. 14), explain_backend, warmup.
Layers: Attention and MultiheadAttention, configured by Variant, VARIANTS and PRESETS; Cache for decoding.
Parts of layers: the feature maps FAVOR and DPFP, the position embedding Rotary.

Shapes: B batch, H query heads, Hk key heads, M components, L queries, S keys, D head dimension, E value dimension,
F features, N packed sequences.
"""

try:
    from mgk._core.deprecated_paths import install as _install_deprecated_paths
    from mgk.attention import Attention
    from mgk.cache import Cache
    from mgk.features import DPFP, FAVOR
    from mgk.functional import (
        BackendChoice,
        explain_backend,
        mgk_attention,
        mlk_attention,
        smgk_attention,
        smlk_attention,
    )
    from mgk.multihead import MultiheadAttention
    from mgk.precompile import Warmup, warmup
    from mgk.rotary import Rotary
    from mgk.variants import PRESETS, VARIANTS, Preset, Variant
except KeyboardInterrupt:
    # Importing torch takes seconds, before mgk.cli can handle Ctrl-C in the command `mgk` or `python -m mgk`.
    import os
    import sys

    if os.path.basename(sys.argv[0]) not in ("mgk", "mgk.exe", "-m"):
        raise
    print("mgk: interrupted", file=sys.stderr)
    sys.exit(130)

__version__ = "0.2.0"

__all__ = [
    "DPFP",
    "FAVOR",
    "PRESETS",
    "VARIANTS",
    "Attention",
    "BackendChoice",
    "Cache",
    "MultiheadAttention",
    "Preset",
    "Rotary",
    "Variant",
    "Warmup",
    "explain_backend",
    "mgk_attention",
    "mlk_attention",
    "smgk_attention",
    "smlk_attention",
    "warmup",
]

_install_deprecated_paths()
